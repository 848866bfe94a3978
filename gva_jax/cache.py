"""What decoding keeps of the past: one cache pytree in two layouts, and ragged appends in place.

Letters: B batch, T new tokens, S capacity, G value groups, d value width, r rotary width.

    tokens_major (CPU, GPU)   values (B, G, S, d)   rope_keys (B, S, r)   keys (B, G, S, dk)
    tokens_minor (TPU)        values (B, G, d, S)   rope_keys (B, r, S)   keys (B, G, dk, S)

The two differ only in their last two axes. On TPU a minor axis of 64 or 16 would be padded to 128 lanes, and a
row-major cache is copied whole at every step; tokens on the lanes cost neither.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gva_jax.compat import is_concrete, target_platform

LAYOUTS = ("tokens_major", "tokens_minor")
MULTIPLE = 128  # capacities are rounded up to this, the tile of every kernel


class CacheOverflow(ValueError):
    """More tokens were appended than the cache has room for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Cached tokens of one attention layer; `keys` is None where the values serve as keys.

    Attributes:
      values: grouped values, `(B, G, S, d)` or `(B, G, d, S)`. For MLA the normalised latent, G = 1, d = c.
      lengths: `(B,)` int32, live tokens per row. Above S after an overflow under `jit`: such rows give NaN.
      keys: rotated keys, only in families that cache them.
      rope_keys: one rotated key per token, shared by all heads, `(B, S, r)` or `(B, r, S)`.
      layout: `tokens_major` or `tokens_minor`.
    """

    values: Float[Array, "B G _ _"]
    lengths: Int[Array, "B"]
    keys: Float[Array, "B G _ _"] | None = None
    rope_keys: Float[Array, "B _ _"] | None = None
    layout: str = dataclasses.field(default="tokens_major", metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Slots per row, S."""
        return self.values.shape[_token_axis(self.layout)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for cached tokens (the lengths not included)."""
        return sum(x.nbytes for x in (self.values, self.keys, self.rope_keys) if x is not None)

    @property
    def overflowed(self):
        """`(B,)` bool: rows whose tokens no longer all fit."""
        return self.lengths > self.capacity

    def append(
        self,
        new: Int[Array, "B"],
        values: Float[Array, "B T G d"],
        keys: Float[Array, "B T G dk"] | None = None,
        rope_keys: Float[Array, "B T r"] | None = None,
    ) -> "Cache":
        """Write row b's first `new[b]` tokens behind its live ones, in place where the cache is donated.

        Tokens past `new[b]` are not written.

        Raises:
          CacheOverflow: a row would exceed the capacity (where lengths are concrete). Under `jit` the tokens that do
            not fit are dropped and the row is marked as overflowed; nothing wraps around.
          ValueError: `new` outside 0 .. T, where it is concrete.
        """
        if is_concrete(new) and not 0 <= (given := np.asarray(new)).min() <= given.max() <= values.shape[1]:
            raise ValueError(f"lengths = {given.tolist()}: must lie in 0 .. {values.shape[1]}, the tokens given")
        lengths = self.lengths + new.astype(self.lengths.dtype)
        if is_concrete(lengths) and (over := np.asarray(lengths)).max(initial=0) > self.capacity:
            row = int(over.argmax())
            raise CacheOverflow(
                f"cache overflow: row {row} would hold {over[row]} tokens, capacity is {self.capacity}; "
                f"allocate with max_length={over[row]} or more"
            )
        T, S = values.shape[1], self.capacity
        token = jnp.arange(T, dtype=self.lengths.dtype)
        slot = jnp.where(token < new[:, None], self.lengths[:, None] + token, S)  # S is out of range: dropped
        write = lambda buffer, x: None if buffer is None else _write(buffer, slot, x, self.layout)
        return dataclasses.replace(
            self,
            values=write(self.values, values),
            keys=write(self.keys, keys),
            rope_keys=write(self.rope_keys, rope_keys),
            lengths=lengths,
        )


def init_cache(
    batch: int,
    max_length: int,
    *,
    groups: int,
    value_dim: int,
    key_dim: int | None = None,
    rope_dim: int = 0,
    dtype=jnp.bfloat16,
    layout: str | None = None,
) -> Cache:
    """An empty cache of at least `max_length` tokens a row (rounded up to a multiple of 128).

    `layout=None` takes the one of the device the active mesh (or the default backend) has.
    """
    layout = layout or ("tokens_minor" if target_platform() == "tpu" else "tokens_major")
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: must be one of {', '.join(LAYOUTS)}, or None for the device's own")
    if batch < 1 or max_length < 1:
        raise ValueError(f"batch = {batch}, max_length = {max_length}: both must be 1 or more")
    S = -(-max_length // MULTIPLE) * MULTIPLE
    tile = lambda width: (S, width) if layout == "tokens_major" else (width, S)
    return Cache(
        values=jnp.zeros((batch, groups, *tile(value_dim)), dtype),
        keys=None if key_dim is None else jnp.zeros((batch, groups, *tile(key_dim)), dtype),
        rope_keys=jnp.zeros((batch, *tile(rope_dim)), dtype) if rope_dim else None,
        lengths=jnp.zeros((batch,), jnp.int32),
        layout=layout,
    )


def _token_axis(layout: str) -> int:
    return -2 if layout == "tokens_major" else -1


def _write(buffer: Array, slot: Int[Array, "B T"], x: Array, layout: str) -> Array:
    """Scatter `x` (B, T, ...) to `slot`; slots at or past the capacity are dropped."""
    between = (slice(None),) * (buffer.ndim + _token_axis(layout) - 1)
    rows = jnp.arange(buffer.shape[0], dtype=slot.dtype)[:, None]
    return buffer.at[(rows, *between, slot)].set(x.astype(buffer.dtype), mode="drop")
