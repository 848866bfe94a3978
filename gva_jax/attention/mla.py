"""Multi-head Latent Attention with decoupled RoPE: cache one latent and one rotated key (arXiv 2405.04434).

    z         = RMSNorm(x Wdkv)                          width c            -> cached
    k_rope    = RoPE(x Wkr)                              width r, shared    -> cached rotated
    q[h]      = Qnorm(x Wq[h])                           width d, split into q_nope[h] (n) | q_rope[h] (r)
    keys      [z Wuk[h] | k_rope], values z Wuv[h]       widths n + r and d
    o[h]      = softmax((q_nope[h]·(z Wuk[h]) + RoPE(q_rope[h])·k_rope) / sqrt(n + r)) (z Wuv[h])

Training makes keys and values; decoding absorbs both maps, `s[h] = (q_nope[h] Wuk[h]^T)·z + q_rope[h]·k_rope` and
`o[h] = (sum p z) Wuv[h]`, so the latent serves as keys and values with one group of width c.

Letters: B batch, T new tokens, D model width, H heads, d head width, r rotary width, n = d - r, c latent width.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.attention.base import Attention
from gva_jax.attention.dispatch import cached_attention, training_attention
from gva_jax.attention.layers import Projection, RMSNorm, apply_rope, check_tokens, default_positions, normal
from gva_jax.cache import Cache, init_cache
from gva_jax.config import check_heads, check_rope_dim, check_training_implementation, check_transforms, require


class LatentAttention(Attention):
    """Causal attention whose cache is `c + r` scalars per token.

    Values are made from the latent after aggregation, so a transform of values is refused.

    Attributes, beside the transforms of `Attention`:
      num_heads, head_dim: H, d (the width of values, and of queries, content and rotary part together).
      latent_dim: c.
      rope_dim: r, even, `0 <= r < d`; 0: no position in the scores.
      rope_base: base of the rotary frequencies.
      q_norm: RMS-normalise queries over d, before the split, with a learned scale.
      implementation: decode kernel, see `gva_jax.kernels`; None picks the device's best.
      training_implementation: see `gva_jax.attention.dispatch.training_attention`; None picks the device's best.
      dtype, param_dtype: of activations and of parameters.

    Raises:
      ConfigError: a latent or rotary width that does not fit.
    """

    num_heads: int
    head_dim: int = 64
    latent_dim: int | None = None
    rope_dim: int | None = None
    rope_base: float = 10_000.0
    q_norm: bool = False
    implementation: str | None = None
    training_implementation: str | None = None
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        check_heads(self.num_heads, self.num_heads, self.head_dim)
        require(self.latent_dim is not None and self.latent_dim >= 1, "latent_dim", self.latent_dim,
                "MLA needs a latent width of 1 or more")  # fmt: skip
        require(self.rope_dim is not None, "rope_dim", self.rope_dim,
                "MLA cannot rotate keys read from the latent; give a rotary width, 0 for none")  # fmt: skip
        check_rope_dim(self.rope_dim, self.head_dim)
        check_training_implementation(self.training_implementation)
        check_transforms("mla", self)
        super().__post_init__()

    # ---- projections -------------------------------------------------------------------------------------------------

    @nn.compact
    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]):
        """Queries (B T H n), rotated queries (B T H r), latents (B T c), rotated key (B T r); None where r = 0."""
        d, r = self.head_dim, self.rope_dim
        check_tokens(x)
        kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        q_nope, q_rope = jnp.split(self._queries(x), [d - r], axis=-1)
        z = RMSNorm(name="latent_norm", **kw)(Projection((self.latent_dim,), name="latent", **kw)(x))
        if not r:
            return q_nope, None, z, None
        k_rope = Projection((r,), name="rope_key", **kw)(x)
        return q_nope, apply_rope(q_rope, positions, self.rope_base), z, apply_rope(k_rope, positions, self.rope_base)

    @nn.compact
    def _maps(self) -> tuple[Float[Array, "c H n"], Float[Array, "c H d"]]:
        """Wuk and Wuv."""
        c, H, d, n = self.latent_dim, self.num_heads, self.head_dim, self.head_dim - self.rope_dim
        make = lambda name, width: self.param(name, normal(), (c, H * width), self.param_dtype)
        key_map, value_map = make("key_map", n), make("value_map", d)
        return key_map.astype(self.dtype).reshape(c, H, n), value_map.astype(self.dtype).reshape(c, H, d)

    # ---- the four parts ----------------------------------------------------------------------------------------------

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Training forward, causal, with keys and values made. `segment_ids` keep packed documents apart."""
        q, q_rope, z, k_rope = self._project(x, default_positions(x, positions))
        key_map, value_map = self._maps()
        k = jnp.einsum("BTc,cHn->BTHn", z, key_map)
        v = jnp.einsum("BTc,cHd->BTHd", z, value_map)
        if q_rope is not None:
            shared = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], self.rope_dim))
            q, k = jnp.concatenate([q, q_rope], axis=-1), jnp.concatenate([k, shared], axis=-1)
        how = dict(scale=self.head_dim**-0.5, implementation=self._training())
        y = training_attention(q, k, v, segment_ids=segment_ids, **how)
        return self._output(y, x, v)

    def init_cache(
        self, batch: int, max_length: int, dtype=jnp.bfloat16, layout: str | None = None, **pages
    ) -> Cache:
        """An empty cache; needs no parameters. See `gva_jax.cache.init_cache`, eight-bit dtypes and pages included."""
        c, r = self.latent_dim, self.rope_dim
        return init_cache(batch, max_length, groups=1, value_dim=c, rope_dim=r, dtype=dtype, layout=layout, **pages)

    @nn.compact
    def prefill(self, x: Float[Array, "B T D"], cache: Cache, *, lengths: Int[Array, "B"]):
        """Append row b's first `lengths[b]` tokens and attend; outputs past them mean nothing."""
        positions = cache.lengths[:, None] + jnp.arange(x.shape[1])
        q, q_rope, z, k_rope = self._project(x, positions)
        cache = cache.append(lengths, z[:, :, None], rope_keys=k_rope)
        key_map, value_map = self._maps()
        y = cached_attention(
            jnp.einsum("BTHn,cHn->BTHc", q, key_map), cache, q_rope=q_rope, new=lengths,
            scale=self.head_dim**-0.5, implementation=self.implementation,
        )  # fmt: skip
        make = lambda z: jnp.einsum("BTHc,cHd->BTHd", z, value_map)
        v = None
        if self.output_transform == "xsa":  # made as the output is: the same bits where a token sees only itself
            v = make(jnp.broadcast_to(cache.stored(z[:, :, None]), y.shape))
        return self._output(make(y), x, v), cache

    def cache_size(self) -> int:
        """Scalars per token."""
        return self.latent_dim + self.rope_dim
