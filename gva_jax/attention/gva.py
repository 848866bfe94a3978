"""Grouped Value Attention: cache the grouped values, read the keys out of them (arXiv 2609.13285).

    q[h]      = Qnorm(x Wq[h])                           width d, split into q_nope[h] (n) | q_rope[h] (r)
    v[g]      = x Wv[g]                                  width d            -> cached
    k_rope    = RoPE(x Wkr)                              width r, shared    -> cached rotated
    k_nope[h] = v[g(h)] M[h]                             M[h]: d x n, one per query head
    o[h]      = softmax((q_nope[h]·k_nope[h] + RoPE(q_rope[h])·k_rope) / sqrt(d)) v[g(h)]

No key is ever made: `q_nope[h]·(v M[h]) = (q_nope[h] M[h]^T)·v`. M is absorbed into the query, and the values serve as
keys and as values, in training as in decoding. Position travels in one short rotated key per token.

Letters: B batch, T new tokens, S cache capacity, D model width, H query heads, G value groups, d head width,
r rotary width, n = d - r content width, w width of a value (d unless its transform makes it narrower). Where values
are transformed, v is the transformed one: it is cached, aggregated, and keys are read from it.
"""

from functools import partial
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.attention.base import Attention
from gva_jax.attention.depth import Mix, unmixed
from gva_jax.attention.dispatch import cached_attention, training_attention
from gva_jax.attention.layers import (
    Projection,
    apply_rope,
    check_tokens,
    default_positions,
    joined,
    normal,
    scale_matched,
)
from gva_jax.attention.rebuilt import attend_rebuilt
from gva_jax.cache import Cache, init_cache
from gva_jax.config import check_heads, check_rope_dim, check_training_implementation, check_transforms, require


