"""Which attention computation runs: over a training batch, and over a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.attention.training import grouped_attention
from gva_jax.cache import Cache
from gva_jax.kernels import decode_attention

PREFILL_CHUNK = 128  # queries of a prompt whose scores are in memory at once
DECODE_QUERIES = 16  # the most new tokens a decode kernel takes at once


def training_attention(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B T G dk"],
    v: Float[Array, "B T G dv"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float,
) -> Float[Array, "B T H dv"]:
    """Causal grouped attention; query head h reads group `h // (H // G)`. dk and dv may differ. Reverse-mode only.

    `segment_ids` keep packed documents apart: a position sees its own segment only. A negative id is padding: it sees
    nothing, nothing sees it, and its output is 0. The softmax is float32 (float64 for float64 inputs).
    """
    (B, T, H, dk), G = q.shape, k.shape[2]
    by_group = q.reshape(B, T, G, H // G, dk).transpose(0, 2, 3, 1, 4)
    y = grouped_attention(by_group, k.swapaxes(1, 2), v.swapaxes(1, 2), segment_ids, float(scale))
    return y.transpose(0, 3, 1, 2, 4).reshape(B, T, H, v.shape[3])


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
            q_lengths=new, scale=scale, value_scales=cache.value_scales, key_scales=cache.key_scales,
            page_table=cache.page_table, layout=cache.layout, implementation=implementation,
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
    count = -(-T // PREFILL_CHUNK)
    size = -(-T // count)  # chunks of equal size: little is padded

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - T)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    def step(_, chunk):
        start, queries = chunk
        here = jnp.clip(new - start, 0, size)
        return None, attend(queries, lengths - jnp.maximum(new - start - size, 0), here)

    starts = jnp.arange(count, dtype=lengths.dtype) * size
    _, out = jax.lax.scan(step, None, (starts, jax.tree.map(split, queries)))
    out = out.swapaxes(0, 1)
    return out.reshape(out.shape[0], count * size, *out.shape[3:])[:, :T]
