"""The cache: what an append writes, where it writes it, and what it leaves alone."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from gva_jax.cache import LAYOUTS, CacheOverflow, init_cache
from gva_jax.config import AttentionConfig, ModelConfig
from gva_jax.model import Transformer

B, G, S = 4, 2, 128
WIDTHS = {"values": 8, "keys": 6, "rope_keys": 4}
F32 = jnp.dtype("float32")


def make(layout, max_length=S, **kw):
    cache = init_cache(B, max_length, groups=G, value_dim=8, key_dim=6, rope_dim=4, dtype=F32, layout=layout)
    return dataclasses.replace(cache, **kw)


def tokens(T, seed=0):
    """New tokens for every part of the cache, (B, T, ...)."""
    rng = np.random.default_rng(seed)
    shape = lambda name: (B, T, G, WIDTHS[name]) if name != "rope_keys" else (B, T, WIDTHS[name])
    return {name: jnp.asarray(rng.normal(size=shape(name)), F32) for name in WIDTHS}


def by_token(cache, name):
    """A part of the cache as (B, S, ...), whatever its layout."""
    x = np.asarray(getattr(cache, name), np.float64)
    x = np.swapaxes(x, -1, -2) if cache.layout == "tokens_minor" else x
    return np.moveaxis(x, -2, 1)


# Capacity, T, live tokens, new tokens: the last slot, nothing, all of T, and (only under jit) more than there is room
# for; then over the edges of tiles of 128, and in a row that has overflowed already.
APPENDS = [
    (128, 5, [127, 5, 0, 126], [1, 0, 5, 4]),
    (384, 200, [127, 250, 300, 390], [200, 134, 200, 3]),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("S", "T", "lengths", "new"), APPENDS)
def test_append_writes_the_new_tokens_behind_the_live_ones_and_nothing_else(layout, S, T, lengths, new):
    append = jax.jit(lambda cache, new, parts: cache.append(new, **parts))
    lengths, new = np.array(lengths, np.int32), np.array(new, np.int32)
    old, parts = make(layout, max_length=S), tokens(T)
    ones = jax.tree.map(lambda a: a + 1 if a.ndim > 1 else a, old)
    cache = append(dataclasses.replace(ones, lengths=jnp.asarray(lengths)), jnp.asarray(new), parts)
    for name, x in parts.items():
        expected = np.ones_like(by_token(cache, name))
        for b in range(B):
            stop = min(lengths[b] + new[b], S)
            expected[b, lengths[b] : stop] = x[b, : max(stop - lengths[b], 0)]
        np.testing.assert_array_equal(by_token(cache, name), expected)
    assert cache.lengths.tolist() == (lengths + new).tolist()
    assert cache.overflowed.tolist() == (lengths + new > S).tolist()
    assert cache.layout == layout and cache.lengths.dtype == jnp.int32


@pytest.mark.parametrize("x64", [False, True])
def test_append_keeps_the_caches_dtypes(x64):
    with jax.enable_x64(x64):
        cache = init_cache(B, 5, groups=G, value_dim=8, rope_dim=4, layout="tokens_minor")
        assert (cache.values.shape, cache.rope_keys.shape) == ((B, G, 8, 128), (B, 4, 128))
        assert cache.keys is None
        parts = {name: x for name, x in tokens(2).items() if name != "keys"}
        cache = cache.append(jnp.array([2, 2, 1, 0]), **parts)  # wide counts, wide tokens
    assert (cache.values.dtype, cache.rope_keys.dtype, cache.lengths.dtype) == ("bfloat16", "bfloat16", "int32")
    assert (by_token(cache, "values")[0, :2] == np.asarray(parts["values"][0].astype("bfloat16"), np.float64)).all()


@pytest.mark.parametrize("length", [1, 127, 128, 129, 2000])
def test_capacity_is_rounded_up_to_128(length):
    cache = jax.eval_shape(lambda: init_cache(1, length, groups=1, value_dim=2, layout="tokens_major"))
    assert cache.capacity == -(-length // 128) * 128
    assert cache.values.shape == (1, 1, cache.capacity, 2)


def test_bytes_are_counted_from_the_arrays():
    cache = make("tokens_major")
    assert cache.nbytes == 4 * B * S * (G * 8 + G * 6 + 4)
    keyless = init_cache(3, 256, groups=4, value_dim=64, rope_dim=16, layout="tokens_minor")
    gqa = init_cache(3, 256, groups=4, value_dim=64, key_dim=64, layout="tokens_minor")
    assert keyless.nbytes / gqa.nbytes == 0.53125


def test_mistakes_are_refused():
    cache, parts = make("tokens_major", lengths=jnp.array([100, 127, 3, 0])), tokens(5)
    with pytest.raises(
        CacheOverflow, match="row 1 would hold 129 tokens, capacity is 128; allocate with max_length=129"
    ):
        cache.append(jnp.array([5, 2, 0, 0]), **parts)
    for new in ([5, -1, 0, 0], [6, 0, 0, 0]):
        with pytest.raises(ValueError, match=rf"lengths = {re.escape(str(new))}: must lie in 0 .. 5, the tokens given"):
            cache.append(jnp.array(new), **parts)
    with pytest.raises(ValueError, match="the cache holds rope_keys: it was made for another attention family"):
        cache.append(jnp.array([1, 1, 0, 0]), **(parts | {"rope_keys": None}))
    with pytest.raises(ValueError, match="the cache has no keys: it was made for another attention family"):
        dataclasses.replace(cache, keys=None).append(jnp.array([1, 1, 0, 0]), **parts)
    with pytest.raises(ValueError, match="tokens come for 1 rows, the cache has 4"):
        cache.append(jnp.array([1]), **jax.tree.map(lambda x: x[:1], parts))
    with pytest.raises(ValueError, match="layout = 'rows'"):
        init_cache(1, 1, groups=1, value_dim=1, layout="rows")
    with pytest.raises(ValueError, match="batch = 0, max_length = 1: both must be 1 or more"):
        init_cache(0, 1, groups=1, value_dim=1)


def test_the_layout_is_the_targets():
    layout = lambda: jax.eval_shape(lambda: init_cache(1, 1, groups=1, value_dim=1)).layout
    assert layout() == "tokens_minor"  # a CPU
    for name, platform, right in (("TPU v5 lite", "tpu", "tokens_minor"), ("NVIDIA H200", "cuda", "tokens_major")):
        device = AbstractDevice(name, 1, platform)
        with use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device)):
            assert layout() == right


# ---- in place --------------------------------------------------------------------------------------------------------


def copies(compiled, shape) -> list[str]:
    """Instructions that copy an array of this shape."""
    dims = ",".join(map(str, shape))
    return re.findall(rf"^.*\[{dims}\]\S* copy\(.*$", compiled.as_text(), re.M)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_donated_append_is_in_place(layout):
    cache = make(layout, max_length=16 * 1024)
    step = jax.jit(lambda cache, new, parts: cache.append(new, **parts), donate_argnums=0)
    compiled = step.lower(cache, jnp.ones((B,), jnp.int32), tokens(3)).compile()
    for name in WIDTHS:
        assert not copies(compiled, getattr(cache, name).shape)
    assert compiled.memory_analysis().alias_size_in_bytes == cache.nbytes + 4 * B
    assert compiled.memory_analysis().temp_size_in_bytes < cache.values.nbytes / 4
    kept = (
        jax.jit(lambda cache, new, parts: cache.append(new, **parts)).lower(cache, cache.lengths, tokens(3)).compile()
    )
    assert copies(kept, cache.values.shape), "without donation there is a copy, and this is what it looks like"


ATTENTION = {
    "gqa": AttentionConfig("gqa", 4, 2, 16),
    "mla": AttentionConfig("mla", 4, head_dim=16, latent_dim=32, rope_dim=8),
    "gva": AttentionConfig("gva", 4, 2, 16, rope_dim=8),
    "gva_full": AttentionConfig("gva", 4, 2, 16),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in ("gva", "gva_full") for layout in LAYOUTS]
    + [("gqa", "tokens_major"), ("mla", "tokens_minor")],
)
def test_a_decode_step_of_a_whole_model_copies_no_cache(name, layout):
    config = ModelConfig(64, 2, 16, 16, ATTENTION[name], scan_layers=False)
    model, tokens = Transformer(config), jnp.zeros((2, 1), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    caches = jax.eval_shape(lambda: model.init_cache(2, 1 << 15, layout=layout))
    step = jax.jit(lambda *args: model.apply(*args, method="decode"), donate_argnums=2)
    compiled = step.lower(variables, tokens, caches).compile()
    one = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(caches[0]))
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * one
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * one
    assert not copies(compiled, caches[0].values.shape)
