"""Training attention on Hopper and Blackwell GPUs by tokamax's Mosaic kernels, where tokamax is installed.

They take grouped heads, values of another width than keys, any T, and a boolean mask (B, 1, T, T) for segments. tokamax
looks at the default backend: it cannot be asked to compile for a GPU that is not here.
"""

import importlib.util

from jaxtyping import Array, Float, Int

from gva_jax.attention.training.common import Shard, same_segment, split_sequence, tried, without_padding

BACKEND = "mosaic"  # of tokamax.dot_product_attention


def refusal(q, k, v, segment_ids) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
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
    import tokamax

    mask = None if segment_ids is None else same_segment(segment_ids)
    y = tokamax.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=True, implementation=BACKEND)
    return without_padding(y, segment_ids)
