"""`gva info`: the numbers the papers fix, cache bytes against allocated arrays, FLOPs against independent counts."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from cover import thinned
from jax.extend.core import jaxprs_in_params

from gva_jax import cli
from gva_jax.attention.registry import build
from gva_jax.config import AttentionConfig, DataConfig, ModelConfig, RunConfig, load, shipped
from gva_jax.info import describe, matching_gqa, training_flops
from gva_jax.model import Transformer
from gva_jax.train.losses import summed_loss


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gatedv_small", 2_328_192),
        ("gatedv_medium", 26_158_464),
        ("gqa_350m", 340_968_448),
        # Per layer -D G d + H d n + D r (-196,608 at r = 16) and one Q-norm scale of width d.
        ("gva_350m", 340_968_448 - 24 * (196_608 - 64)),
        ("gva_350m_r24", 340_968_448 + 24 * (-1024 * 4 * 64 + 16 * 64 * 40 + 1024 * 24 + 64)),
        ("gva_350m_baseline", 340_968_448 + 24 * (-1024 * 4 * 64 + 16 * 64 * 64)),
        # The variants of the medium size: Wg is D x G; D x G d; and three maps of width 258 = 6 x 43 for two of 384.
        ("gatedv_small_silu", 2_328_192),
        ("gatedv_medium_silu", 26_158_464),
        ("gatedv_medium_tanh_gate", 26_158_464),
        ("gatedv_medium_headwise_g2", 26_186_112),
        ("gatedv_medium_full_glu", 27_927_936),
        ("gatedv_medium_reduced_glu", 26_186_112),
        ("gva_350m_silu", 340_968_448 - 24 * (196_608 - 64)),
    ],
)
def test_parameters(name, parameters):
    figures = describe(load(name))
    assert figures["parameters"] == parameters
    assert sum(figures["parameters_by_part"].values()) == parameters


@pytest.mark.parametrize(
    ("name", "scalars", "ratio"),
    [
        ("gva_350m", 272, 0.53125),
        ("gva_350m_r24", 280, 0.546875),
        ("gva_350m_scale_matched", 256, 0.5),
        ("mla_350m", 272, 0.53125),
        ("gqa_350m", 512, 1.0),
        ("gatedv_small", 256, 1.0),
        ("gatedv_medium_silu", 768, 1.0),
        ("gatedv_medium_reduced_glu", 6 * (64 + 43), 107 / 128),
        ("gva_350m_silu", 272, 0.53125),
    ],
)
def test_cache(name, scalars, ratio):
    config = load(name)
    figures, layers = describe(config), config.model.num_layers
    width = jnp.dtype(config.model.dtype).itemsize
    assert figures["cache_ratio_to_gqa"] == ratio
    assert figures["cache_scalars_per_token_per_layer"] == scalars
    assert figures["cache_scalars_per_token"] == scalars * layers
    assert figures["cache_bytes_per_token_per_layer"] == scalars * width
    assert figures["cache_bytes_per_token"] == scalars * width * layers
    assert figures["gqa_cache_bytes_per_token"] == round(scalars * width * layers / ratio)


def test_cache_bytes_are_those_of_the_arrays_and_follow_their_dtype(monkeypatch):
    """Not a formula: a cache that allocates more is reported larger."""
    config = load("quickstart")
    before = describe(config)
    wider = replace(config, model=replace(config.model, dtype="float64"))
    assert describe(wider)["cache_bytes_per_token"] == 2 * before["cache_bytes_per_token"]

    allocate = Transformer.init_cache
    double = lambda cache: replace(cache, values=jnp.concatenate([cache.values] * 2, axis=1))
    monkeypatch.setattr(Transformer, "init_cache", lambda *a, **k: tuple(map(double, allocate(*a, **k))))
    attention = config.model.attention
    more = config.model.num_layers * attention.num_kv_heads * attention.head_dim
    assert describe(config)["cache_scalars_per_token"] == before["cache_scalars_per_token"] + more


@pytest.mark.parametrize(("heads", "groups"), [(16, 4), (6, 1), (2, 1), (9, 1), (12, 3), (10, 2)])
def test_the_gqa_that_mla_is_measured_against(heads, groups):
    mla = AttentionConfig(family="mla", num_heads=heads, latent_dim=64, rope_dim=16)
    matching = matching_gqa(ModelConfig(attention=mla)).attention
    assert (matching.family, matching.num_heads, matching.num_kv_heads) == ("gqa", heads, groups)


@pytest.mark.parametrize("name", shipped())
def test_full_size_configs_build_and_train_in_shape(name):
    config = load(name)
    tokens = jax.ShapeDtypeStruct((config.data.batch_size, config.data.context_length), jnp.int32)
    logits = jax.eval_shape(Transformer(config.model).init_with_output, jax.random.key(0), tokens)[0]
    assert logits.shape == (*tokens.shape, config.model.vocab_size) and logits.dtype == jnp.float32


@pytest.mark.parametrize("name", ["gva_350m", "gva_350m_baseline", "gqa_350m", "mla_350m"])
def test_full_size_layers_decode_in_shape(name):
    """Two layers at full width: caches are tuples with one part a layer, so more would only be traced again."""
    config, shape = load(name), jax.ShapeDtypeStruct
    model, T = Transformer(replace(config.model, num_layers=2)), config.data.context_length
    tokens, token, lengths = shape((2, T), jnp.int32), shape((2, 1), jnp.int32), shape((2,), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    caches = jax.eval_shape(lambda: model.init_cache(2, T))
    prefill = lambda v, x, c, n: model.apply(v, x, c, lengths=n, last=True, method="prefill")
    logits, caches = jax.eval_shape(prefill, variables, tokens, caches, lengths)
    assert logits.shape == (2, 1, config.model.vocab_size)
    logits, _ = jax.eval_shape(lambda v, x, c: model.apply(v, x, c, method="decode"), variables, token, caches)
    assert logits.shape == (2, 1, config.model.vocab_size)


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "scored"), [("materialised", 64), ("absorbed", 64 + 16)])
def test_flops_of_gva_350m_by_hand(form, scored):
    """Decoding is absorbed either way. Making the keys costs what absorbing the map costs."""
    D, H, G, d, r, hidden, vocab, layers, T = 1024, 16, 4, 64, 16, 3072, 50_304, 24, 2048
    projections = D * H * d + D * G * d + D * r + d * H * (d - r) + H * d * D
    scores_and_values = 2 * H * (scored + d) * (T + 1) // 2
    forward = layers * (2 * (projections + 3 * D * hidden) + scores_and_values) + 2 * D * vocab
    config = load("gva_350m")
    assert config.model.attention.form == "absorbed"
    model = replace(config.model, attention=replace(config.model.attention, form=form))
    figures = describe(replace(config, model=model))["flops_per_token"]
    assert figures["forward"] == forward
    assert figures["training"] == 3 * forward
    at_full_context = layers * (2 * (projections + 3 * D * hidden) + 2 * H * (d + r + d) * T) + 2 * D * vocab
    assert figures["decode"] == at_full_context


KINDS = {
    "mha": AttentionConfig(family="mha", num_heads=4, head_dim=16),
    "gqa": AttentionConfig(family="gqa", num_heads=4, num_kv_heads=2, head_dim=16, q_norm=True, k_norm=True),
    "mqa": AttentionConfig(family="mqa", num_heads=4, num_kv_heads=1, head_dim=16),
    "mla": AttentionConfig(family="mla", num_heads=4, head_dim=16, latent_dim=24, rope_dim=8),
    "mla xsa": AttentionConfig(
        family="mla", num_heads=4, head_dim=16, latent_dim=24, rope_dim=8, output_transform="xsa"
    ),
    "mla r=0": AttentionConfig(family="mla", num_heads=4, head_dim=16, latent_dim=24, rope_dim=0),
    "gva": AttentionConfig(family="gva", num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=8, q_norm=True),
    "gva r=0": AttentionConfig(family="gva", num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=0),
    "gva full RoPE": AttentionConfig(family="gva", num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=None),
    "gva full RoPE, reduced GLU": AttentionConfig(
        family="gva", num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=None, value_transform="reduced_glu"
    ),
    "gva, reduced GLU, gated": AttentionConfig(
        family="gva", num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=8, value_transform="reduced_glu",
        output_transform="elementwise_g1",
    ),
    "gqa, gate of the state": AttentionConfig(
        family="gqa", num_heads=4, num_kv_heads=2, head_dim=16, value_transform="state_gate", output_transform="xsa"
    ),
    "keyless": AttentionConfig(family="keyless", num_heads=4, num_kv_heads=2, head_dim=16),
    "kv": AttentionConfig(family="kv", num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=4),
    "kv full RoPE": AttentionConfig(family="kv", num_heads=4, num_kv_heads=2, head_dim=16),
    "gta": AttentionConfig(family="gta", num_heads=4, num_kv_heads=2, head_dim=16),
    "gva materialised": AttentionConfig(
        family="gva", num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=8, form="materialised"
    ),
}


def tiny(attention, context, **model):
    sizes = dict(vocab_size=48, num_layers=3, model_dim=32, hidden_dim=40)
    return RunConfig(model=ModelConfig(**sizes, attention=attention, **model), data=DataConfig(context_length=context))


@pytest.mark.parametrize("model", [{}, {"tie_embeddings": False, "scan_layers": False, "remat": "dots"}])
@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_forward_flops_are_the_traced_programs(kind, model):
    """The traced forward scores all T positions, so it costs what the formula says of a mean of T: (2T - 1 + 1) / 2."""
    T = 32
    config = tiny(KINDS[kind], 2 * T - 1, **model)
    transformer, tokens = Transformer(config.model), jnp.zeros((1, T), jnp.int32)
    variables = jax.eval_shape(transformer.init, jax.random.key(0), tokens)
    counted = matmul_flops(transformer.apply, variables, tokens)
    assert counted == T * describe(config)["flops_per_token"]["forward"]


@pytest.mark.parametrize(
    ("kind", "model"),
    [*((kind, {}) for kind in KINDS if kind != "mha"), ("gva", {"tie_embeddings": False, "scan_layers": False})],
)
def test_training_flops_are_the_traced_programs_without_recomputation(kind, model):
    """Scores are over all T positions, as above. Flash attention makes them a second time: L H T^2 products of k."""
    T, B = 16, 2
    config = tiny(KINDS[kind], 2 * T - 1, **model)
    transformer, tokens = Transformer(config.model), jnp.zeros((B, T), jnp.int32)
    params = jax.eval_shape(transformer.init, jax.random.key(0), tokens)["params"]
    batch = {"inputs": tokens, "targets": tokens, "positions": tokens, "segment_ids": tokens + 1}
    counted = matmul_flops(jax.grad(lambda params: summed_loss(transformer, params, batch)), params)
    width, _ = build(KINDS[kind], parent=None).training_widths()
    again = config.model.num_layers * 4 * 2 * width * T
    assert counted - B * T * again == B * T * training_flops(config)


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_decode_flops_are_the_traced_programs(kind):
    S = 128
    config = tiny(KINDS[kind], S)
    model, token = Transformer(config.model, implementation="reference"), jnp.zeros((1, 1), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), token)
    counted = matmul_flops(
        lambda v, x, c: model.apply(v, x, c, method="decode"), variables, token, model.init_cache(1, S)
    )
    assert counted == describe(config)["flops_per_token"]["decode"]


def matmul_flops(f, *args) -> int:
    """Multiplications and additions of every matrix product in the traced program; a scan's body counts each time."""
    return _count(jax.make_jaxpr(f)(*args).jaxpr)


