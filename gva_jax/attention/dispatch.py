"""Which attention computation runs: over a training batch, and over a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.cache import Cache
from gva_jax.compat import wide_dtype
from gva_jax.kernels import decode_attention

TRAIN_CHUNK = 512  # queries whose scores are in memory at once, in training
PREFILL_CHUNK = 128  # and over a cache
DECODE_QUERIES = 16  # the most new tokens a decode kernel takes at once


def training_attention(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B T G dk"],
    v: Float[Array, "B T G dv"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float,
) -> Float[Array, "B T H dv"]:
    """Causal grouped attention, differentiable; query head h reads group `h // (H // G)`. dk and dv may differ.

    `segment_ids` keep packed documents apart: a position sees its own segment only. A negative id is padding: it sees
    nothing, nothing sees it, and its output is 0. The softmax is float32 (float64 for float64 inputs).
    """
    T = q.shape[1]
    if T <= TRAIN_CHUNK:
        return _causal_block(q, k, v, segment_ids, 0, scale)
    # Memory for T * TRAIN_CHUNK scores rather than T * T, and no work on keys that a whole chunk cannot see.
    block = jax.checkpoint(_causal_block, static_argnums=(4, 5))
    chunks = []
    for start in range(0, T, TRAIN_CHUNK):
        stop = min(start + TRAIN_CHUNK, T)
        ids = None if segment_ids is None else segment_ids[:, :stop]
        chunks.append(block(q[:, start:stop], k[:, :stop], v[:, :stop], ids, start, scale))
    return jnp.concatenate(chunks, axis=1)


def _causal_block(q, k, v, segment_ids, start, scale):
    """Queries at positions start .. start + T attend over keys 0 .. S."""
    (B, T, H, dk), (S, G), dv = q.shape, k.shape[1:3], v.shape[3]
    wide, h = wide_dtype(q.dtype), H // G
    # Plain matrix products, one a group, whose rows are its heads' queries: on CPU 4 to 5 times faster than an einsum
    # over separate axes, which transposes the scores.
    rows = q.reshape(B, T, G, h, dk).transpose(0, 2, 3, 1, 4).reshape(B, G, h * T, dk)
    s = jnp.einsum("BGRd,BGSd->BGRS", rows, k.swapaxes(1, 2), preferred_element_type=wide) * scale
    seen = start + jnp.arange(T)[:, None] >= jnp.arange(S)  # (T, S), or (B, 1, T, S) with segments
    if segment_ids is not None:
        mine, theirs = segment_ids[:, start : start + T, None], segment_ids[:, None]
        seen = (seen & (mine == theirs) & (mine >= 0))[:, None]
    s = jnp.where(jnp.tile(seen, (h, 1)), s, -jnp.inf)
    m = jax.lax.stop_gradient(s.max(axis=-1, keepdims=True))
    p = jnp.exp(s - jnp.where(jnp.isfinite(m), m, 0))  # a row that sees nothing: weights 0, finite gradients
    total = p.sum(axis=-1, keepdims=True)
    p = (p / jnp.where(total == 0, 1, total)).astype(v.dtype)
    y = jnp.einsum("BGRS,BGSd->BGRd", p, v.swapaxes(1, 2))
    return y.reshape(B, G, h, T, dv).transpose(0, 3, 1, 2, 4).reshape(B, T, H, dv)


def cached_attention(
    q: Float[Array, "B T H d"],
    cache: Cache,
    *,
    q_rope: Float[Array, "B T H r"] | None = None,
    new: Int[Array, "B"],
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B T H dv"]:
    """Row b's first `new[b]` queries, whose tokens were just appended, attend over all that is live before them.

    A few queries go to the decode kernel `implementation`; a prompt goes through in chunks. Outputs past `new[b]` are
    0; a row that overflowed its cache is NaN.
    """
    T = q.shape[1]

    def attend(q, q_rope, lengths, new, implementation):
        out, _ = decode_attention(
            q, cache.values, keys=cache.keys, q_rope=q_rope, rope_keys=cache.rope_keys, lengths=lengths,
            q_lengths=new, scale=scale, layout=cache.layout, implementation=implementation,
        )  # fmt: skip
        return out

    if T <= DECODE_QUERIES:
        out = attend(q, q_rope, cache.lengths, new, implementation)
    else:
        out = in_chunks(lambda q, lengths, new: attend(q[0], q[1], lengths, new, None), (q, q_rope), cache.lengths, new)
    return jnp.where(cache.overflowed[:, None, None, None], jnp.nan, out)


def in_chunks(attend, queries, lengths: Int[Array, "B"], new: Int[Array, "B"]):
    """Runs `attend(queries, lengths, new)` over chunks of the query axis (1) of the pytree `queries`, one at a time.

    `lengths` count the live tokens with all `new` ones; each chunk gets its own, as if later chunks had not come yet.
    """
    T = jax.tree.leaves(queries)[0].shape[1]
    size = min(T, PREFILL_CHUNK)
    count = -(-T // size)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - T)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    def step(_, chunk):
        start, queries = chunk
        here = jnp.clip(new - start, 0, size)
        return None, attend(queries, lengths - jnp.maximum(new - start - size, 0), here)

    starts = jnp.arange(count, dtype=new.dtype) * size
    _, out = jax.lax.scan(step, None, (starts, jax.tree.map(split, queries)))
    out = out.swapaxes(0, 1)
    return out.reshape(out.shape[0], count * size, *out.shape[3:])[:, :T]
