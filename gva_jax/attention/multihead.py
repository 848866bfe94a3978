"""Multi-head, grouped-query and multi-query attention: the baselines (arXiv 1706.03762, 2305.13245, 1911.02150).

    q[h] = RoPE(Qnorm(x Wq[h]))    k[g] = RoPE(Knorm(x Wk[g]))    v[g] = x Wv[g]
    o[h] = softmax(q[h]·k[g(h)] / sqrt(d)) v[g(h)]

Letters: B batch, T new tokens, S cache capacity, D model width, H query heads, G groups (KV heads), d head width.
MHA has G = H, MQA has G = 1.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.attention.base import Attention
from gva_jax.attention.depth import Mix, unmixed
from gva_jax.attention.dispatch import cached_attention, training_attention
from gva_jax.attention.layers import Projection, RMSNorm, apply_rope, check_tokens, default_positions
from gva_jax.cache import Cache, init_cache
from gva_jax.config import check_heads, check_rope_dim, check_training_implementation, check_transforms


class MultiHeadAttention(Attention):
    """Causal attention with rotary positions; caches keys and values, `2 G d` scalars per token.

    Attributes, beside the transforms of `Attention`:
      num_heads, num_kv_heads, head_dim: H, G, d. G divides H; None is H (MHA), 1 is MQA.
      rope_base: base of the rotary frequencies.
      q_norm, k_norm: RMS-normalise queries, keys over d, before RoPE, with a learned scale.
      implementation: decode kernel, see `gva_jax.kernels`; None picks the device's best.
      training_implementation: see `gva_jax.attention.dispatch.training_attention`; None picks the device's best.
      dtype, param_dtype: of activations and of parameters.

    Raises:
      ConfigError: heads that do not divide, an odd head width.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int = 64
    rope_base: float = 10_000.0
    q_norm: bool = False
    k_norm: bool = False
    implementation: str | None = None
    training_implementation: str | None = None
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        check_heads(self.num_heads, self._groups, self.head_dim)
        check_rope_dim(None, self.head_dim)
        check_training_implementation(self.training_implementation)
        check_transforms("gqa", self)
        super().__post_init__()

    @property
    def _groups(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    # ---- projections -------------------------------------------------------------------------------------------------

    @nn.compact
    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]):
        """Rotated queries (B T H d), rotated keys (B T G d), values (B T G w)."""
        check_tokens(x)
        kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        q, v = self._queries(x), self._values(x)
        k = Projection((self._groups, self.head_dim), name="key", **kw)(x)
        if self.key_transform == "silu":
            k = nn.silu(k)
        if self.k_norm:
            k = RMSNorm(name="key_norm", **kw)(k)
        return apply_rope(q, positions, self.rope_base), apply_rope(k, positions, self.rope_base), v

    # ---- the four parts ----------------------------------------------------------------------------------------------

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        mix: Mix = unmixed,
    ) -> Float[Array, "B T D"]:
        """Training forward, causal. `segment_ids` keep packed documents apart (negative: padding).

        `mix` makes the values that are aggregated from queries, keys and values; see `gva_jax.attention.depth`.
        """
        q, k, v = self._project(x, default_positions(x, positions))
        v = mix(q, lambda: k, v)
        how = dict(scale=self.head_dim**-0.5, implementation=self._training())
        y = training_attention(q, k, v, segment_ids=segment_ids, **how)
        return self._output(y, x, v)

    def init_cache(
        self, batch: int, max_length: int, dtype=jnp.bfloat16, layout: str | None = None, **pages
    ) -> Cache:
        """An empty cache; needs no parameters. See `gva_jax.cache.init_cache`, eight-bit dtypes and pages included."""
        widths = dict(value_dim=self.value_width, key_dim=self.head_dim)
        return init_cache(batch, max_length, groups=self._groups, **widths, dtype=dtype, layout=layout, **pages)

    @nn.compact
    def prefill(self, x: Float[Array, "B T D"], cache: Cache, *, lengths: Int[Array, "B"], mix: Mix = unmixed):
        """Append row b's first `lengths[b]` tokens and attend; outputs past them mean nothing."""
        positions = cache.lengths[:, None] + jnp.arange(x.shape[1])
        q, k, v = self._project(x, positions)
        v = mix(q, lambda: k, v)
        cache = cache.append(lengths, v, keys=k)
        scale = self.head_dim**-0.5
        y = cached_attention(q, cache, new=lengths, scale=scale, implementation=self.implementation)
        return self._output(y, x, cache.stored(v)), cache

    def cache_size(self) -> int:
        """Scalars per token."""
        return self._groups * (self.head_dim + self.value_width)
