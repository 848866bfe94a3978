"""Every family with every transform: it builds and decodes to its full forward, or is refused with a reason."""

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from jax.sharding import PartitionSpec as P
from variants import inputs, relative, weights

from gva_jax import sharding
from gva_jax.attention import FAMILIES as REGISTRY
from gva_jax.attention import build
from gva_jax.attention.outputs import OUTPUT_TRANSFORMS
from gva_jax.attention.values import VALUE_TRANSFORMS
from gva_jax.compositions import CHOICES
from gva_jax.config import AttentionConfig, ConfigError, MeshConfig, ModelConfig
from gva_jax.model import Transformer
from gva_jax.train.optimizer import decayed

SCRIPT = Path(__file__).parents[2] / "scripts" / "compositions.py"
spec = importlib.util.spec_from_file_location("compositions_script", SCRIPT)
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)

TINY = dict(num_heads=4, head_dim=8)
FAMILIES = {
    "mha": AttentionConfig("mha", **TINY),
    "gqa": AttentionConfig("gqa", num_kv_heads=2, k_norm=True, **TINY),
    "mqa": AttentionConfig("mqa", num_kv_heads=1, **TINY),
    "mla": AttentionConfig("mla", latent_dim=12, rope_dim=4, **TINY),
    "gva": AttentionConfig("gva", num_kv_heads=2, rope_dim=4, q_norm=True, **TINY),
    "gva_full": AttentionConfig("gva", num_kv_heads=2, q_norm=True, **TINY),
    "keyless": AttentionConfig("keyless", num_kv_heads=2, **TINY),
    "kv": AttentionConfig("kv", num_kv_heads=2, rope_dim=4, **TINY),
    "kv_full": AttentionConfig("kv", num_kv_heads=2, **TINY),
    "gta": AttentionConfig("gta", num_kv_heads=2, **TINY),
}


def test_the_registries_are_what_a_config_may_name():
    assert set(VALUE_TRANSFORMS) == set(CHOICES["value_transform"])
    assert set(OUTPUT_TRANSFORMS) == set(CHOICES["output_transform"])
    assert {a.family for a in FAMILIES.values()} == {a.family for a in table.FAMILIES.values()} == set(REGISTRY)


def test_the_table_in_the_docs_is_up_to_date():
    assert table.TABLE.read_text() == table.render(), "run scripts/compositions.py"


def refused(family: str, **fields) -> str | None:
    try:
        build(replace(FAMILIES[family], **fields), parent=None)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_combination_is_refused_exactly_if_one_of_its_parts_is(family):
    alone = {(field, name): refused(family, **{field: name}) for field, names in CHOICES.items() for name in names}
    for names in itertools.product(*CHOICES.values()):
        parts = [alone[part] for part in zip(CHOICES, names, strict=True) if alone[part]]
        message = refused(family, **dict(zip(CHOICES, names, strict=True)))
        assert message in parts if parts else message is None


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gva", dict(key_transform="silu"), "key_transform = 'silu': keys of GVA are never made, they are folded"),
        ("keyless", dict(key_transform="silu"), "key_transform = 'silu': keys of Keyless are never made"),
        ("gta", dict(key_transform="silu"), "key_transform = 'silu': keys of GTA are never made"),
        ("mla", dict(key_transform="silu"), "key_transform = 'silu': keys of MLA are never made"),
        ("kv", dict(key_transform="silu"), "key_transform = 'silu': K=V has no keys of its own"),
        ("kv_full", dict(key_transform="silu"), "key_transform = 'silu': K=V has no keys of its own"),
        ("mla", dict(value_transform="silu"), "value_transform = 'silu': MLA caches a latent"),
        ("kv_full", dict(value_transform="reduced_glu"), "value_transform = 'reduced_glu': its values of width 5"),
        ("gqa", dict(value_transform="gelu"), "value_transform = 'gelu': must be one of none, silu, tanh_gate"),
        ("gqa", dict(output_transform="g1"), "output_transform = 'g1': must be one of none, headwise_g1"),
        ("gqa", dict(query_transform="relu"), "query_transform = 'relu': must be one of none, silu"),
        ("gqa", dict(value_moments=(0.0, 1.0, 0.0, 1.0)), "value_moments = (0.0, 1.0, 0.0, 1.0): only value_transform"),
        (
            "gqa",
            dict(value_transform="affine_match", value_moments=(0.0, 0.0, 0.0, 1.0)),
            "value_moments = (0.0, 0.0, 0.0, 1.0): must be mean and deviation",
        ),
        (
            "gqa",
            dict(value_transform="affine_match", value_moments=(0.0, "1", 0.0, 1.0)),
            "value_moments = (0.0, '1', 0.0, 1.0): must be mean and deviation",
        ),
        ("gqa", dict(value_transform="affine_match", value_moments=1.0), "value_moments = 1.0: must be mean and dev"),
    ],
)
def test_what_cannot_be_is_refused_when_the_config_is_built(family, fields, message):
    with pytest.raises(ConfigError) as error:
        replace(FAMILIES[family], **fields)
    assert str(error.value).startswith(message)
    if "value_moments" not in fields:  # and by the module, where there is no config
        module = build(FAMILIES[family], parent=None)
        with pytest.raises(ConfigError) as error:
            module.clone(**fields)
        assert str(error.value).split(":")[0] == message.split(":")[0]


