"""Value transforms: what is done to projected values before they are cached. What is cached is what is aggregated.

    none            v                                        silu            SiLU(v)                    (GatedV)
    tanh_gate       v tanh(v)                                affine_match    a v + b
    matched_silu    (SiLU(v) - m) s + c                      state_gate      sigmoid(v Wg + b) v,  one scalar a group
    headwise_g2     v sigmoid(x Wg),  one scalar a group     full_glu        SiLU(v) (x Wg)
    reduced_glu     full_glu on values of two thirds of the width

The constants of `affine_match` give v the mean and the deviation that SiLU(v) has; those of `matched_silu` give SiLU(v)
the ones that v has. The papers do not define them. Ours are fixed: those of a Gaussian v at its initial scale,
std(Wv) sqrt(D) for inputs of RMS 1, or given as `moments`, as `measure` finds them on a batch.

Gates have no bias (state_gate has, starting at 0) and start at std 0.02 like all maps. A GLU's activation is SiLU, on
the side of the value: the paper does not say, its parameter counts do not depend on it.

Letters: B batch, T tokens, D model width, G groups, d head width, w width of a value (d, but of reduced_glu).
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gva_jax.attention.layers import STD, Projection, normal
from gva_jax.compositions import reduced_width

Moments = tuple[float, float, float, float]  # mean and standard deviation of v, then of SiLU(v)


def gaussian_mean(f: Callable[[np.ndarray], np.ndarray], sigma: float) -> float:
    """`E f(sigma z)` for a standard normal z, by Gauss-Hermite quadrature with 150 nodes."""
    z, weight = np.polynomial.hermite_e.hermegauss(150)
    return float(f(sigma * z) @ weight / math.sqrt(2 * math.pi))


def gaussian_rms(f: Callable[[np.ndarray], np.ndarray], sigma: float) -> float:
    """RMS of `f(sigma z)` for a standard normal z."""
    return math.sqrt(gaussian_mean(lambda v: f(v) ** 2, sigma))


def sigmoid(v: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * v)


def silu(v: np.ndarray) -> np.ndarray:
    return v * sigmoid(v)


@functools.cache
def gaussian_moments(sigma: float) -> Moments:
    """The moments where v is a Gaussian of mean 0 and deviation `sigma`."""
    mean = gaussian_mean(silu, sigma)
    return 0.0, sigma, mean, gaussian_rms(lambda v: silu(v) - mean, sigma)


def measure(v: Float[Array, "*B d"]) -> Float[Array, "4"]:
    """The moments of projected values, over all tokens, groups and channels."""
    v = v.astype(jnp.promote_types(v.dtype, jnp.float32))
    return jnp.stack([f(a) for a in (v, nn.silu(v)) for f in (jnp.mean, jnp.std)])


class ValueTransform(nn.Module):
    """`none`: values as they are projected; the base of all others.

    Attributes:
      moments: constants of `affine_match` and `matched_silu`; None: those of a Gaussian.
      dtype, param_dtype: of activations and of parameters.
    """

    moments: Moments | None = None
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    def __call__(self, x: Float[Array, "B T D"], v: Float[Array, "B T G w"]) -> Float[Array, "B T G w"]:
        """From a layer's inputs and projected values, the values that are cached and aggregated."""
        return v

    @staticmethod
    def width(d: int) -> int:
        """w: the width of a value where a head's is d."""
        return d

    def rms(self, sigma: float, d: int) -> float:
        """Expected RMS of the result, where projected values and gates are independent Gaussians of RMS `sigma`."""
        return sigma

    def _gate(self, x: Float[Array, "B T D"], *features: int) -> Float[Array, "B T ..."]:
        return Projection(features, name="gate", dtype=self.dtype, param_dtype=self.param_dtype)(x)

    def _moments(self, D: int) -> Moments:
        return self.moments or gaussian_moments(STD * math.sqrt(D))


class SiLU(ValueTransform):
    def __call__(self, x, v):
        return nn.silu(v)

    def rms(self, sigma, d):
        return gaussian_rms(silu, sigma)


class TanhGate(ValueTransform):
    def __call__(self, x, v):
        return v * jnp.tanh(v)

    def rms(self, sigma, d):
        return gaussian_rms(lambda v: v * np.tanh(v), sigma)


class AffineMatch(ValueTransform):
    def __call__(self, x, v):
        a, b = self._constants(self._moments(x.shape[-1]))
        return a * v + b

    def rms(self, sigma, d):
        a, b = self._constants(self.moments or gaussian_moments(sigma))
        return math.hypot(a * sigma, b)

    @staticmethod
    def _constants(moments: Moments) -> tuple[float, float]:
        mean, deviation, silu_mean, silu_deviation = moments
        a = silu_deviation / deviation
        return a, silu_mean - a * mean


class MatchedSiLU(ValueTransform):
    def __call__(self, x, v):
        mean, deviation, silu_mean, silu_deviation = self._moments(x.shape[-1])
        return (nn.silu(v) - silu_mean) * (deviation / silu_deviation) + mean

    def rms(self, sigma, d):
        mean, deviation, silu_mean, silu_deviation = self.moments or gaussian_moments(sigma)
        return gaussian_rms(lambda v: (silu(v) - silu_mean) * deviation / silu_deviation + mean, sigma)


class HeadwiseGate(ValueTransform):
    """Wg: D x G."""

    @nn.compact
    def __call__(self, x, v):
        return v * nn.sigmoid(self._gate(x, v.shape[2]))[..., None]

    def rms(self, sigma, d):
        return sigma * gaussian_rms(sigmoid, sigma)


class GLU(ValueTransform):
    """Wg: D x G d."""

    @nn.compact
    def __call__(self, x, v):
        return nn.silu(v) * self._gate(x, *v.shape[2:])

    def rms(self, sigma, d):
        return gaussian_rms(silu, sigma) * sigma


class ReducedGLU(GLU):
    """Value, gate and output have the reduced width; queries and keys keep d."""

    @staticmethod
    def width(d):
        return reduced_width(d)


class StateGate(ValueTransform):
    """Wg: d x 1 and b, one of each a group."""

    @nn.compact
    def __call__(self, x, v):
        _, _, G, d = v.shape
        kernel = self.param("kernel", normal(), (d, G), self.param_dtype).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (G,), self.param_dtype).astype(self.dtype)
        return v * nn.sigmoid(jnp.einsum("BTGd,dG->BTG", v, kernel) + bias)[..., None]

    def rms(self, sigma, d):
        return sigma * gaussian_rms(sigmoid, STD * math.sqrt(d) * sigma)


VALUE_TRANSFORMS: dict[str, type[ValueTransform]] = {
    "none": ValueTransform,
    "silu": SiLU,
    "tanh_gate": TanhGate,
    "affine_match": AffineMatch,
    "matched_silu": MatchedSiLU,
    "headwise_g2": HeadwiseGate,
    "full_glu": GLU,
    "reduced_glu": ReducedGLU,
    "state_gate": StateGate,
}
