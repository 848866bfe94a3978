"""Decode attention as a blocked online softmax in plain JAX: runs anywhere, the default on CPU.

A loop over blocks of tokens keeps each block in the processor's cache while it is used twice, as keys and as values,
and ends at the longest live length, so a short row in a long cache costs little.
"""

import jax
import jax.numpy as jnp

from gva_jax.compat import wide_dtype

BLOCK = 2048  # tokens a step


def decode_attention(
    q, values, *, keys=None, q_rope=None, rope_keys=None, lengths, q_lengths=None, scale, window=None, softcap=None,
    sinks=None, layout,
):  # fmt: skip
    """See `gva_jax.kernels.decode_attention`."""
    major = layout == "tokens_major"
    token = 2 if major else 3
    (B, T, H, _), G, S = q.shape, values.shape[1], values.shape[token]
    dv = values.shape[3 if major else 2]
    wide, h = wide_dtype(q.dtype), H // G
    block = min(BLOCK, S)
    q_lengths = jnp.full((B,), T, jnp.int32) if q_lengths is None else q_lengths.astype(jnp.int32)
    lengths = lengths.astype(jnp.int32)

    rows = lambda x: x.reshape(B, T, G, h, -1).swapaxes(1, 2).reshape(B, G, T * h, -1)  # heads of a group side by side
    q_G = rows(q)
    q_rope_G = None if q_rope is None else rows(q_rope).reshape(B, G * T * h, -1)  # all groups share rotary keys
    end = lengths[:, None] - (q_lengths[:, None] - 1 - jnp.arange(T, dtype=jnp.int32))  # (B, T): see positions below it
    end = jnp.repeat(end, h, axis=1)[:, None, :, None]  # (B, 1, T h, 1)

    def tile(x, at, live):
        """Tokens at .. at + block of a cache operand, dead ones cleared: their NaN would survive a zero weight."""
        axis = x.ndim - (2 if major else 1)
        x = jax.lax.dynamic_slice_in_dim(x, at, block, axis)
        shape = [B] + [1] * (x.ndim - 1)
        shape[axis] = block
        return jnp.where(live.reshape(shape), x, 0).astype(q.dtype)

    dot = lambda eq, a, b: jnp.einsum(eq, a, b, preferred_element_type=wide)
    over_d, over_S = ("BGRd,BGSd->BGRS", "BGRS,BGSd->BGRd") if major else ("BGRd,BGdS->BGRS", "BGRS,BGdS->BGRd")
    over_r = "BRr,BSr->BRS" if major else "BRr,BrS->BRS"

    def step(i, carry):
        m, total, acc = carry
        first = i * block
        at = jnp.minimum(first, S - block)  # the last block is moved back into the array ...
        position = at + jnp.arange(block, dtype=jnp.int32)
        live = (position < lengths[:, None]) & (position >= first)  # ... and what came before is not counted twice
        v = tile(values, at, live)
        s = dot(over_d, q_G, v if keys is None else tile(keys, at, live))
        if q_rope is not None:
            s = s + dot(over_r, q_rope_G, tile(rope_keys, at, live)).reshape(s.shape)
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
        acc = acc * shrink[..., None] + dot(over_S, p.astype(q.dtype), v)
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
