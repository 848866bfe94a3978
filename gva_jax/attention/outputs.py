"""Output transforms: what is done to the heads' outputs y before the output projection.

    none              y
    headwise_g1       y sigmoid(x Wg), one scalar a head
    elementwise_g1    y sigmoid(x Wg), one an element
    xsa               y - (y·v̂) v̂,     v̂ the token's own value, normalised

XSA (exclusive self-attention) has no parameters. In decoding it needs the token's own value, which is at hand where it
is appended. A token that sees only itself, the first of a document, has y = v, and what is left of it is 0: exactly 0
here, not a rounding error, because such a token's coefficient is set to 1. Its gradients are then exactly 0 too.

Letters: B batch, T tokens, D model width, H query heads, G groups, w width of a value and of an output.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from gva_jax.attention.layers import Projection
from gva_jax.compat import wide_dtype


class OutputTransform(nn.Module):
    """`none`: outputs as they are aggregated; the base of all others. Gates have no bias and start at std 0.02."""

    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    def __call__(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T H w"], v: Float[Array, "B T G w"] | None
    ) -> Float[Array, "B T H w"]:
        """From a layer's inputs, outputs of heads and the tokens' own values, as they are cached."""
        return y

    def _gate(self, x: Float[Array, "B T D"], *features: int) -> Float[Array, "B T ..."]:
        gate = Projection(features, name="gate", dtype=self.dtype, param_dtype=self.param_dtype)(x)
        return nn.sigmoid(gate)


class HeadwiseGate(OutputTransform):
    """Wg: D x H."""

    @nn.compact
    def __call__(self, x, y, v):
        return y * self._gate(x, y.shape[2])[..., None]


class ElementwiseGate(OutputTransform):
    """Wg: D x H w."""

    @nn.compact
    def __call__(self, x, y, v):
        return y * self._gate(x, *y.shape[2:])


class Exclusive(OutputTransform):
    """XSA. A value that is exactly 0 takes nothing out."""

    def __call__(self, x, y, v):
        wide = wide_dtype(y.dtype)
        own = jnp.repeat(v.astype(wide), y.shape[2] // v.shape[2], axis=2)
        out, square = y.astype(wide), jnp.sum(own * own, axis=-1, keepdims=True)
        share = jnp.sum(out * own, axis=-1, keepdims=True) / jnp.where(square > 0, square, 1)
        alone = (out == own).all(axis=-1, keepdims=True)
        return (out - jnp.where(alone, 1, share) * own).astype(y.dtype)


OUTPUT_TRANSFORMS: dict[str, type[OutputTransform]] = {
    "none": OutputTransform,
    "headwise_g1": HeadwiseGate,
    "elementwise_g1": ElementwiseGate,
    "xsa": Exclusive,
}
