"""Training attention in plain XLA: chunks of queries, each against the keys that it can see.

The gradient is written out as in flash attention (arXiv 2205.14135): weights are made again from the log-sum-exp rather
than kept, so memory grows with T times the chunk, and every product is one that CPUs run without transposing scores,
which automatic differentiation asks for.

Letters: B batch, G groups, h = H / G query heads a group, T positions, S those that a chunk sees, R = h t rows, the
queries of one group in a chunk of t positions, dk and dv widths of keys and values.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from gva_jax.attention.training.common import KEPT
from gva_jax.compat import wide_dtype

CHUNK = 512  # queries whose scores are in memory at once


def refusal(q, k, v, segment_ids) -> None:
    """Nothing: it runs anywhere, and XLA splits it over any mesh."""


def attention(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B T G dk"],
    v: Float[Array, "B T G dv"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B T H dv"]:
    """See `gva_jax.attention.dispatch.training_attention`."""
    (B, T, H, dk), G = q.shape, k.shape[2]
    by_group = q.reshape(B, T, G, H // G, dk).transpose(0, 2, 3, 1, 4)
    y = grouped_attention(by_group, k.swapaxes(1, 2), v.swapaxes(1, 2), segment_ids, scale)
    return y.transpose(0, 3, 1, 2, 4).reshape(B, T, H, v.shape[3])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_attention(
    q: Float[Array, "B G h T dk"],
    k: Float[Array, "B G T dk"],
    v: Float[Array, "B G T dv"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
) -> Float[Array, "B G h T dv"]:
    """`attention`, which brings the axes into this order."""
    return _forward(q, k, v, segment_ids, scale)[0]


def _forward(q, k, v, segment_ids, scale):
    outputs, log_sums = [], []
    for at in _chunks(q.shape[3]):
        s = _scores(q, k, segment_ids, at, scale)
        m = s.max(axis=-1, keepdims=True)
        m = jnp.where(jnp.isfinite(m), m, 0)
        p = jnp.exp(s - m)
        total = p.sum(axis=-1, keepdims=True)
        total = jnp.where(total == 0, 1, total)  # a row that sees nothing: weights 0, output 0, gradients 0
        y = jnp.einsum("BGRS,BGSd->BGRd", (p / total).astype(v.dtype), v[:, :, : at.stop])
        outputs.append(y.reshape(*q.shape[:3], -1, v.shape[3]))
        log_sums.append(m + jnp.log(total))
    y, log_sums = checkpoint_name((jnp.concatenate(outputs, axis=3), log_sums), KEPT)
    return y, (q, k, v, segment_ids, y, log_sums)


def _backward(scale, kept, dy):
    q, k, v, segment_ids, y, log_sums = kept
    wide = wide_dtype(q.dtype)
    dq, dk, dv = [], jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    for at, log_sum in zip(_chunks(q.shape[3]), log_sums, strict=True):
        k_seen, v_seen = k[:, :, : at.stop], v[:, :, : at.stop]
        rows, dy_rows = _rows(q, at), _rows(dy, at)
        p = jnp.exp(_scores(q, k, segment_ids, at, scale) - log_sum)
        dp = jnp.einsum("BGRd,BGSd->BGRS", dy_rows, v_seen, preferred_element_type=wide)
        shift = jnp.sum(dy_rows.astype(wide) * _rows(y, at).astype(wide), axis=-1, keepdims=True)
        ds = (p * (dp - shift) * scale).astype(q.dtype)
        dq.append(jnp.einsum("BGRS,BGSd->BGRd", ds, k_seen).reshape(*q.shape[:3], -1, q.shape[4]))
        over_rows = lambda a, b: jnp.einsum("BGRd,BGRS->BGdS", a, b, preferred_element_type=wide).swapaxes(2, 3)
        dk = dk.at[:, :, : at.stop].add(over_rows(rows, ds))
        dv = dv.at[:, :, : at.stop].add(over_rows(dy_rows, p.astype(dy.dtype)))
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype), None


grouped_attention.defvjp(_forward, _backward)


def _chunks(T: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, T)) for start in range(0, T, CHUNK)]


def _rows(x, at: slice):
    """(B, G, h, T, d) to (B, G, R, d)."""
    x = x[:, :, :, at]
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _scores(q, k, segment_ids, at: slice, scale):
    """(B, G, R, S): scaled scores, -inf where the query does not see the key."""
    wide = wide_dtype(q.dtype)
    s = jnp.einsum("BGRd,BGSd->BGRS", _rows(q, at), k[:, :, : at.stop], preferred_element_type=wide) * scale
    seen = jnp.arange(at.start, at.stop)[:, None] >= jnp.arange(at.stop)  # (t, S), or (B, 1, t, S) with segments
    if segment_ids is not None:
        mine, theirs = segment_ids[:, at, None], segment_ids[:, None, : at.stop]
        seen = (seen & (mine == theirs) & (mine >= 0))[:, None]
    return jnp.where(jnp.tile(seen, (q.shape[2], 1)), s, -jnp.inf)
