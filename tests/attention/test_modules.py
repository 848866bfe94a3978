"""The modules' interface: formulas, parameters, dtypes, cache sizes, refusals, use in someone else's model."""

import contextlib
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from variants import VARIANTS, D, inputs, relative, weights

from gva_jax.attention import (
    FAMILIES,
    GroupedTiedAttention,
    GroupedValueAttention,
    KeyIsValueAttention,
    LatentAttention,
    MultiHeadAttention,
    build,
    layers,
)
from gva_jax.config import AttentionConfig, ConfigError

B, T = 2, 9
F32, F64, BF16 = (jnp.dtype(t) for t in ("float32", "float64", "bfloat16"))


@pytest.fixture
def unchecked():
    """As for users: without the shape checks that the tests install."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# ---- what is computed: the design's formulas, written once more in NumPy ---------------------------------------------


def rms_norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def rope(x, positions, base=10_000.0):
    """x (B, T, H, r): pairs (i, i + r/2) as complex numbers, turned by position * base^(-2i/r)."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[..., None, None] * base ** (-np.arange(half) / half))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def expected(module, params, x, positions):
    """Keys and values are made for every query head; the rest is textbook."""
    H, d = module.num_heads, module.head_dim
    P = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    of_head = lambda a: np.repeat(a, H // a.shape[2], axis=2)  # query head h reads group h // (H // G)
    heads = lambda a, width: a.reshape(*a.shape[:2], -1, width)
    q = heads(x @ P["query"]["kernel"], d)
    if module.q_norm:
        q = rms_norm(q, P["query_norm"]["scale"])
    if isinstance(module, MultiHeadAttention):
        k, v = (of_head(heads(x @ P[name]["kernel"], d)) for name in ("key", "value"))
        if module.k_norm:
            k = rms_norm(k, P["key_norm"]["scale"])
        q, k = rope(q, positions), rope(k, positions)
    else:
        r = module.rope_dim
        n = d - (r or 0)
        if isinstance(module, GroupedTiedAttention):
            r = d // 2
            n = d - r
        if isinstance(module, KeyIsValueAttention):
            v = of_head(heads(x @ P["value"]["kernel"], d))
            k = v[..., :n]
        elif isinstance(module, LatentAttention):
            z = rms_norm(x @ P["latent"]["kernel"], P["latent_norm"]["scale"])
            k, v = heads(z @ P["key_map"], n), heads(z @ P["value_map"], d)
        else:
            v = of_head(heads(x @ P["value"]["kernel"], d))
            k = np.stack([v[:, :, h] @ P["key_map"][:, h * n : (h + 1) * n] for h in range(H)], axis=2)
        if r is None:
            q, k = rope(q, positions), rope(k, positions)
        elif r:
            k_rope = rope(heads(x @ P["rope_key"]["kernel"], r), positions)
            k = np.concatenate([k, np.repeat(k_rope, H, axis=2)], axis=-1)
            q = np.concatenate([q[..., :n], rope(q[..., n:], positions)], axis=-1)
    s = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(d)
    s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    o = np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v)
    return o.reshape(*o.shape[:2], -1) @ P["output"]["kernel"]


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_computes_its_formula(name):
    module = VARIANTS[name]()
    variables, x = weights(module), inputs(B, T, D, dtype=np.float32)
    positions = jnp.arange(T) * 3 + jnp.array([[5], [0]])
    y = jax.jit(module.apply)(variables, x, positions=positions)
    truth = expected(module, variables["params"], np.asarray(x, np.float64), np.asarray(positions))
    assert y.dtype == F32
    assert relative(y, truth) < 5e-6


# ---- parameters ------------------------------------------------------------------------------------------------------

