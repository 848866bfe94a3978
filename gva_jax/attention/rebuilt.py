"""Attention over cached values whose keys must be made anew: full RoPE on keys that are read from values."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.attention.dispatch import in_chunks
from gva_jax.cache import Cache
from gva_jax.kernels import decode_attention, merge

REBUILD_BLOCK = 512  # tokens whose keys are made at once


def attend_rebuilt(
    q: Float[Array, "B T H d"],
    cache: Cache,
    make_keys: Callable[[Float[Array, "B S G w"], Int[Array, "B S"]], Float[Array, "B S K d"]],
    *,
    new: Int[Array, "B"],
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B T H w"]:
    """Row b's first `new[b]` queries attend; keys are made of a block of cached values at a time, never all at once.

    Args:
      make_keys: rotated keys of values at these positions, one a group (K = G) or one a query head (K = H).
    """
    B, S = q.shape[0], cache.capacity
    # Slices of the cache must not cross pages, whose size is a multiple of 128 as the capacity is.
    block = math.gcd(S, REBUILD_BLOCK) if cache.page_table is None else 128

    def attend(q, lengths, new):
        wide = jnp.promote_types(q.dtype, jnp.float32)

        def step(i, partial):
            at = i * block
            v = cache.read_values(at, block, q.dtype)
            k = make_keys(v.swapaxes(1, 2), jnp.broadcast_to(at + jnp.arange(block), (B, block))).swapaxes(1, 2)
            v = jnp.repeat(v, k.shape[1] // v.shape[1], axis=1)
            here = decode_attention(
                q.astype(wide), v, keys=k, lengths=lengths - at, q_lengths=new, scale=scale,
                layout="tokens_major", implementation=implementation,
            )  # fmt: skip
            return merge(partial, here)

        w = cache.read_values(0, block, q.dtype).shape[-1]
        nothing = jnp.zeros((*q.shape[:3], w), wide), jnp.full(q.shape[:3], -jnp.inf, wide)
        blocks = jnp.clip(-(-lengths.max() // block), 0, S // block)
        return jax.lax.fori_loop(0, blocks, step, nothing)[0].astype(q.dtype)

    y = in_chunks(attend, q, cache.lengths, new)
    return jnp.where(cache.overflowed[:, None, None, None], jnp.nan, y)