class GroupedValueAttention(Attention):
    """Causal attention whose cache is `G d + r` scalars per token, about half of grouped-query attention's.

    Attributes, beside the transforms of `Attention`:
      num_heads, num_kv_heads, head_dim: H, G, d. G divides H; None is H.
      rope_dim: r, even, `0 < r < d`: decoupled RoPE, the serving configuration. 0: no position in the scores (Keyless
        attention). None: full RoPE on the reconstructed keys. A rotated key does not fold into the query, so that mode
        makes H keys per token: in training for the whole batch, in decoding block by block from the cached values.
      rope_base: base of the rotary frequencies.
      q_norm: RMS-normalise queries over d, before the split, with a learned scale. (Normalised keys would not fold.)
      key_init: `scale_matched` starts keys at the queries' RMS, per slice; `default` draws with std 0.02, which leaves
        them `1/(0.02 sqrt(d))` times too small, `1/(0.02 sqrt(D) 0.02 sqrt(d))` with Q-norm (the paper's baseline).
        The values' RMS is that of the transformed value; keys are matched before a `key_transform`.
      form: training forward `absorbed`, or `materialised`: make the keys (the reference; fewer FLOPs at short T).
        Decoding is absorbed either way.
      implementation: decode kernel, see `gva_jax.kernels`; None picks the device's best.
      training_implementation: see `gva_jax.attention.dispatch.training_attention`; None picks the device's best.
      dtype, param_dtype: of activations and of parameters.

    Raises:
      ConfigError: heads that do not divide, a rotary width that is odd or as wide as the head, a form that cannot be.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int = 64
    rope_dim: int | None = 16
    rope_base: float = 10_000.0
    q_norm: bool = True
    key_init: Literal["default", "scale_matched"] = "scale_matched"
    form: Literal["absorbed", "materialised"] = "absorbed"
    implementation: str | None = None
    training_implementation: str | None = None
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        check_heads(self.num_heads, self._groups, self.head_dim)
        check_rope_dim(self.rope_dim, self.head_dim)
        for name, choices in (("key_init", ("default", "scale_matched")), ("form", ("absorbed", "materialised"))):
            require(getattr(self, name) in choices, name, getattr(self, name), f"must be {' or '.join(choices)}")
        check_training_implementation(self.training_implementation)
        check_transforms("gva", self)
        super().__post_init__()

    @property
    def _groups(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def _content(self) -> int:
        """n: the width of a key that is read from the value."""
        return self.head_dim - (self.rope_dim or 0)

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5  # of the width that was scored, n + r, absorbed or not

    # ---- projections -------------------------------------------------------------------------------------------------

    @nn.compact
    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]):
        """Queries (B T H n), rotated queries (B T H r), values (B T G w), rotated key (B T r).

        Without a decoupled slice the rotated parts are None; with full RoPE the queries are rotated themselves.
        """
        r, D = self.rope_dim, x.shape[-1]
        check_tokens(x)
        kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        q, v = self._queries(x), self._values(x)
        if r is None:
            return apply_rope(q, positions, self.rope_base), None, v, None
        if r == 0:
            return q, None, v, None
        q_nope, q_rope = jnp.split(q, [self._content], axis=-1)
        rope_init = scale_matched(self._query_rms(D), fan_in=D) if self.key_init == "scale_matched" else normal()
        k_rope = Projection((r,), kernel_init=rope_init, name="rope_key", **kw)(x)
        return q_nope, apply_rope(q_rope, positions, self.rope_base), v, apply_rope(k_rope, positions, self.rope_base)

    @nn.compact
    def _key_map(self, D: int) -> Float[Array, "w H n"]:
        """M. Its fan-in is the width of the value it reads."""
        w, H, n = self.value_width, self.num_heads, self._content
        matched = scale_matched(self._query_rms(D) / self._value_rms(D), fan_in=w)
        init = matched if self.key_init == "scale_matched" else normal()
        return self.param("key_map", init, (w, H * n), self.param_dtype).astype(self.dtype).reshape(w, H, n)

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
        key_map = self._key_map(x.shape[-1])
        own = v = mix(joined(q, q_rope), partial(self._keys, v, key_map, k_rope, positions), v)
        if self._absorbs_in_training:
            q, k = joined(absorb(q, key_map), q_rope), joined(v, k_rope)
        else:
            q, k = joined(q, q_rope), self._keys(v, key_map, k_rope, positions)
            v = jnp.repeat(v, self.num_heads // self._groups, axis=2)
        how = dict(scale=self._scale, implementation=self._training())
        y = training_attention(q, k, v, segment_ids=segment_ids, **how)
        return self._output(y, x, own)

    def init_cache(self, batch: int, max_length: int, dtype=jnp.bfloat16, layout: str | None = None, **pages) -> Cache:
        """An empty cache; needs no parameters. See `gva_jax.cache.init_cache`, eight-bit dtypes and pages included."""
        widths = dict(value_dim=self.value_width, rope_dim=self.rope_dim or 0)
        return init_cache(batch, max_length, groups=self._groups, **widths, dtype=dtype, layout=layout, **pages)

    @nn.compact
    def prefill(
        self, x: Float[Array, "B T D"], cache: Cache, *, lengths: Int[Array, "B"], mix: Mix = unmixed
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Append row b's first `lengths[b]` tokens and attend; outputs past them mean nothing."""
        positions = cache.lengths[:, None] + jnp.arange(x.shape[1])
        q, q_rope, v, k_rope = self._project(x, positions)
        key_map = self._key_map(x.shape[-1])
        v = mix(joined(q, q_rope), partial(self._keys, v, key_map, k_rope, positions), v)
        cache = cache.append(lengths, v, rope_keys=k_rope)
        if self.rope_dim is None:
            y = attend_rebuilt(
                q, cache, lambda v, positions: self._keys(v, key_map, None, positions), new=lengths, scale=self._scale,
                implementation=self.implementation,
            )  # fmt: skip
        else:
            y = cached_attention(
                absorb(q, key_map), cache, q_rope=q_rope, new=lengths, scale=self._scale,
                implementation=self.implementation,
            )  # fmt: skip
        return self._output(y, x, cache.stored(v)), cache

    def cache_size(self) -> int:
        """Scalars per token."""
        return self._groups * self.value_width + (self.rope_dim or 0)

    # ---- where keys are made -----------------------------------------------------------------------------------------

    @property
    def _absorbs_in_training(self) -> bool:
        return self.form == "absorbed" and self.rope_dim is not None

    def training_widths(self) -> tuple[int, int]:
        """Widths of the keys and of the values that a query meets in training: absorbed, the values are keys too."""
        w = self.value_width
        return (w + self.rope_dim if self._absorbs_in_training else self.head_dim), w

    def _keys(
        self,
        v: Float[Array, "B T G w"],
        key_map: Float[Array, "w H n"],
        k_rope: Float[Array, "B T r"] | None,
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T H d"]:
        """Whole keys, rotated."""
        k = reconstruct(v, key_map)
        if self.key_transform == "silu":
            k = nn.silu(k)
        return apply_rope(k, positions, self.rope_base) if self.rope_dim is None else joined(k, k_rope)

    # ---- initialisation from measured inputs -------------------------------------------------------------------------

    def calibrate(self, variables, x: Float[Array, "B T D"]):
        """`variables` with freshly initialised key maps scaled so that keys have the queries' RMS on inputs `x`.

        Per slice: content keys against content queries, the rotary key against rotary queries. Scaling a Gaussian draw
        is drawing it anew with the measured deviation. Call it before training; the analytic rule assumes inputs of
        RMS 1.
        """
        content, rotary = self.apply(variables, x, method="_measure")
        params = dict(variables["params"])
        params["key_map"] = params["key_map"] * content.astype(self.param_dtype)
        if rotary is not None:
            kernel = params["rope_key"]["kernel"]
            params["rope_key"] = {"kernel": kernel * rotary.astype(self.param_dtype)}
        return {**variables, "params": params}

    @nn.compact
    def _measure(self, x: Float[Array, "B T D"]):
        """RMS of queries over that of keys: content slice, rotary slice (None without one)."""
        q, q_rope, v, k_rope = self._project(x, default_positions(x, None))
        k = reconstruct(v, self._key_map(x.shape[-1]))
        rms = lambda a: jnp.sqrt(jnp.mean(jnp.square(a.astype(jnp.float32))))
        return rms(q) / rms(k), None if q_rope is None else rms(q_rope) / rms(k_rope)


def absorb(q_nope: Float[Array, "B T H n"], key_map: Float[Array, "w H n"]) -> Float[Array, "B T H w"]:
    """Queries that meet values directly: `q~[h] = q_nope[h] M[h]^T`."""
    return jnp.einsum("BTHn,wHn->BTHw", q_nope, key_map)


def reconstruct(v: Float[Array, "B T G w"], key_map: Float[Array, "w H n"]) -> Float[Array, "B T H n"]:
    """Content keys, one per query head: `k_nope[h] = v[g(h)] M[h]`."""
    (B, T, G, w), (_, H, n) = v.shape, key_map.shape
    return jnp.einsum("BTGw,wGhn->BTGhn", v, key_map.reshape(w, G, H // G, n)).reshape(B, T, H, n)