# H = 4, G = 2, d = 32 (GVA; G = H in gva_full); H = 4, d = 8 (MHA, GQA, MQA); H = 3, d = 8, c = 12 (MLA). Kernels are
# folded to two axes.
PARAMETERS = {
    "mha": {"query": (D, 32), "key": (D, 32), "value": (D, 32), "output": (32, D)},
    "gqa_norms": {
        "query": (D, 32), "key": (D, 16), "value": (D, 16), "output": (32, D), "query_norm": (8,), "key_norm": (8,),
    },
    "mqa": {"query": (D, 32), "key": (D, 8), "value": (D, 8), "output": (32, D)},
    "mla": {
        "query": (D, 24), "latent": (D, 12), "latent_norm": (12,), "rope_key": (D, 4), "key_map": (12, 12),
        "value_map": (12, 24), "output": (24, D),
    },
    "gva_16": {
        "query": (D, 128), "query_norm": (32,), "value": (D, 64), "rope_key": (D, 16), "key_map": (32, 64),
        "output": (128, D),
    },
    "gva_keyless": {"query": (D, 128), "value": (D, 64), "key_map": (32, 128), "output": (128, D)},
    "gva_full": {"query": (D, 128), "value": (D, 128), "key_map": (32, 128), "output": (128, D)},
    "kv_full": {"query": (D, 32), "value": (D, 16), "output": (32, D)},
    "gta": {"query": (D, 32), "value": (D, 16), "rope_key": (D, 4), "output": (32, D)},
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("param_dtype", [F32, BF16], ids=str)
def test_parameters(name, param_dtype):
    module = VARIANTS[name](dtype=BF16, param_dtype=param_dtype)
    params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2, D)))["params"]
    assert {part: jax.tree.leaves(leaf)[0].shape for part, leaf in params.items()} == PARAMETERS[name]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)), "plain arrays, no boxes"
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {param_dtype}


# ---- dtypes and caches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "x64"), [("gqa_norms", True), ("mla", True), ("gva_16", True), ("gva_16", False), ("gva_full", True)]
)
def test_dtypes_are_what_was_asked_for(name, x64):
    with jax.enable_x64(True) if x64 else contextlib.nullcontext():
        for dtype, param_dtype, cache_dtype in [(BF16, F32, BF16), (F32, BF16, BF16), (F32, F32, F32)] + x64 * [
            (F64, F32, F64)
        ]:
            module = VARIANTS[name](dtype=dtype, param_dtype=param_dtype)

            def run(x, module=module, cache_dtype=cache_dtype):
                variables = module.init(jax.random.key(0), x)
                y = module.apply(variables, x)
                cache = module.init_cache(B, 20, cache_dtype)
                prompt, cache = module.apply(
                    variables, x, cache, lengths=jnp.array([3, 9], jnp.int32), method="prefill"
                )
                step, cache = module.apply(variables, x[:, :1], cache, method="decode")
                return variables["params"], (y, prompt, step), cache

            params, outputs, cache = jax.eval_shape(run, jax.ShapeDtypeStruct((B, T, D), F32))
            assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {param_dtype}
            assert [(y.shape, y.dtype) for y in outputs] == [((B, t, D), dtype) for t in (T, T, 1)]
            assert cache.lengths.dtype == jnp.int32
            cached = jax.tree.leaves(dataclasses.replace(cache, lengths=None))
            assert {leaf.dtype for leaf in cached} == {cache_dtype}


