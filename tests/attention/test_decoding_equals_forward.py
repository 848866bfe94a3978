"""Prefill and decoding give what one full forward gives, for every variant; nothing leaks from where it must not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from variants import VARIANTS, D, inputs, relative, weights

from gva_jax.attention import GroupedValueAttention, rebuilt
from gva_jax.attention.dispatch import in_chunks, training_attention
from gva_jax.attention.training import chunked
from gva_jax.cache import CacheOverflow
from gva_jax.kernels import xla

F64 = {"dtype": jnp.dtype("float64"), "param_dtype": jnp.dtype("float64")}

# What each row appends, call after call; T is the width of the call. Up to 16 tokens go to the decode kernel, longer
# prompts through it in chunks of at most 128. The second call finds caches that are empty (row 0) and that are not.
CALLS = (
    ("prefill", 7, (0, 7, 5)),
    ("prefill", 140, (140, 0, 131)),
    ("decode", 3, (3, 3, 3)),
    ("decode", 1, (1, 1, 1)),
)
TOTAL = np.sum([new for *_, new in CALLS], axis=0)
CAPACITY = 256


@functools.cache
def setup(name):
    """Module, variables, inputs, and the outputs of one full forward."""
    module = VARIANTS[name](**F64)
    variables, x = weights(module), inputs(3, TOTAL.max(), D)
    return module, variables, x, jax.device_get(jax.jit(module.apply)(variables, x))


def poisoned(cache):
    """The cache with NaN in every slot: whatever is not written by an append must not be read."""
    return jax.tree.map(lambda a: a * jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else a, cache)


def decode_all(module, variables, x, cache):
    """Outputs of all calls, each (3, T, D), and the last cache."""
    out = []
    for method, T, new in CALLS:
        at = jnp.minimum(cache.lengths[:, None] + jnp.arange(T), x.shape[1] - 1)  # every row is at its own place
        tokens = jnp.take_along_axis(x, at[..., None], axis=1)
        kw = {} if method == "decode" else {"lengths": jnp.asarray(new, jnp.int32)}
        y, cache = module.apply(variables, tokens, cache, method=method, **kw)
        out.append(y)
    return out, cache


HOW = [("tokens_major", "xla"), ("tokens_minor", "reference"), ("tokens_minor", "xla"), ("tokens_major", "reference")]
CROSSED = ("gqa", "mla", "gva_16", "gva_full")  # one of each shape of cache in two ways, the others in one each
CASES = [(name, *how) for name in CROSSED for how in HOW[:2]]
CASES += [(name, *HOW[i % 4]) for i, name in enumerate(n for n in VARIANTS if n not in CROSSED)]


@pytest.mark.parametrize(("name", "layout", "implementation"), thinned(CASES, 2))
def test_decoding_equals_the_forward(name, layout, implementation, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", 60)  # several blocks, the last of which is moved back into the cache
    monkeypatch.setattr(rebuilt, "REBUILD_BLOCK", 128)
    with jax.enable_x64(True):
        module, variables, x, full = setup(name)
        module = module.clone(implementation=implementation)
        cache = poisoned(module.init_cache(3, CAPACITY - 5, jnp.float64, layout))
        assert cache.capacity == CAPACITY
        out, cache = jax.device_get(jax.jit(functools.partial(decode_all, module))(variables, x, cache))
    assert cache.lengths.tolist() == TOTAL.tolist()
    start = np.zeros(3, int)
    for (*_, new), y in zip(CALLS, out, strict=True):
        for b in range(3):
            if new[b]:
                assert relative(y[b, : new[b]], full[b, start[b] : start[b] + new[b]]) < 1e-12
        start += new


@pytest.mark.parametrize(("T", "chunk"), [(1, 1), (128, 128), (129, 65), (300, 100)])
def test_queries_are_cut_into_chunks_without_much_padding(T, chunk):
    seen = []

    def attend(q, lengths, new):
        seen.append(q.shape)
        return q

    new = jnp.array([T, 0])
    out = jax.eval_shape(lambda q: in_chunks(attend, q, new, new), jnp.ones((2, T, 3, 4)))
    assert seen == [(2, chunk, 3, 4)] and out.shape == (2, T, 3, 4)


# ---- what must not leak ----------------------------------------------------------------------------------------------

FAMILIES = ("gqa_norms", "mla", "gva_24", "gva_full", "gva_keyless", "gta", "kv_full")
T = 12
DOCUMENTS = (slice(0, 5), slice(5, 9))  # then three positions of padding
SEGMENTS = jnp.array([0] * 5 + [1] * 4 + [-1] * 3)
POSITIONS = jnp.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0])


@pytest.mark.parametrize("name", thinned(FAMILIES, 2))
def test_nothing_leaks(name):
    with jax.enable_x64(True):
        module = VARIANTS[name](**F64)
        variables, x = weights(module), inputs(2, T, D)
        ids = jnp.broadcast_to(SEGMENTS, (2, T)), jnp.broadcast_to(POSITIONS, (2, T))

        @jax.jit
        def run(variables, x, segments, positions):
            early = jax.grad(lambda x: module.apply(variables, x)[:, 6].sum())(x)
            packed, pull = jax.vjp(
                lambda v, x: module.apply(v, x, positions=positions, segment_ids=segments), variables, x
            )
            second = pull(jnp.zeros_like(packed).at[:, DOCUMENTS[1]].set(1.0))[1]
            alone = [module.apply(variables, x[:, document]) for document in DOCUMENTS]
            return early, packed, second, alone, pull(jnp.ones_like(packed))

        early, packed, second, alone, everything = jax.device_get(run(variables, x, *ids))
    assert np.abs(early[:, :7]).min() > 0
    assert (early[:, 7:] == 0).all(), "a position sees its future"
    for document, y in zip(DOCUMENTS, alone, strict=True):
        assert relative(packed[:, document], y) < 1e-12
    assert np.abs(second[:, DOCUMENTS[1]]).min() > 0
    assert (second[:, :5] == 0).all() and (second[:, 9:] == 0).all(), "a document sees another"
    assert (packed[:, 9:] == 0).all(), "padding sees something"
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(everything))


def plain_attention(q, k, v, segment_ids, scale):
    """Causal grouped attention as one would write it, left to automatic differentiation."""
    T, shared = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, shared, axis=2), jnp.repeat(v, shared, axis=2)
    seen = jnp.tril(jnp.ones((T, T), bool))
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids[:, :, None] >= 0)
    s = jnp.where(seen[..., None], jnp.einsum("bthd,bshd->btsh", q, k) * scale, -1e30)
    p = jnp.where(seen[..., None], jax.nn.softmax(s, axis=2), 0)
    return jnp.einsum("btsh,bshd->bthd", p, v)


# Below, at and above one chunk; the last chunk is not a full one.
@pytest.mark.parametrize(("T", "segmented"), [(9, True), (chunked.CHUNK, False), (chunked.CHUNK + 13, True)])
def test_training_attention_and_its_written_out_gradient(T, segmented):
    with jax.enable_x64(True):
        q, k, v = inputs(2, T, 6, 5), inputs(2, T, 2, 5, seed=2), inputs(2, T, 2, 3, seed=3)
        ids = None
        if segmented:  # two documents, then padding: rows that see nothing
            ids = jnp.asarray(np.repeat([[0, 1, -1], [4, 3, -2]], [T // 2, T - T // 2 - 3, 3], axis=1))

        def run(attend, q, k, v):
            y, pull = jax.vjp(lambda *a: attend(*a, segment_ids=ids, scale=0.7), q, k, v)
            return y, pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape))

        found, truth = jax.device_get(
            jax.jit(lambda *a: (run(training_attention, *a), run(plain_attention, *a)))(q, k, v)
        )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert relative(a, b) < 1e-12
    if segmented:
        assert all((a[:, -3:] == 0).all() for a in jax.tree.leaves(found))


def test_decode_attention_refuses_to_be_differentiated():
    module = GroupedValueAttention(2, 1, 8, rope_dim=4)
    cache, x = module.init_cache(1, 128, jnp.float32), jnp.ones((1, 1, 8))
    loss = lambda v: module.apply(v, x, cache, method="decode")[0].sum()
    with pytest.raises(TypeError, match="decode_attention has no gradient: it reads a cache"):
        jax.eval_shape(jax.grad(loss), weights(module, 8))


# ---- a cache that overflows ------------------------------------------------------------------------------------------


def test_overflow_is_an_error_where_lengths_are_known():
    module = GroupedValueAttention(2, 1, 8, rope_dim=4)
    cache = module.init_cache(2, 128, jnp.float32)
    cache = dataclasses.replace(cache, lengths=jnp.array([127, 3]))
    with pytest.raises(
        CacheOverflow, match="row 0 would hold 130 tokens, capacity is 128; allocate with max_length=130"
    ):
        module.apply(weights(module, 8), jnp.ones((2, 3, 8)), cache, method="decode")


@pytest.mark.parametrize(
    ("name", "layout"), [("gqa", "tokens_major"), ("gva_16", "tokens_minor"), ("gva_full", "tokens_major")]
)
def test_overflow_under_jit_makes_that_row_nan_and_no_other(name, layout):
    with jax.enable_x64(True):
        module, variables, x, full = setup(name)
        cache = module.init_cache(3, 128, jnp.float64, layout)

        @jax.jit
        def run(variables, x, cache):
            _, before = module.apply(variables, x[:, :127], cache, lengths=jnp.array([127, 20, 124]), method="prefill")
            tokens = jnp.stack([x[0, 127:130], x[1, 20:23], x[2, 124:127]])
            y, after = module.apply(variables, tokens, before, method="decode")
            again, last = module.apply(variables, x[:, 23:24], after, method="decode")
            return before, y, after, again, last

        before, y, after, again, last = jax.device_get(run(variables, x, cache))
    assert after.lengths.tolist() == [130, 23, 127] and last.lengths.tolist() == [131, 24, 128]
    assert after.overflowed.tolist() == [True, False, False]
    assert np.isnan(y[0]).all() and np.isnan(again[0]).all(), "an overflowed row stays so"
    assert relative(y[1], full[1, 20:23]) < 1e-12 and relative(again[1], full[1, 23:24]) < 1e-12
    assert relative(y[2], full[2, 124:127]) < 1e-12 and np.isfinite(again[2]).all()
    token_axis = -2 if layout == "tokens_major" else -1
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if old.ndim > 1:  # what row 0 held is still there: nothing wrapped around
            held = lambda a: np.moveaxis(a[0], token_axis, 0)[:127]
            assert (held(old) == held(new)).all()
