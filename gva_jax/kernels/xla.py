"""Decode attention as a blocked online softmax in plain JAX: runs anywhere, the default on CPU.

A loop over blocks of tokens keeps each block in the processor's cache while it is used twice, as keys and as values,
and ends at the longest live length, so a short row in a long cache costs little. CPUs take rows one after another, each
with its own length; elsewhere, where this stands in for a kernel, rows go side by side.
"""

import jax
import jax.numpy as jnp

from gva_jax.compat import target_platform, varying_like, wide_dtype
from gva_jax.kernels.reference import join_pages

TILE_BYTES = 2 << 20  # of a block of the cache on a CPU: about a core's second-level cache
BLOCK = 2048  # tokens a block at most


def decode_attention(
    q, values, *, keys=None, q_rope=None, rope_keys=None, lengths, q_lengths=None, scale, window=None, softcap=None,
    sinks=None, value_scales=None, key_scales=None, page_table=None, layout, interpret=False,
):  # fmt: skip
    """See `gva_jax.kernels.decode_attention`."""
    B, T = q.shape[:2]
    q_lengths = jnp.full((B,), T, jnp.int32) if q_lengths is None else q_lengths.astype(jnp.int32)
    cache = {"values": values, "keys": keys, "rope_keys": rope_keys, "value_scales": value_scales,
             "key_scales": key_scales}  # fmt: skip
    rows, block = _tile(B, cache, page_table, layout, q.dtype)
    tiles = _Tiles(cache, page_table, layout, rows, block)
    attend = lambda first, queries: _attend(
        tiles, first, queries, scale=scale, window=window, softcap=softcap, sinks=sinks
    )
    queries = {"q": q, "q_rope": q_rope, "lengths": lengths.astype(jnp.int32), "q_lengths": q_lengths}
    if rows == B:
        return attend(jnp.int32(0), queries)
    split = lambda x: x.reshape(B // rows, rows, *x.shape[1:])
    first = jnp.arange(0, B, rows, dtype=jnp.int32)
    out, lse = jax.lax.map(lambda x: attend(*x), (first, jax.tree.map(split, queries)))
    return out.reshape(B, *out.shape[2:]), lse.reshape(B, *lse.shape[2:])


def _tile(B: int, cache: dict, page_table, layout: str, dtype) -> tuple[int, int]:
    """Rows that are worked on at once, a divisor of B, and tokens of a block."""
    tokens = cache["values"].shape[2 if layout == "tokens_major" else 3]
    capacity = tokens * (1 if page_table is None else page_table.shape[1])
    if target_platform() != "cpu":
        return B, min(BLOCK, capacity)
    arrays = [x for x in (cache["values"], cache["keys"], cache["rope_keys"]) if x is not None]
    token_bytes = sum(x.size // (x.shape[0] * tokens) for x in arrays) * jnp.dtype(dtype).itemsize
    fit = max(TILE_BYTES // token_bytes, 1)
    block = min(max(1 << fit.bit_length() - 1, 128), BLOCK, capacity)
    return max(n for n in range(1, max(fit // capacity, 1) + 1) if B % n == 0), block


def _attend(tiles, first, queries: dict, *, scale, window, softcap, sinks):
    """(out, lse) of the rows from `first` on that `queries` are of."""
    q, q_rope, lengths, q_lengths = (queries[name] for name in ("q", "q_rope", "lengths", "q_lengths"))
    (B, T, H, _), cache, major = q.shape, tiles.cache, tiles.major
    G, S, block = cache["values"].shape[1], tiles.capacity, tiles.block
    dv, wide, h = cache["values"].shape[3 if major else 2], wide_dtype(q.dtype), H // cache["values"].shape[1]
    lone = cache["keys"] is None

    rows = lambda x: x.reshape(B, T, G, h, -1).swapaxes(1, 2).reshape(B, G, T * h, -1)  # heads of a group side by side
    q_G = rows(q)
    q_rope_G = None if q_rope is None else rows(q_rope).reshape(B, G * T * h, -1)  # all groups share rotary keys
    end = lengths[:, None] - (q_lengths[:, None] - 1 - jnp.arange(T, dtype=jnp.int32))  # (B, T): see positions below it
    end = jnp.repeat(end, h, axis=1)[:, None, :, None]  # (B, 1, T h, 1)

    def tile(name, i, live):
        """Tokens of block i of a cache operand, dead ones cleared: their NaN would survive a zero weight."""
        x = tiles.load(name, first, i)
        shape = [B] + [1] * (x.ndim - 1)
        shape[tiles.token_axis(name)] = block
        return jnp.where(live.reshape(shape), x, 0).astype(wide if name.endswith("scales") else q.dtype)

    dot = lambda eq, a, b: jnp.einsum(eq, a, b, preferred_element_type=wide)
    # Written with the weights first, sums over tokens on the lanes take CPUs eight times as long.
    over_d, over_S = ("BGRd,BGSd->BGRS", "BGSd,BGRS->BGRd") if major else ("BGRd,BGdS->BGRS", "BGdS,BGRS->BGdR")
    over_r = "BRr,BSr->BRS" if major else "BRr,BrS->BRS"
    of_row = (lambda x: x[..., None]) if major else (lambda x: x[..., None, :])  # beside the accumulator

    def step(i, carry):
        m, total, acc = carry
        position = tiles.start(i) + jnp.arange(block, dtype=jnp.int32)
        # The last block is moved back into the array; what came before is not counted twice.
        live = (position < lengths[:, None]) & (position >= i * block) & (position < S)
        v = tile("values", i, live)
        s = dot(over_d, q_G, v if lone else tile("keys", i, live))
        key_scales = "value_scales" if lone else "key_scales"
        if cache[key_scales] is not None:
            s = s * tile(key_scales, i, live)[:, :, None]
        if q_rope is not None:
            s = s + dot(over_r, q_rope_G, tile("rope_keys", i, live)).reshape(s.shape)
        s = s * scale
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        seen = (position < end) & live[:, None, None]
        if window is not None:
            seen = seen & (position >= end - window)
        s = jnp.where(seen, s, -jnp.inf)

        m_new = jnp.maximum(m, s.max(axis=-1))
        base = jnp.where(jnp.isfinite(m_new), m_new, 0)  # nothing seen yet: any base does
        p = jnp.exp(s - base[..., None])
        shrink = jnp.exp(m - base)
        weights = p if cache["value_scales"] is None else p * tile("value_scales", i, live)[:, :, None]
        acc = acc * of_row(shrink) + dot(over_S, v, weights.astype(q.dtype))
        return m_new, total * shrink + p.sum(axis=-1), acc

    m = jnp.full((B, G, T * h), -jnp.inf, wide)
    if sinks is not None:
        m = jnp.broadcast_to(jnp.tile(sinks.reshape(1, G, h).astype(wide), (1, 1, T)), m.shape)
    total = jnp.where(jnp.isfinite(m), 1.0, 0.0).astype(wide)  # a sink has weight exp(sink - m) = 1 at the start
    acc = jnp.zeros((B, G, T * h, dv) if major else (B, G, dv, T * h), wide)
    begin = jnp.int32(0) if window is None else jnp.maximum((end - window).min(), 0) // block
    blocks = (jnp.clip(jnp.where(q_lengths > 0, lengths, 0).max(), 0, S) + block - 1) // block
    everything = (q, q_rope, lengths, q_lengths, sinks, first, *cache.values(), tiles.page_table)
    carry = tuple(varying_like(x, *everything) for x in (m, total, acc))
    m, total, acc = jax.lax.fori_loop(begin, blocks, step, carry)

    out = acc / of_row(jnp.where(total == 0, 1, total))
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(total) + jnp.where(jnp.isfinite(m), m, 0))
    heads = lambda x: x.reshape(B, G, T, h, -1).swapaxes(1, 2).reshape(B, T, H, -1)
    real = (jnp.arange(T) < q_lengths[:, None])[:, :, None, None]
    out = jnp.where(real, heads(out if major else out.swapaxes(-1, -2)), 0).astype(q.dtype)
    return out, jnp.where(real, heads(lse), -jnp.inf)[..., 0]


class _Tiles:
    """Blocks of tokens of a cache's operands: slices of the token axis, or a few pages joined."""

    def __init__(self, cache: dict, page_table, layout: str, rows: int, block: int):
        self.cache, self.major, self._rows, self.page_table = cache, layout == "tokens_major", rows, page_table
        tokens = cache["values"].shape[self.token_axis("values")]
        if page_table is None:
            self.capacity, self.block = tokens, block
            return
        self._pages = min(max(1, block // tokens), page_table.shape[1])  # pages a block
        self.capacity, self.block = page_table.shape[1] * tokens, self._pages * tokens
        self.page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % self._pages)))

    def token_axis(self, name: str) -> int:
        x = self.cache[name]
        return x.ndim - 1 if name.endswith("scales") or not self.major else x.ndim - 2

    def start(self, i):
        """Position of block i's first token."""
        return jnp.minimum(i * self.block, self.capacity - self.block) if self.page_table is None else i * self.block

    def load(self, name: str, first, i):
        """Block i of the rows from `first` on."""
        x, axis = self.cache[name], self.token_axis(name)
        if self.page_table is None:
            begin, size = [jnp.int32(0)] * x.ndim, list(x.shape)  # of one width, where x64 is on too
            begin[0], begin[axis] = first, jnp.int32(self.start(i))
            size[0], size[axis] = self._rows, self.block
            return jax.lax.dynamic_slice(x, begin, size)
        table = jax.lax.dynamic_slice(self.page_table, (first, jnp.int32(i * self._pages)), (self._rows, self._pages))
        return join_pages(x, table, axis)
