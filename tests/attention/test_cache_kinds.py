"""Paged and eight-bit caches under every family: exact with pages, within the entries' precision with eight bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned

from gva_jax import GroupedValueAttention, LatentAttention, MultiHeadAttention
from gva_jax.quantised import quantise

FAMILIES = {
    "gva": GroupedValueAttention(num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=8),
    "gva_full_rope": GroupedValueAttention(num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=None),
    "gqa": MultiHeadAttention(num_heads=4, num_kv_heads=2, head_dim=16),
    "mla": LatentAttention(num_heads=4, head_dim=16, latent_dim=24, rope_dim=8),
}
PAGES = dict(page_table=jnp.array([[3, 0, 5], [6, 2, 1]]), pages=8)
KINDS = {
    "paged": (dict(dtype=jnp.float32, layout="tokens_major", **PAGES), 1e-5),
    "paged int8": (dict(dtype=jnp.int8, layout="tokens_minor", **PAGES), 2e-2),
    "fp8": (dict(dtype=jnp.float8_e4m3fn, layout="tokens_major"), 2e-1),
}


@pytest.mark.parametrize("family", thinned(FAMILIES, 2))
def test_decoding_equals_the_full_forward(family):
    attn = FAMILIES[family]
    x = jax.random.normal(jax.random.key(0), (2, 150, 64))
    variables = jax.tree.map(lambda p: 4 * p, attn.init(jax.random.key(1), x))
    full = attn.apply(variables, x)
    prefill = jax.jit(lambda x, cache, lengths: attn.apply(variables, x, cache, lengths=lengths, method="prefill"))
    decode = jax.jit(lambda x, cache: attn.apply(variables, x, cache, method="decode"))
    for kind, (options, tolerance) in KINDS.items():
        cache = attn.init_cache(2, 200, **options)
        _, cache = prefill(x[:, :140], cache, jnp.array([140, 9]))
        for t in range(2):  # the first row is in its second page, the second in its first
            y, cache = decode(jnp.stack([x[0, 140 + t], x[1, 9 + t]])[:, None], cache)
        wanted = jnp.stack([full[0, 141], full[1, 10]])
        error = float(jnp.linalg.norm(y[:, 0] - wanted) / jnp.linalg.norm(wanted))
        assert error < tolerance, (kind, error)
        assert error > 0 or "int8" not in kind


def test_pages_hold_what_the_table_says_and_no_other_is_touched():
    cache = FAMILIES["gva"].init_cache(2, 200, jnp.float32, "tokens_major", **PAGES)
    tokens = jnp.arange(2 * 130 * 2 * 16, dtype=jnp.float32).reshape(2, 130, 2, 16) + 1
    cache = cache.append(jnp.array([130, 1]), tokens, rope_keys=jnp.ones((2, 130, 8)))
    first, second = np.asarray(tokens[0]).swapaxes(0, 1), np.asarray(tokens[1]).swapaxes(0, 1)
    np.testing.assert_array_equal(cache.values[3], first[:, :128])
    np.testing.assert_array_equal(cache.values[0, :, :2], first[:, 128:])
    np.testing.assert_array_equal(cache.values[6, :, :1], second[:, :1])
    assert not cache.values[6, :, 1:].any() and not cache.values[jnp.array([1, 2, 4, 5, 7])].any()
    assert cache.capacity == 384


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_quantise_uses_the_whole_range_and_keeps_zeros(dtype):
    x = jax.random.normal(jax.random.key(2), (5, 3, 64)) * jnp.array([1e-6, 1.0, 1e4])[:, None]
    entries, scale = quantise(x.at[0].set(0), dtype)
    assert entries.dtype == dtype and not entries[0].astype(jnp.float32).any()
    back = entries.astype(jnp.float32) * scale[..., None]
    step = {jnp.int8: 0.5 / 127, jnp.float8_e4m3fn: 2**-4, jnp.float8_e5m2: 2**-3}[dtype]
    largest = jnp.abs(x).max(-1, keepdims=True)
    assert (jnp.abs(back - x)[1:] <= 1.001 * step * largest[1:]).all()
    np.testing.assert_allclose(jnp.abs(back).max(-1)[1:], largest[1:, :, 0], rtol=1e-5)


def test_an_eight_bit_cache_is_counted_with_its_scales():
    attn = FAMILIES["gva"]
    cache = attn.init_cache(1, 128, jnp.int8)
    assert cache.nbytes == 128 * (2 * 16 + 2 * 4 + 8 * 2)  # values, float32 scales, bfloat16 rotary keys


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(page_table=jnp.zeros((2, 1), jnp.int32), pages=4), r"must be \(2, N\) with N x 128 tokens"),
        (dict(page_table=jnp.zeros((3, 2), jnp.int32), pages=4), r"page_table has shape \(3, 2\)"),
        (dict(page_table=jnp.zeros((2, 2), jnp.int32)), "give the number of pages"),
        (dict(page_table=jnp.zeros((2, 2), jnp.int32), pages=4, page_size=100), "page_size = 100: must be a multiple"),
    ],
)
def test_page_tables_that_do_not_fit_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        FAMILIES["gva"].init_cache(2, 200, **options)