def _count(jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            lhs, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)
            continue
        # A while loop here is one over blocks of the cache, and the whole cache is one block.
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(_count(inner) for inner in jaxprs_in_params(equation.params))
    return total


# ---- the command -----------------------------------------------------------------------------------------------------


def test_json_has_exactly_these_keys(capsys):
    assert cli.main(["info", "configs/gva_350m.py", "--json", "--model.attention.rope_dim", "24"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == [
        "parameters",
        "parameters_by_part",
        "cache_scalars_per_token",
        "cache_scalars_per_token_per_layer",
        "cache_bytes_per_token",
        "cache_bytes_per_token_per_layer",
        "gqa_cache_bytes_per_token",
        "cache_ratio_to_gqa",
        "flops_per_token",
    ]
    assert list(figures["parameters_by_part"]) == ["embedding", "attention", "mlp", "norms"]
    assert list(figures["flops_per_token"]) == ["forward", "training", "decode"]
    assert figures["cache_ratio_to_gqa"] == 0.546875


def test_an_untied_output_is_a_part(capsys):
    assert cli.main(["info", "quickstart", "--json", "--model.tie_embeddings", "False"]) == 0
    model, parts = load("quickstart").model, json.loads(capsys.readouterr().out)["parameters_by_part"]
    assert parts["output"] == parts["embedding"] == model.vocab_size * model.model_dim


def test_the_table_shows_the_figures(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["info", "gva_350m"]) == 0
    out = capsys.readouterr().out
    for figure in ("336,251,392", "0.53125", "544", "1,024", "13,056", "24,576", "51,511,296"):
        assert figure in out
