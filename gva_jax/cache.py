"""What decoding keeps of the past: one cache pytree in two layouts, and ragged appends in place.

Letters: B batch, T new tokens, S capacity, G value groups, d value width, r rotary width.

    tokens_minor (TPU, CPU)   values (B, G, d, S)   rope_keys (B, r, S)   keys (B, G, dk, S)
    tokens_major (GPU)        values (B, G, S, d)   rope_keys (B, S, r)   keys (B, G, S, dk)

Scales of an eight-bit cache are (B, G, S) in both. Paged, pages replace B and the page size replaces S, and a page
table (B, N) lists each row's pages. The layouts differ only in the arrays' last two axes. On TPU a minor axis of 64 or
16 would be padded to 128 lanes, and a row-major cache is copied whole at every step; tokens on the lanes cost neither,
and on CPUs the products over them take about two thirds of the time.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from gva_jax.compat import is_concrete, target_platform
from gva_jax.quantised import is_quantised, quantise

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
      value_scales, key_scales: `(B, G, S)` factors of int8 or fp8 values and keys; rotary keys are never scaled.
      page_table: `(B, N)` int32, the page that holds each row's n-th stretch of tokens; who gets which is the caller's
        choice. The arrays' first axis then counts pages.
      layout: `tokens_major` or `tokens_minor`.
    """

    values: Num[Array, "B G _ _"]
    lengths: Int[Array, "B"]
    keys: Num[Array, "B G _ _"] | None = None
    rope_keys: Float[Array, "B _ _"] | None = None
    value_scales: Float[Array, "B G _"] | None = None
    key_scales: Float[Array, "B G _"] | None = None
    page_table: Int[Array, "B N"] | None = None
    layout: str = dataclasses.field(default="tokens_major", metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Slots per row, S."""
        return self._stretch * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def _stretch(self) -> int:
        """Tokens that lie side by side: a page, or the whole capacity."""
        return self.values.shape[_token_axis(self.layout)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for cached tokens (the lengths not included)."""
        arrays = (self.values, self.keys, self.rope_keys, self.value_scales, self.key_scales)
        return sum(x.nbytes for x in arrays if x is not None)

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
          ValueError: `new` outside 0 .. T, where it is concrete; tokens of another batch or family than the cache's.
        """
        for name, x in (("keys", keys), ("rope_keys", rope_keys)):
            if (x is None) != (getattr(self, name) is None):
                has = "has no" if x is not None else "holds"
                raise ValueError(f"the cache {has} {name}: it was made for another attention family")
        if values.shape[0] != self.lengths.shape[0]:
            raise ValueError(f"tokens come for {values.shape[0]} rows, the cache has {self.lengths.shape[0]}")
        if is_concrete(new) and not 0 <= (given := np.asarray(new)).min() <= given.max() <= values.shape[1]:
            raise ValueError(f"lengths = {given.tolist()}: must lie in 0 .. {values.shape[1]}, the tokens given")
        lengths = self.lengths + new.astype(self.lengths.dtype)
        if is_concrete(lengths) and (over := np.asarray(lengths)).max(initial=0) > self.capacity:
            row = int(over.argmax())
            raise CacheOverflow(
                f"cache overflow: row {row} would hold {over[row]} tokens, capacity is {self.capacity}; "
                f"allocate with max_length={over[row]} or more"
            )
        write = self._write_tiles if self.layout == "tokens_minor" else self._scatter
        written = {"lengths": lengths}
        for name, x in (("values", values), ("keys", keys), ("rope_keys", rope_keys)):
            buffer = getattr(self, name)
            if buffer is None:
                continue
            if name != "rope_keys" and is_quantised(buffer.dtype):
                x, scale = quantise(x, buffer.dtype)
                scales = f"{name[:-1]}_scales"
                written[scales] = write(getattr(self, scales), scale, new, -1)
            written[name] = write(buffer, x, new, _token_axis(self.layout))
        return dataclasses.replace(self, **written)

    def stored(self, values: Float[Array, "B T G d"]) -> Float[Array, "B T G d"]:
        """`values` as they are read back once they are appended: rounded to the cache's dtype."""
        if not is_quantised(self.values.dtype):
            return values.astype(self.values.dtype).astype(values.dtype)
        entries, scale = quantise(values, self.values.dtype)
        return (entries.astype(jnp.float32) * scale[..., None]).astype(values.dtype)

    def _scatter(self, buffer: Array, x: Array, new: Int[Array, "B"], axis: int) -> Array:
        """Write `x` (B, T, ...) token by token; those that are not new or do not fit are dropped."""
        token = jnp.arange(x.shape[1], dtype=self.lengths.dtype)
        slot = jnp.where(token < new[:, None], self.lengths[:, None] + token, self.capacity)
        if self.page_table is None:
            rows = jnp.arange(slot.shape[0], dtype=slot.dtype)[:, None]
        else:
            dead = slot >= self.capacity
            page = jnp.take_along_axis(self.page_table, jnp.where(dead, 0, slot // self._stretch), axis=1)
            rows, slot = page.astype(slot.dtype), jnp.where(dead, self._stretch, slot % self._stretch)
        between = (slice(None),) * (buffer.ndim + axis - 1)
        return buffer.at[(rows, *between, slot)].set(x.astype(buffer.dtype), mode="drop")

    def _write_tiles(self, buffer: Array, x: Array, new: Int[Array, "B"], axis: int) -> Array:
        """The same with tokens on the last axis, by aligned tiles of 128 that are read, changed and written back.

        On TPU a single token is one lane of a tile: a scatter to it makes XLA re-lay the whole cache out, twice.
        """
        B, T, lanes = *x.shape[:2], MULTIPLE
        count = -(-(T + lanes - 1) // lanes)  # tiles that T tokens can touch, wherever they begin
        lengths, page = self.lengths.astype(jnp.int32), jnp.int32(self._stretch)
        shift = lengths % lanes
        place = jax.vmap(lambda row, by: jnp.roll(row, by, axis=-1))
        x = jnp.moveaxis(x.astype(buffer.dtype), 1, -1)
        x = place(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * lanes - T)]), shift)
        token = jnp.arange(count * lanes, dtype=jnp.int32) - shift[:, None]
        fits = jnp.minimum(new.astype(jnp.int32), self.capacity - lengths)
        is_new = (token >= 0) & (token < fits[:, None])

        def write(n, buffer):
            n = n.astype(jnp.int32)  # int64 where x64 is on
            b, tile = n // count, n % count
            position = jnp.minimum(lengths[b] - shift[b] + tile * lanes, self.capacity - lanes)
            row = b if self.page_table is None else self.page_table[b, position // page].astype(jnp.int32)
            at = (row, *(jnp.int32(0),) * (buffer.ndim - 2), position % page)
            of_tile = lambda x: jax.lax.dynamic_slice_in_dim(x[b], tile * lanes, lanes, axis=-1)
            old = jax.lax.dynamic_slice(buffer, at, (1, *buffer.shape[1:-1], lanes))
            changed = jnp.where(of_tile(is_new), of_tile(x)[None], old)
            return jax.lax.dynamic_update_slice(buffer, changed, at)

        return jax.lax.fori_loop(0, B * count, write, buffer)

    def read_values(self, start, size: int, dtype) -> Float[Array, "B G size d"]:
        """The values of slots start .. start + size; `start` is a multiple of `size`, which divides a page."""
        row = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start % self._stretch, size, axis % x.ndim)
        if self.page_table is not None:
            page = jax.lax.dynamic_index_in_dim(self.page_table, start // self._stretch, 1, keepdims=False)
            pages = jnp.clip(page, 0, self.values.shape[0] - 1)
            row = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start % self._stretch, size, axis % x.ndim)[pages]
        v = row(self.values, _token_axis(self.layout))
        v = (v if self.layout == "tokens_major" else v.swapaxes(-1, -2)).astype(dtype)
        return v if self.value_scales is None else v * row(self.value_scales, -1)[..., None].astype(dtype)


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
    page_table: Int[Array, "B N"] | None = None,
    pages: int | None = None,
    page_size: int = MULTIPLE,
) -> Cache:
    """An empty cache of at least `max_length` tokens a row (rounded up to a multiple of 128).

    `layout=None` takes the one of the device that the active mesh (or the default backend) has. An eight-bit `dtype`
    (int8, float8_e4m3fn, float8_e5m2) adds scales; rotary keys are then kept in bfloat16. With a `page_table` the cache
    is `pages` pages of `page_size` tokens (a multiple of 128), of which a row has N.

    Raises:
      ValueError: an unknown layout, sizes below 1, a page table that does not hold `max_length` tokens a row.
    """
    layout = layout or ("tokens_major" if target_platform() == "gpu" else "tokens_minor")
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: must be one of {', '.join(LAYOUTS)}, or None for the device's own")
    if batch < 1 or max_length < 1:
        raise ValueError(f"batch = {batch}, max_length = {max_length}: both must be 1 or more")
    count, S = batch, -(-max_length // MULTIPLE) * MULTIPLE
    if page_table is not None:
        if page_size < 1 or page_size % MULTIPLE:
            raise ValueError(f"page_size = {page_size}: must be a multiple of {MULTIPLE}")
        if pages is None or pages < 1:
            raise ValueError(f"pages = {pages}: give the number of pages beside a page table")
        if page_table.shape[0] != batch or page_table.shape[1] * page_size < max_length:
            need = f"must be ({batch}, N) with N x {page_size} tokens or more"
            raise ValueError(f"page_table has shape {page_table.shape} for max_length = {max_length}: {need}")
        count, S = pages, page_size
    tile = lambda width: (S, width) if layout == "tokens_major" else (width, S)
    grouped = lambda width: None if width is None else jnp.zeros((count, groups, *tile(width)), dtype)
    scales = lambda width: None if width is None or not eight_bit else jnp.ones((count, groups, S), jnp.float32)
    eight_bit = is_quantised(dtype)
    rope_dtype = jnp.bfloat16 if eight_bit else dtype
    return Cache(
        values=grouped(value_dim),
        keys=grouped(key_dim),
        rope_keys=jnp.zeros((count, *tile(rope_dim)), rope_dtype) if rope_dim else None,
        value_scales=scales(value_dim),
        key_scales=scales(key_dim),
        page_table=None if page_table is None else jnp.array(page_table, jnp.int32),  # a copy that can be donated
        lengths=jnp.zeros((batch,), jnp.int32),
        layout=layout,
    )


def _token_axis(layout: str) -> int:
    return -2 if layout == "tokens_major" else -1
