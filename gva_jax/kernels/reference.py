"""Decode attention written plainly: the judge of every other implementation. float64 in, float64 through."""

import jax.numpy as jnp
from jax.lax import Precision

from gva_jax.compat import wide_dtype


def decode_attention(
    q, values, *, keys=None, q_rope=None, rope_keys=None, lengths, q_lengths=None, scale, window=None, softcap=None,
    sinks=None, value_scales=None, key_scales=None, page_table=None, layout, interpret=False,
):  # fmt: skip
    """See `gva_jax.kernels.decode_attention`."""
    wide = wide_dtype(q.dtype)

    def operand(x, scales=None):
        """A cache operand as (B, ..., S, width) in the wide dtype: tokens before the width, pages joined, scaled."""
        if x is None:
            return None
        x = (x.swapaxes(-1, -2) if layout == "tokens_minor" else x).astype(wide)
        x = x if scales is None else x * scales[..., None].astype(wide)
        return x if page_table is None else join_pages(x, page_table, -2)

    v, k, k_rope = operand(values, value_scales), operand(keys, key_scales), operand(rope_keys)
    (B, T, H, _), (G, S) = q.shape, v.shape[1:3]
    group = lambda x: x.reshape(B, T, G, H // G, -1).astype(wide)
    position, t = jnp.arange(S), jnp.arange(T)
    q_lengths = jnp.full((B,), T) if q_lengths is None else q_lengths

    live = position < lengths[:, None]  # (B, S); dead slots may hold NaN, and 0 * NaN is NaN: clear the operands too
    v = jnp.where(live[:, None, :, None], v, 0)
    k = v if k is None else jnp.where(live[:, None, :, None], k, 0)
    s = jnp.einsum("BTGhd,BGSd->BTGhS", group(q), k, precision=Precision.HIGHEST)
    if q_rope is not None:
        k_rope = jnp.where(live[:, :, None], k_rope, 0)
        s = s + jnp.einsum("BTGhr,BSr->BTGhS", group(q_rope), k_rope, precision=Precision.HIGHEST)
    s = s * scale
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)

    end = lengths[:, None] - (q_lengths[:, None] - 1 - t)  # (B, T): query t sees positions below its end
    seen = (position < end[..., None]) & live[:, None]
    if window is not None:
        seen = seen & (position >= end[..., None] - window)
    s = jnp.where(seen[:, :, None, None], s, -jnp.inf)

    m = s.max(axis=-1)
    if sinks is not None:
        sinks = sinks.reshape(G, H // G).astype(wide)
        m = jnp.maximum(m, sinks)
    m = jnp.where(jnp.isfinite(m), m, 0)
    p = jnp.exp(s - m[..., None])
    total = p.sum(axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - m)
    out = jnp.einsum("BTGhS,BGSd->BTGhd", p, v, precision=Precision.HIGHEST)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    lse = jnp.log(total) + m

    real = (t < q_lengths[:, None])[:, :, None]  # (B, T, 1)
    out = jnp.where(real[..., None], out.reshape(B, T, H, -1), 0).astype(q.dtype)
    return out, jnp.where(real, lse.reshape(B, T, H), -jnp.inf)


def join_pages(x, page_table, token_axis: int):
    """Pages (P, .., page, ..) in the order of `page_table` (B, N), joined along their tokens: (B, .., N page, ..)."""
    axis = token_axis % x.ndim
    pages = x[jnp.clip(page_table, 0, x.shape[0] - 1)]  # (B, N, ...); entries past the length may be anything
    pages = jnp.moveaxis(pages, 1, axis)
    return pages.reshape(*pages.shape[:axis], -1, *pages.shape[axis + 2 :])
