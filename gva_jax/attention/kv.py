"""K=V attention: the values are the keys.

    q[h]      = Qnorm(x Wq[h])                           width d, split into q_nope[h] (n) | q_rope[h] (r)
    v[g]      = x Wv[g]                                  width d            -> cached
    k_rope    = RoPE(x Wkr)                              width r, shared    -> cached rotated
    o[h]      = softmax((q_nope[h]·v[g(h)][:n] + RoPE(q_rope[h])·k_rope) / sqrt(d)) v[g(h)]

Grouped Value Attention whose key map M is the identity (its first n columns), with the same three position modes: a
content key is the first n entries of the value. The decode kernel gets the content query padded with zeros to the
value's width. Transformed values are cached, aggregated and, being the keys, scored.

Letters: B batch, T new tokens, S cache capacity, D model width, H query heads, G value groups, d head width,
r rotary width, n = d - r content width, w width of a value (d unless its transform makes it narrower).
"""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.attention.base import Attention
from gva_jax.attention.depth import Mix, unmixed
from gva_jax.attention.dispatch import cached_attention, training_attention
from gva_jax.attention.layers import Projection, apply_rope, check_tokens, default_positions, joined
from gva_jax.attention.rebuilt import attend_rebuilt
from gva_jax.cache import Cache, init_cache
from gva_jax.config import check_heads, check_rope_dim, check_training_implementation, check_transforms


class KeyIsValueAttention(Attention):
    """Causal attention whose cache is `G d + r` scalars per token and whose keys have no parameters.

    Attributes, beside the transforms of `Attention`:
      num_heads, num_kv_heads, head_dim: H, G, d. G divides H; None is H.
      rope_dim: r, even, `0 < r < d`: decoupled RoPE. 0: no position in the scores. None: full RoPE on the values as
        keys; decoding rotates cached values block by block.
      rope_base: base of the rotary frequencies.
      q_norm: RMS-normalise queries over d, before the split, with a learned scale.
      implementation: decode kernel, see `gva_jax.kernels`; None picks the device's best.
      training_implementation: see `gva_jax.attention.dispatch.training_attention`; None picks the device's best.
      dtype, param_dtype: of activations and of parameters.

    Raises:
      ConfigError: heads that do not divide, a rotary width that is odd or as wide as the head, a transform that cannot
        be.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int = 64
    rope_dim: int | None = None
    rope_base: float = 10_000.0
    q_norm: bool = False
    implementation: str | None = None
    training_implementation: str | None = None
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    family = "kv"

    def __post_init__(self):
        check_heads(self.num_heads, self._groups, self.head_dim)
        check_rope_dim(self._rotary, self.head_dim)
        check_training_implementation(self.training_implementation)
        check_transforms(self.family, self)
        super().__post_init__()

    @property
    def _groups(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def _rotary(self) -> int | None:
        """r."""
        return self.rope_dim

    @property
    def _content(self) -> int:
        """n: how much of a value is scored."""
        return self.head_dim - (self._rotary or 0)

    # ---- projections -------------------------------------------------------------------------------------------------

    @nn.compact
    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]):
        """Queries (B T H n), rotated queries (B T H r), values (B T G w), rotated key (B T r).

        Without a decoupled slice the rotated parts are None; with full RoPE the queries are rotated themselves.
        """
        check_tokens(x)
        q, v = self._queries(x), self._values(x)
        if self._rotary is None:
            return apply_rope(q, positions, self.rope_base), None, v, None
        if self._rotary == 0:
            return q, None, v, None
        q_nope, q_rope = jnp.split(q, [self._content], axis=-1)
        k_rope = Projection((self._rotary,), name="rope_key", dtype=self.dtype, param_dtype=self.param_dtype)(x)
        return q_nope, apply_rope(q_rope, positions, self.rope_base), v, apply_rope(k_rope, positions, self.rope_base)

    def _keys(
        self, v: Float[Array, "B T G w"], k_rope: Float[Array, "B T r"] | None, positions: Int[Array, "B T"]
    ) -> Float[Array, "B T G d"]:
        """Whole keys, rotated."""
        if self._rotary is None:
            return apply_rope(v, positions, self.rope_base)
        return joined(v[..., : self._content], k_rope)

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
        positions = default_positions(x, positions)
        q, q_rope, v, k_rope = self._project(x, positions)
        q = joined(q, q_rope)
        v = mix(q, partial(self._keys, v, k_rope, positions), v)
        how = dict(scale=self.head_dim**-0.5, implementation=self._training())
        y = training_attention(q, self._keys(v, k_rope, positions), v, segment_ids=segment_ids, **how)
        return self._output(y, x, v)

    def init_cache(self, batch: int, max_length: int, dtype=jnp.bfloat16, layout: str | None = None, **pages) -> Cache:
        """An empty cache; needs no parameters. See `gva_jax.cache.init_cache`, eight-bit dtypes and pages included."""
        widths = dict(value_dim=self.value_width, rope_dim=self._rotary or 0)
        return init_cache(batch, max_length, groups=self._groups, **widths, dtype=dtype, layout=layout, **pages)

    @nn.compact
    def prefill(
        self, x: Float[Array, "B T D"], cache: Cache, *, lengths: Int[Array, "B"], mix: Mix = unmixed
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Append row b's first `lengths[b]` tokens and attend; outputs past them mean nothing."""
        positions = cache.lengths[:, None] + jnp.arange(x.shape[1])
        q, q_rope, v, k_rope = self._project(x, positions)
        v = mix(joined(q, q_rope), partial(self._keys, v, k_rope, positions), v)
        cache = cache.append(lengths, v, rope_keys=k_rope)
        how = dict(new=lengths, scale=self.head_dim**-0.5, implementation=self.implementation)
        if self._rotary is None:
            y = attend_rebuilt(q, cache, lambda v, positions: self._keys(v, None, positions), **how)
        else:
            q = jnp.pad(q, [(0, 0)] * 3 + [(0, self.value_width - self._content)])  # meets whole values
            y = cached_attention(q, cache, q_rope=q_rope, **how)
        return self._output(y, x, cache.stored(v)), cache

    def cache_size(self) -> int:
        """Scalars per token."""
        return self._groups * self.value_width + (self._rotary or 0)
