"""Eight-bit cache entries with one scale per group and token."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


def is_quantised(dtype) -> bool:
    """Whether entries of `dtype` need scales."""
    return jnp.dtype(dtype).name in QUANTISED


def quantise(x: Float[Array, "*B d"], dtype) -> tuple[Num[Array, "*B d"], Float[Array, "*B"]]:
    """`x` as entries of `dtype` times float32 scales over the last axis; the largest entry uses the whole range."""
    dtype = jnp.dtype(dtype)
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / largest
    scale = jnp.where(scale > 0, scale, 1.0)  # zeros stay zeros; NaN stays NaN in the scale's product
    entries = jnp.clip(x / scale[..., None], -largest, largest)
    return (jnp.round(entries) if dtype == jnp.int8 else entries).astype(dtype), scale
