"""ZClip: gradients whose norm stands out from those before are clipped (Kumar et al., arXiv 2504.02507).

With m and s the running mean and standard deviation of the global gradient norm, a norm x has the score
`z = (x - m) / s`. Above the threshold z* the gradients are scaled to the norm `m + s z*^2 / z`: the further out a norm
lies, the closer to the mean it is put. What was applied, not what was found, enters the running statistics:

    m <- a m + (1 - a) x        s^2 <- a s^2 + (1 - a) (x - m)^2        with the new m in the second

The first norms (25) are not clipped by it; their mean and variance are what the statistics start from. Thresholds,
warm-up and the small number beside s are those of the authors' code: a = 0.97, z* = 2.5, 25 norms, 1e-6.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

ALPHA = 0.97
WARMUP = 25
_EPS = 1e-6


class NormStatistics(NamedTuple):
    """Of the gradient norms so far, in float32 or wider."""

    count: Int[Array, ""]
    mean: Float[Array, ""]
    variance: Float[Array, ""]


def nothing_seen(params) -> NormStatistics:
    """The statistics before the first step."""
    dtype = jnp.promote_types(jnp.result_type(*jax.tree.leaves(params)), jnp.float32)
    return NormStatistics(jnp.zeros((), jnp.int32), jnp.zeros((), dtype), jnp.zeros((), dtype))


def bounded(seen: NormStatistics, norm: Float[Array, ""], z_threshold: float) -> Float[Array, ""]:
    """`norm`, or what ZClip puts in its place where it stands out; always `norm` in the warm-up or if not finite."""
    norm = norm.astype(seen.mean.dtype)
    deviation = jnp.sqrt(seen.variance)
    z = (norm - seen.mean) / (deviation + _EPS)
    outlier = (seen.count >= WARMUP) & (z > z_threshold) & jnp.isfinite(norm)
    return jnp.where(outlier, seen.mean + deviation * z_threshold**2 / z, norm)


def admitted(seen: NormStatistics, norm: Float[Array, ""]) -> NormStatistics:
    """The statistics with one more norm; unchanged by one that is not finite."""
    count = seen.count + 1
    warming = seen.count < WARMUP
    # Plain mean and variance of the first norms (Welford's update), then the moving ones.
    weight = jnp.where(warming, 1 / count.astype(norm.dtype), 1 - ALPHA)
    mean = seen.mean + weight * (norm - seen.mean)
    squared = (norm - mean) * jnp.where(warming, norm - seen.mean, norm - mean)
    variance = seen.variance + weight * (squared - seen.variance)
    new = NormStatistics(count, mean, variance)
    return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(norm), a, b), new, seen)


def zclip(z_threshold: float = 2.5, clip_norm: float | None = None) -> optax.GradientTransformation:
    """ZClip as an Optax transformation; its state is three scalars (`NormStatistics`).

    With `clip_norm`, gradients are besides clipped to that norm, also during the warm-up; the statistics do not see it.
    """

    def update(grads, seen: NormStatistics, params=None):
        del params
        norm = optax.tree.norm(grads).astype(seen.mean.dtype)
        usual = bounded(seen, norm, z_threshold)
        limit = usual if clip_norm is None else jnp.minimum(usual, clip_norm)
        scale = jnp.where(norm > limit, limit / norm, 1)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), admitted(seen, usual)

    return optax.GradientTransformation(nothing_seen, update)
