"""Training attention on NVIDIA GPUs by cuDNN, through `jax.nn.dot_product_attention`. bfloat16 and float16 only.

It takes grouped heads, but values of the keys' width, a multiple of 8: values (64 in absorbed GVA, beside keys of 80)
are padded, an eighth more work and no scores in memory. Segments become a mask, which JAX hands to cuDNN as a bias of
(B, 1, T, T) in the operands' dtype: quadratic in T, but once for all heads. Blocks above the diagonal are skipped.
"""

import jax
from jaxtyping import Array, Float, Int

from gva_jax.attention.training.common import (
    Shard,
    pad,
    pad_tokens,
    same_segment,
    split_sequence,
    tried,
    without_padding,
)

BACKEND = "cudnn"  # of jax.nn.dot_product_attention


def refusal(q, k, v, segment_ids) -> str | None:
    if (reason := split_sequence(q, k)) is not None:
        return reason
    return tried(attention, q, k, v, segment_ids)


def attention(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B T G dk"],
    v: Float[Array, "B T G dv"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    interpret: bool = False,
    shard: Shard | None = None,
) -> Float[Array, "B T H dv"]:
    """See `gva_jax.attention.dispatch.training_attention`."""
    (_, T, _, dk), dv = q.shape, v.shape[3]
    width = -(-max(dk, dv) // 8) * 8
    q, k, v = (pad(x, 3, width) for x in (q, k, v))
    q, k, v, ids = pad_tokens(T + T % 2, q, k, v, segment_ids)  # with a mask cuDNN wants an even number
    mask = None if ids is None else same_segment(ids)
    y = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=True, implementation=BACKEND)
    return without_padding(y[:, :T, :, :dv], segment_ids)