@pytest.mark.parametrize("value", VALUE_TRANSFORMS)
def test_every_parameter_has_a_sharding_rule(value):
    """Gates of values are split like groups, gates of outputs like heads; nothing is replicated silently."""
    attention = replace(FAMILIES["gqa"], value_transform=value, output_transform="elementwise_g1")
    config = ModelConfig(64, 2, 16, 24, attention)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
    specs = sharding.state_shardings(shapes, config, mesh)["layers"]["attention"]
    assert specs["output_transform"]["gate"]["kernel"].spec == P(None, "fsdp", "tensor")
    gates = jax.tree.map(lambda s: s.spec, specs.get("value_transform", {}))
    if value == "state_gate":
        assert gates == {"kernel": P(None, None, "tensor"), "bias": P(None, "tensor")}
    else:
        has = value in ("headwise_g2", "full_glu", "reduced_glu")
        assert gates == ({"gate": {"kernel": P(None, "fsdp", "tensor")}} if has else {})


def test_weight_decay_shrinks_gates_but_no_bias():
    config = ModelConfig(64, 1, 16, 24, replace(FAMILIES["gqa"], value_transform="state_gate"))
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    assert decayed(shapes)["layers"]["attention"]["value_transform"] == {"kernel": True, "bias": False}


# ---- numbers ---------------------------------------------------------------------------------------------------------

# Each kind of family with each value transform, and with them each output transform and each activation in turn. MHA
# and MQA are GQA, Keyless and full RoPE are GVA, GTA is K=V as far as values go: a few each.
FEW = dict.fromkeys(("mha", "mqa", "keyless", "gta", "kv_full"), ("silu", "reduced_glu"))
FEW["gva_full"] = ("none", "silu", "reduced_glu", "state_gate")


def cases():
    for i, family in enumerate(FAMILIES):
        for j, value in enumerate(FEW.get(family, VALUE_TRANSFORMS)):
            output = list(OUTPUT_TRANSFORMS)[(i + j) % 4]
            fields = dict(value_transform=value, output_transform=output, query_transform=("silu", "none")[j % 2])
            if refused(family, key_transform="silu") is None:
                fields["key_transform"] = ("none", "silu")[j // 2 % 2]
            if refused(family, value_transform=value) is not None:
                if family != "mla" or j >= 4:
                    continue
                fields["value_transform"] = "none"
            yield family, fields


@pytest.mark.parametrize(("family", "fields"), thinned(cases(), 3), ids=str)
def test_decoding_equals_the_forward(family, fields):
    with jax.enable_x64(True):
        kw = dict(dtype="float64", param_dtype="float64", implementation="reference")
        module = build(replace(FAMILIES[family], **fields), **kw)
        variables, x = weights(module, 16), inputs(2, 6, 16)

        @jax.jit
        def run(variables, x):
            cache = module.init_cache(2, 128, jnp.float64, "tokens_major")
            assert cache.nbytes == module.cache_size() * 2 * 128 * 8
            prompt, cache = module.apply(variables, x[:, :4], cache, lengths=jnp.array([4, 1]), method="prefill")
            rest, _ = module.apply(variables, jnp.stack([x[0, 4:6], x[1, 1:3]]), cache, method="decode")
            return module.apply(variables, x), prompt, rest

        full, prompt, rest = jax.device_get(run(variables, x))
    assert relative(prompt[0], full[0, :4]) < 1e-12 and relative(rest[0], full[0, 4:]) < 1e-12
    assert relative(rest[1], full[1, 1:3]) < 1e-12 and np.abs(prompt[1, 0] - full[1, 0]).max() < 1e-12
    is_first_gone = fields["output_transform"] == "xsa"
    assert (full[:, 0] == 0).all() == (prompt[:, 0] == 0).all() == is_first_gone, "a token that sees only itself"
    assert np.abs(full[:, 1:]).min() > 0