# Scalars per token, from the design's table.
SIZES = {
    "mha": 2 * 4 * 8, "gqa": 2 * 2 * 8, "mqa": 2 * 8, "gqa_norms": 2 * 2 * 8, "mla": 12 + 4, "mla_keyless": 12,
    "gva_16": 2 * 32 + 16, "gva_24": 32 + 24, "gva_keyless": 2 * 32, "gva_keyless_norm": 2 * 32,
    "gva_full": 4 * 32, "gva_full_norm": 2 * 32,
    "kv_2": 2 * 8 + 2, "kv_keyless": 2 * 8, "kv_full": 2 * 8, "gta": 2 * 8 + 4,
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layout", ["tokens_major", "tokens_minor"])
def test_cache_size_is_what_is_allocated(name, layout):
    module = VARIANTS[name]()
    cache = module.init_cache(3, 130, layout=layout)
    assert cache.capacity == 256  # rounded up to a multiple of 128
    assert module.cache_size() == SIZES[name]
    assert cache.nbytes == SIZES[name] * 3 * 256 * 2  # bfloat16 unless asked otherwise
    assert sum(a.nbytes for a in jax.tree.leaves(cache)) == cache.nbytes + 3 * 4  # and the lengths


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupedValueAttention(6, 4), "num_kv_heads = 4: must divide num_heads = 6"),
        (lambda: GroupedValueAttention(4, 0), "num_kv_heads = 0: must be 1 or more"),
        (lambda: MultiHeadAttention(4, 0), "num_kv_heads = 0: must be 1 or more"),
        (lambda: GroupedValueAttention(4, 8), "num_kv_heads = 8: must divide num_heads = 4"),
        (lambda: GroupedValueAttention(0), "num_heads = 0: must be 1 or more"),
        (lambda: GroupedValueAttention(4, rope_dim=15), "rope_dim = 15: must be even"),
        (lambda: GroupedValueAttention(4, rope_dim=-2), "rope_dim = -2: must be even and not negative"),
        (lambda: GroupedValueAttention(4, head_dim=16, rope_dim=16), "rope_dim = 16: must be below head_dim = 16"),
        (lambda: GroupedValueAttention(4, head_dim=15, rope_dim=None), "head_dim = 15: must be even for full RoPE"),
        (lambda: GroupedValueAttention(4, form="folded"), "form = 'folded': must be absorbed or materialised"),
        (lambda: GroupedValueAttention(4, key_init="x"), "key_init = 'x': must be default or scale_matched"),
        (lambda: MultiHeadAttention(4, 3), "num_kv_heads = 3: must divide num_heads = 4"),
        (lambda: MultiHeadAttention(4, head_dim=7), "head_dim = 7: must be even"),
        (lambda: LatentAttention(4, rope_dim=16), "latent_dim = None: MLA needs a latent width"),
        (lambda: LatentAttention(4, latent_dim=0, rope_dim=16), "latent_dim = 0: MLA needs a latent width"),
        (lambda: LatentAttention(4, latent_dim=8), "rope_dim = None: MLA cannot rotate keys"),
        (lambda: LatentAttention(4, head_dim=16, latent_dim=8, rope_dim=16), "rope_dim = 16: must be below"),
        (lambda: GroupedTiedAttention(4, head_dim=6), "head_dim = 6: GTA rotates half of it: must be a multiple of 4"),
        (lambda: GroupedTiedAttention(4, rope_dim=16), "rope_dim = 16: GTA rotates half of each head"),
        (lambda: build(AttentionConfig("gpa")), "attention.family = 'gpa': must be one of mha, gqa, mqa, mla, gva"),
        (lambda: build(AttentionConfig("keyless", rope_dim=16)), "attention.rope_dim = 16: Keyless attention is GVA"),
        (lambda: build(AttentionConfig("mha", 4, 2)), "attention.num_kv_heads = 2: MHA has one group per head"),
        (lambda: build(AttentionConfig("mqa", 4)), "attention.num_kv_heads = None: MQA has one group"),
        (lambda: build(AttentionConfig("gqa", 4, 2, rope_dim=16)), "attention.rope_dim = 16: family 'gqa' has no such"),
        (lambda: build(AttentionConfig("gqa", 4, 2, rope_dim=0)), "attention.rope_dim = 0: family 'gqa' has no such"),
        (lambda: build(AttentionConfig("gqa", 4, 2, latent_dim=8)), "attention.latent_dim = 8: family 'gqa' has no"),
        (
            lambda: build(AttentionConfig("gva", 4, 2, k_norm=True)),
            "attention.k_norm = True: family 'gva' has no such field (a norm of keys would not fold into the query)",
        ),
        (
            lambda: build(AttentionConfig("mla", 4, 2, latent_dim=8, rope_dim=16)),
            "attention.num_kv_heads = 2: family 'mla' has no such field; leave it None",
        ),
        (
            lambda: build(AttentionConfig("mla", 4, latent_dim=8, rope_dim=16, key_init="scale_matched")),
            "attention.key_init = 'scale_matched': family 'mla' has no such field; leave it 'default'",
        ),
        (
            lambda: build(AttentionConfig("mha", 4, form="materialised")),
            "attention.form = 'materialised': family 'mha' has no such field; leave it 'absorbed'",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_mistakes_are_refused_with_the_field_its_value_and_what_is_right(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(message)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_layout_or_kernel_is_refused():
    module = GroupedValueAttention(2, 1, 8, 4)
    with pytest.raises(ValueError, match="layout = 'rows': must be one of tokens_major, tokens_minor"):
        module.init_cache(1, 8, layout="rows")
    for batch, length in ((0, 8), (1, 0)):
        with pytest.raises(ValueError, match=f"batch = {batch}, max_length = {length}: both must be 1 or more"):
            module.init_cache(batch, length)
    wrong = module.clone(implementation="cuda")
    with pytest.raises(ValueError, match="implementation = 'cuda': must be one of reference, xla, "):
        jax.eval_shape(
            lambda x: wrong.apply(weights(module, 8), x, wrong.init_cache(1, 8), method="decode"), jnp.ones((1, 1, 8))
        )


def test_the_registry_builds_each_family_with_its_fields():
    for name in FAMILIES:
        extra = {
            "mla": dict(latent_dim=16, rope_dim=8, q_norm=True),
            "gva": dict(num_kv_heads=2, rope_dim=8, form="materialised", key_init="scale_matched"),
            "mqa": dict(num_kv_heads=1, k_norm=True),
            "gqa": dict(num_kv_heads=2, rope_base=500.0),
            "mha": dict(q_norm=True),
            "keyless": dict(num_kv_heads=2, rope_dim=0, key_init="scale_matched"),
            "kv": dict(num_kv_heads=2, rope_dim=8),
            "gta": dict(num_kv_heads=2, q_norm=True),
        }[name]
        module = build(AttentionConfig(name, 4, head_dim=32, **extra), dtype="bfloat16", implementation="reference")
        assert type(module) is FAMILIES[name]
        given = dict(num_heads=4, head_dim=32, implementation="reference", dtype=BF16, param_dtype=F32, **extra)
        assert {field: getattr(module, field) for field in given} == given


# ---- in someone else's model -----------------------------------------------------------------------------------------


class Host(nn.Module):
    """A model that knows nothing of this package but one module."""

    remat: bool = False

    def setup(self):
        attention = nn.remat(GroupedValueAttention) if self.remat else GroupedValueAttention
        self.mine = attention(4, 2, 8, rope_dim=4)
        self.head = nn.Dense(5)

    def __call__(self, x):
        return self.head(x + self.mine(x))

    def step(self, x, cache):
        y, cache = self.mine.decode(x, cache)
        return self.head(x + y), cache


class CompactHost(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + LatentAttention(2, 8, latent_dim=8, rope_dim=4)(nn.LayerNorm()(x))
        return x


def test_a_module_works_inside_another_model():
    x = inputs(B, T, D, dtype=np.float32)
    host, variables = Host(), weights(Host())
    assert set(variables["params"]) == {"mine", "head"}
    assert set(variables["params"]["mine"]) == {"query", "query_norm", "value", "rope_key", "key_map", "output"}

    @jax.jit
    def run(variables, x):
        y, cache = [], GroupedValueAttention(4, 2, 8, rope_dim=4).init_cache(B, T, jnp.float32)
        for t in range(2):
            out, cache = host.apply(variables, x[:, t : t + 1], cache, method="step")
            y.append(out)
        return host.apply(variables, x), Host(remat=True).apply(variables, x), jnp.concatenate(y, axis=1)

    full, rematerialised, steps = run(variables, x)
    assert relative(steps, full[:, :2]) < 1e-5
    assert relative(rematerialised, full) < 1e-6
    compact = jax.eval_shape(CompactHost().init, jax.random.key(0), x)["params"]
    assert {"LatentAttention_0", "LatentAttention_1"} <= set(compact)


# ---- rotary positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("H", "r"), [(3, 2), (4, 16), (1, 64)])
def test_a_tpu_rotates_in_another_order_and_to_the_same_values(H, r, monkeypatch):
    x, positions = inputs(2, 5, H, r, dtype=np.float32), jnp.asarray([[0, 1, 2, 3, 4], [7, 8, 0, 1, 900]])
    here = jax.value_and_grad(lambda x: (layers.apply_rope(x, positions, 1e4) ** 3).sum())(x)
    shapes = []
    rotate = layers._rotate
    monkeypatch.setattr(layers, "_rotate", lambda a, *rest: shapes.append(a.shape) or rotate(a, *rest))
    monkeypatch.setattr(layers, "target_platform", lambda: "tpu")
    there = jax.value_and_grad(lambda x: (layers.apply_rope(x, positions, 1e4) ** 3).sum())(x)
    assert shapes == [(2, 5, H * r // 2)]
    for a, b in zip(here, there, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
