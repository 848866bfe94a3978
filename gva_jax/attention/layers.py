"""Small parts that every attention family shares: projections, normalisation, rotary positions, initialisers."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.compat import target_platform, wide_dtype

STD = 0.02  # of every projection and embedding unless an initialiser says otherwise


def normal(std: float = STD):
    """Gaussian initialiser. Drawn in float32 whatever the parameters' dtype, so that all dtypes start from one draw."""

    def init(key, shape, dtype=jnp.float32):
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return init


def scale_matched(ratio: float, fan_in: int):
    """Gaussian with std `ratio / sqrt(fan_in)`: outputs start at `ratio` times the inputs' RMS (arXiv 2609.13285)."""
    return normal(ratio * fan_in**-0.5)


class Projection(nn.Module):
    """Bias-free linear map of the last axis to axes `features`; `out_dtype` is `dtype` unless given.

    The kernel is stored folded, `(D, prod(features))`: a minor axis of 64 would be padded to 128 on TPU.
    """

    features: tuple[int, ...]
    kernel_init: nn.initializers.Initializer = normal()
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32
    out_dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "..."]:
        shape = (x.shape[-1], math.prod(self.features))
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        y = jnp.matmul(x.astype(self.dtype), kernel.astype(self.dtype), preferred_element_type=self.out_dtype)
        return y.reshape(*x.shape[:-1], *self.features)


class RMSNorm(nn.Module):
    """`x / RMS(x) * scale` over the last axis; statistics in float32 (float64 for float64 inputs)."""

    epsilon: float = 1e-6
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*B d"]) -> Float[Array, "*B d"]:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.param_dtype)
        y = x.astype(wide_dtype(x.dtype))
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return (y * scale).astype(self.dtype)


def apply_rope(x: Float[Array, "B T *H r"], positions: Int[Array, "B T"], base: float) -> Float[Array, "B T *H r"]:
    """Rotate halves of the last axis by angles `position * base^(-2i/r)` (arXiv 2104.09864). r is even."""
    half, wide = x.shape[-1] // 2, wide_dtype(x.dtype)
    frequency = base ** (-jnp.arange(half, dtype=wide) / half)
    angle = positions[..., None].astype(wide) * frequency
    if x.ndim == 4 and target_platform() == "tpu":
        return _rotate_side_by_side(x, angle)
    angle = angle.reshape(*angle.shape[:2], *(1,) * (x.ndim - 3), half)
    turned = _rotate(*jnp.split(x.astype(wide), 2, axis=-1), angle)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _rotate(a, b, angle):
    """Of first halves and second halves."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return a * cos - b * sin, b * cos + a * sin


def _rotate_side_by_side(x: Float[Array, "B T H r"], angle: Float[Array, "B T half"]) -> Float[Array, "B T H r"]:
    """The same with all heads' first halves side by side, and all second ones.

    A TPU pads the minor axis to 128 lanes: the halves of each head alone would be float32 arrays of four times their
    size. (On CPUs this is slower, cosines are computed once a head.)
    """
    B, T, H, r = x.shape
    halves = x.reshape(B, T, H, 2, r // 2)
    a, b = (halves[:, :, :, i].reshape(B, T, H * r // 2).astype(angle.dtype) for i in (0, 1))
    turned = _rotate(a, b, jnp.tile(angle, (1, 1, H)))
    return jnp.stack([y.astype(x.dtype).reshape(B, T, H, r // 2) for y in turned], axis=3).reshape(x.shape)


def default_positions(x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """`positions`, or 0 .. T-1 in every row."""
    return jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]) if positions is None else positions


def check_tokens(x: Float[Array, "B T D"]) -> None:
    """Refuses inputs without tokens, before a cache or a softmax meets them."""
    if x.shape[1] == 0:
        raise ValueError(f"x has shape {x.shape}: its axis 1, tokens (T), is empty")


def joined(heads: Float[Array, "B T K n"], rotated: Array | None = None) -> Float[Array, "B T K _"]:
    """Content and rotated parts side by side; a rotated part (B T r) is that of every head, None is none."""
    if rotated is None:
        return heads
    if rotated.ndim == 3:
        rotated = jnp.broadcast_to(rotated[:, :, None], (*heads.shape[:3], rotated.shape[-1]))
    return jnp.concatenate([heads, rotated], axis=-1)
