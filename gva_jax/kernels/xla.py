"""Decode attention as a blocked online softmax in plain JAX: runs anywhere, the default on CPU.

A loop over blocks of tokens keeps each block in the processor's cache while it is used twice, as keys and as values,
and ends at the longest live length, so a short row in a long cache costs little.
"""

import jax
import jax.numpy as jnp

from gva_jax.compat import wide_dtype
from gva_jax.kernels.reference import join_pages

BLOCK = 2048  # tokens a step


def decode_attention(
    q, values, *, keys=None, q_rope=None, rope_keys=None, lengths, q_lengths=None, scale, window=None, softcap=None,
    sinks=None, value_scales=None, key_scales=None, page_table=None, layout, interpret=False,
):  # fmt: skip
    """See `gva_jax.kernels.decode_attention`."""
    major = layout == "tokens_major"
    token, width = (-2, -1) if major else (-1, -2)
    (B, T, H, _), G, dv = q.shape, values.shape[1], values.shape[width]
    wide, h = wide_dtype(q.dtype), H // G
    q_lengths = jnp.full((B,), T, jnp.int32) if q_lengths is None else q_lengths.astype(jnp.int32)
    lengths = lengths.astype(jnp.int32)
    tiles = _Tiles(values.shape[token], token, page_table)
    S, block = tiles.capacity, tiles.block

    rows = lambda x: x.reshape(B, T, G, h, -1).swapaxes(1, 2).reshape(B, G, T * h, -1)  # heads of a group side by side
    q_G = rows(q)
    q_rope_G = None if q_rope is None else rows(q_rope).reshape(B, G * T * h, -1)  # all groups share rotary keys
    end = lengths[:, None] - (q_lengths[:, None] - 1 - jnp.arange(T, dtype=jnp.int32))  # (B, T): see positions below it
    end = jnp.repeat(end, h, axis=1)[:, None, :, None]  # (B, 1, T h, 1)
    per_token = lambda scales, i, live: jnp.where(live[:, None], tiles.scales(scales, i), 0).astype(wide)[:, :, None]

    def tile(x, i, live):
        """Tokens of block i of a cache operand, dead ones cleared: their NaN would survive a zero weight."""
        x = tiles.load(x, i)
        shape = [B] + [1] * (x.ndim - 1)
        shape[token] = block
        return jnp.where(live.reshape(shape), x, 0).astype(q.dtype)

    dot = lambda eq, a, b: jnp.einsum(eq, a, b, preferred_element_type=wide)
    over_d, over_S = ("BGRd,BGSd->BGRS", "BGRS,BGSd->BGRd") if major else ("BGRd,BGdS->BGRS", "BGRS,BGdS->BGRd")
    over_r = "BRr,BSr->BRS" if major else "BRr,BrS->BRS"

    def step(i, carry):
        m, total, acc = carry
        position = tiles.start(i) + jnp.arange(block, dtype=jnp.int32)
        # The last block is moved back into the array; what came before is not counted twice.
        live = (position < lengths[:, None]) & (position >= i * block) & (position < S)
        v = tile(values, i, live)
        s = dot(over_d, q_G, v if keys is None else tile(keys, i, live))
        k_scales = value_scales if keys is None else key_scales
        if k_scales is not None:
            s = s * per_token(k_scales, i, live)
        if q_rope is not None:
            s = s + dot(over_r, q_rope_G, tile(rope_keys, i, live)).reshape(s.shape)
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
        weights = p if value_scales is None else p * per_token(value_scales, i, live)
        acc = acc * shrink[..., None] + dot(over_S, weights.astype(q.dtype), v)
        return m_new, total * shrink + p.sum(axis=-1), acc

    m = jnp.full((B, G, T * h), -jnp.inf, wide)
    if sinks is not None:
        m = jnp.broadcast_to(jnp.tile(sinks.reshape(1, G, h).astype(wide), (1, 1, T)), m.shape)
    total = jnp.where(jnp.isfinite(m), 1.0, 0.0).astype(wide)  # a sink has weight exp(sink - m) = 1 at the start
    blocks = (jnp.clip(lengths.max(), 0, S) + block - 1) // block
    m, total, acc = jax.lax.fori_loop(0, blocks, step, (m, total, jnp.zeros((B, G, T * h, dv), wide)))

    out = acc / jnp.where(total == 0, 1, total)[..., None]
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(total) + jnp.where(jnp.isfinite(m), m, 0))
    heads = lambda x: x.reshape(B, G, T, h, -1).swapaxes(1, 2).reshape(B, T, H, -1)
    real = (jnp.arange(T) < q_lengths[:, None])[:, :, None, None]
    out = jnp.where(real, heads(out), 0).astype(q.dtype)
    return out, jnp.where(real, heads(lse), -jnp.inf)[..., 0]


class _Tiles:
    """Blocks of tokens of a cache operand: slices of its token axis, or a few pages joined."""

    def __init__(self, tokens: int, token_axis: int, page_table):
        self._axis, self._page_table = token_axis, page_table
        if page_table is None:
            self.capacity, self.block = tokens, min(BLOCK, tokens)
            return
        self._pages = min(max(1, BLOCK // tokens), page_table.shape[1])  # pages a block
        self.capacity, self.block = page_table.shape[1] * tokens, self._pages * tokens
        spare = -page_table.shape[1] % self._pages
        self._page_table = jnp.pad(page_table, ((0, 0), (0, spare)))

    def start(self, i):
        """Position of block i's first token."""
        return jnp.minimum(i * self.block, self.capacity - self.block) if self._page_table is None else i * self.block

    def load(self, x, i):
        return self._load(x, i, self._axis)

    def scales(self, x, i):
        """Of a scales array (B, G, S) or (P, G, page)."""
        return self._load(x, i, -1)

    def _load(self, x, i, axis: int):
        if self._page_table is None:
            return jax.lax.dynamic_slice_in_dim(x, self.start(i), self.block, axis % x.ndim)
        return join_pages(x, jax.lax.dynamic_slice_in_dim(self._page_table, i * self._pages, self._pages, 1), axis)
