"""What all families share: queries, values and outputs with their transforms, and decoding as a prefill."""

import math

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from gva_jax.attention.layers import STD, Projection, RMSNorm
from gva_jax.attention.outputs import OUTPUT_TRANSFORMS
from gva_jax.attention.values import VALUE_TRANSFORMS, gaussian_rms, measure, silu
from gva_jax.cache import Cache


class Attention(nn.Module, kw_only=True):
    """A family: H query heads of width d, and values of width w, which is d unless the transform makes them narrower.

    Attributes:
      value_transform: what is done to values before they are cached and aggregated: `none`, `silu` (GatedV) or another
        name of `gva_jax.attention.values`.
      output_transform: what is done to the heads' outputs: `none` or a name of `gva_jax.attention.outputs`.
      query_transform: `silu`, on queries after their projection, before Q-norm and RoPE; or `none`.
      key_transform: the same on keys, where keys are made (MHA, GQA, MQA, and GVA with full RoPE).
      value_moments: constants of `affine_match` and `matched_silu`, see `gva_jax.attention.values`.
    """

    value_transform: str = "none"
    output_transform: str = "none"
    query_transform: str = "none"
    key_transform: str = "none"
    value_moments: tuple[float, float, float, float] | None = None

    @property
    def value_width(self) -> int:
        """w: the width of a head's cached value and output."""
        return VALUE_TRANSFORMS[self.value_transform].width(self.head_dim)

    def training_widths(self) -> tuple[int, int]:
        """Widths of the keys and of the values that a query meets in training."""
        return self.head_dim, self.value_width

    def _training(self) -> str | None:
        """`training_implementation`, but at initialisation, which may happen elsewhere than training, whatever runs."""
        return None if self.is_initializing() else self.training_implementation

    # ---- projections -------------------------------------------------------------------------------------------------

    @nn.compact
    def _queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H d"]:
        """Not yet rotated."""
        kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        q = Projection((self.num_heads, self.head_dim), name="query", **kw)(x)
        if self.query_transform == "silu":
            q = nn.silu(q)
        return RMSNorm(name="query_norm", **kw)(q) if self.q_norm else q

    @nn.compact
    def _projected_values(self, x: Float[Array, "B T D"]) -> Float[Array, "B T G w"]:
        """Before their transform."""
        kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        return Projection((self._groups, self.value_width), name="value", **kw)(x)

    @nn.compact
    def _values(self, x: Float[Array, "B T D"]) -> Float[Array, "B T G w"]:
        """As they are cached and aggregated."""
        kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        transform = VALUE_TRANSFORMS[self.value_transform](moments=self.value_moments, name="value_transform", **kw)
        return transform(x, self._projected_values(x))

    @nn.compact
    def _output(
        self, y: Float[Array, "B T H w"], x: Float[Array, "B T D"], v: Float[Array, "B T G w"] | None
    ) -> Float[Array, "B T D"]:
        """Of the heads' outputs; `x` and `v` are the tokens' own inputs and cached values (only XSA reads these)."""
        kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        y = OUTPUT_TRANSFORMS[self.output_transform](name="output_transform", **kw)(x, y, v)
        y = y.reshape(*y.shape[:2], -1)
        return Projection((x.shape[-1],), name="output", **kw)(y)

    # ---- expected at initialisation, for inputs of RMS 1 -------------------------------------------------------------

    def _query_rms(self, D: int) -> float:
        """sigma_Q."""
        if self.q_norm:
            return 1.0
        sigma = STD * math.sqrt(D)
        return gaussian_rms(silu, sigma) if self.query_transform == "silu" else sigma

    def _value_rms(self, D: int) -> float:
        """sigma_V, of the transformed value."""
        transform = VALUE_TRANSFORMS[self.value_transform](moments=self.value_moments, parent=None)
        return transform.rms(STD * math.sqrt(D), self.head_dim)

    def measure_values(self, variables, x: Float[Array, "B T D"]) -> Float[Array, "4"]:
        """Mean and standard deviation of v = x Wv, then of SiLU(v): what `value_moments` takes, on inputs `x`."""
        return measure(self.apply(variables, x, method="_projected_values"))

    # ---- decoding ----------------------------------------------------------------------------------------------------

    def decode(self, x: Float[Array, "B T D"], cache: Cache) -> tuple[Float[Array, "B T D"], Cache]:
        """Append T tokens to every row and attend over all that is live."""
        return self.prefill(x, cache, lengths=jnp.full(x.shape[:1], x.shape[1], jnp.int32))
