"""Decode attention as a Pallas kernel through Triton: NVIDIA GPUs from compute capability 8.0 on, tokens-major caches.

One program reads one group's live tokens, or a share of them where the batch alone would not fill the card, block by
block in an online softmax. Each block of values is loaded once and used twice, as keys and as values. The programs that
share a row (splits) leave normalised float32 partials and their lse, merged afterwards.

JAX has deprecated this backend since 0.11, in favour of Mosaic GPU; it serves all generations meanwhile.
"""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from gva_jax.cache import MULTIPLE
from gva_jax.compat import multiprocessors, target_platform

try:
    from jax.experimental.pallas import triton as plt
except ImportError:  # removed from JAX
    plt = None

BLOCK_BYTES = 32 * 1024  # of cache a step; two or three such buffers fit the 99 KiB a block may use on any card
ROWS = 64  # most query rows a program
PROGRAMS = 4  # a multiprocessor, aimed at by splitting
SPLIT = 256  # fewest tokens worth a split
MERGED = 16  # splits a step, when they are merged
QUERY_DTYPES = tuple(jnp.dtype(t) for t in ("float32", "bfloat16", "float16"))
CACHE_DTYPES = (*QUERY_DTYPES, *(jnp.dtype(t) for t in ("int8", "float8_e4m3fn", "float8_e5m2")))


class _Operands(NamedTuple):
    """What a program reads, all of it in GPU memory; the caches' first axis P counts pages, or rows without a table."""

    q: Any  # (B, T, H, d)
    values: Any  # (P, G, S, dv)
    keys: Any  # (P, G, S, d) or None: the values
    q_rope: Any  # (B, T, H, r) or None
    rope_keys: Any  # (P, S, r) or None
    value_scales: Any  # (P, G, S) or None
    key_scales: Any  # (P, G, S) or None
    page_table: Any  # (B, N) or None
    lengths: Any  # (B,)
    q_lengths: Any  # (B,) or None: all T


class _Partials(NamedTuple):
    """What the splits, n of them, leave to be merged."""

    out: Any  # (n, B, T, H, dv)
    lse: Any  # (n, B, T, H)
    sinks: Any  # (H,) or None
    q_lengths: Any  # (B,) or None


def decode_attention(
    q, values, *, keys=None, q_rope=None, rope_keys=None, lengths, q_lengths=None, scale, window=None, softcap=None,
    sinks=None, value_scales=None, key_scales=None, page_table=None, layout, interpret=False,
):  # fmt: skip
    """See `gva_jax.kernels.decode_attention`.

    Raises:
      ValueError: what this implementation cannot run (see `refusal`), or a target that is no GPU without `interpret`.
    """
    if why := refusal(q, values, keys=keys, rope_keys=rope_keys, layout=layout):
        raise ValueError(f"pallas_triton: {why}")
    if not isinstance(interpret, bool):
        raise ValueError(f"pallas_triton: interpret = {interpret!r}: must be True or False, it has one interpreter")
    if not interpret and target_platform() != "gpu":
        raise ValueError(f"pallas_triton runs on GPUs, the target is {target_platform()}: pass interpret=True there")
    # JAX warns when the kernel is lowered, which is after this function has returned.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

    (B, T, H, _), (_, G, page, dv) = q.shape, values.shape
    S = page if page_table is None else page * page_table.shape[1]
    int32 = lambda a: None if a is None else a.astype(jnp.int32)
    q_lengths = int32(q_lengths)
    x = _Operands(
        q, values, keys, None if q_rope is None else q_rope.astype(q.dtype), rope_keys, value_scales,
        value_scales if keys is None else key_scales, int32(page_table), int32(lengths), q_lengths,
    )  # fmt: skip
    rows, block, compiler_params = _tiles(x)
    row_tiles = -(-T * H // G // rows)
    splits = max(1, min(S // SPLIT, PROGRAMS * multiprocessors() // (B * G * row_tiles)))
    whole = splits == 1 and sinks is None
    out, lse = pl.pallas_call(
        functools.partial(
            _attend, rows=rows, block=block, splits=splits, capacity=S, scale=scale, window=window, softcap=softcap
        ),
        grid=(row_tiles, B * G, splits),  # programs that read the same tokens are neighbours
        out_shape=(
            jax.ShapeDtypeStruct((splits, B, T, H, dv), q.dtype if whole else jnp.float32),
            jax.ShapeDtypeStruct((splits, B, T, H), jnp.float32),
        ),
        compiler_params=compiler_params,
        interpret=interpret,
        name="gva_decode_triton",
    )(x)
    if whole:
        return out[0], lse[0]
    return tuple(
        pl.pallas_call(
            _merge,
            grid=(B, T, H),
            out_shape=(
                jax.ShapeDtypeStruct((B, T, H, dv), q.dtype),
                jax.ShapeDtypeStruct((B, T, H), jnp.float32),
            ),
            compiler_params=plt.CompilerParams(num_warps=1 if dv <= 128 else 4, num_stages=2),
            interpret=interpret,
            name="gva_decode_triton_merge",
        )(_Partials(out, lse, sinks, q_lengths))
    )


def refusal(q, values, *, keys=None, rope_keys=None, layout) -> str | None:
    """Why this implementation cannot run on these operands, or None."""
    if plt is None:
        return f"JAX {jax.__version__} no longer has the Pallas Triton backend; use pallas_mosaic_gpu or xla"
    if layout != "tokens_major":
        return f"layout = {layout!r}: must be tokens_major"
    if values.shape[2] % MULTIPLE:
        return f"values have {values.shape[2]} tokens: must be a multiple of {MULTIPLE}"
    names = lambda dtypes: ", ".join(str(t) for t in dtypes)
    if q.dtype not in QUERY_DTYPES:
        return f"q is {q.dtype}: must be one of {names(QUERY_DTYPES)}"
    for name, operand in (("values", values), ("keys", keys), ("rope_keys", rope_keys)):
        if operand is None:
            continue
        if operand.dtype not in CACHE_DTYPES:
            return f"{name} are {operand.dtype}: must be one of {names(CACHE_DTYPES)}"
        # JAX addresses arrays of up to 2^32 bytes with signed 32-bit element offsets, larger ones with 64 bits.
        if operand.size > 2**31 and operand.size * operand.dtype.itemsize <= 2**32:
            return f"{name} have {operand.size} elements of one byte: must be at most 2^31, or more than 2^32"
    return None


def _tiles(x: _Operands):
    """Query rows and tokens of a program's tiles, and the compiler's parameters."""
    caches = [c for c in (x.values, x.keys, x.rope_keys) if c is not None]
    # A quantised tile is also held as q's dtype, from which both products are made.
    token_bytes = sum(_pad(c.shape[-1]) * max(c.dtype.itemsize, x.q.dtype.itemsize) for c in caches)
    wide = max(_pad(x.q.shape[-1]), _pad(x.values.shape[-1]))
    T, H, G = *x.q.shape[1:3], x.values.shape[1]
    # Accumulators live in registers; float32 products, made without tensor cores, take more of them.
    most = ROWS // 4 if wide > 256 or x.q.dtype == jnp.float32 else ROWS // 2 if wide > 128 else ROWS
    rows = min(_pad(T * H // G), most)
    block = 16
    while block < MULTIPLE and 2 * block * token_bytes <= BLOCK_BYTES:
        block *= 2
    stages = 3 if 3 * block * token_bytes <= 2 * BLOCK_BYTES else 2
    return rows, block, plt.CompilerParams(num_warps=8 if wide > 128 else 4, num_stages=stages)


def _pad(n: int) -> int:
    """Axes of Triton's tiles are powers of two, and tensor cores take 16 or more."""
    return max(16, 1 << (n - 1).bit_length())


# Of int32 that are not negative; `//` would correct for signs, and widen where x64 is on.
_div = lambda a, n: lax.div(a, np.int32(n))
_rem = lambda a, n: lax.rem(a, np.int32(n))


def _attend(x: _Operands, out_ref, lse_ref, *, rows, block, splits, capacity, scale, window, softcap):
    """One program: `rows` query rows (T h of a group, the heads of a query side by side) over one split's tokens."""
    (_, T, H, _), (_, G, page, dv) = x.q.shape, x.values.shape
    h, dtype = H // G, x.q.dtype
    tile, bg, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    b, g = _div(bg, G), _rem(bg, G)
    row = tile * rows + lax.iota(jnp.int32, rows)
    t, head = _div(row, h), g * h + _rem(row, h)
    column = lambda width: lax.iota(jnp.int32, _pad(width))[None]

    def query(ref):
        width = ref.shape[-1]
        mask = (row < T * h)[:, None] & (column(width) < width)
        return plt.load(ref.at[b, t[:, None], head[:, None], column(width)], mask=mask, other=0.0)

    q, q_rope = query(x.q), None if x.q_rope is None else query(x.q_rope)
    length, q_length = x.lengths[b], np.int32(T) if x.q_lengths is None else x.q_lengths[b]
    # Positions from start to before end are seen; by rows that are not real, none.
    end = jnp.where((t < q_length) & (row < T * h), length - (q_length - 1 - t), 0)[:, None]
    live_end = jnp.where(q_length > 0, jnp.clip(length, 0, capacity), 0)
    first_block = 0 if window is None else _div(jnp.maximum(length - (q_length - 1) - window, 0), block)
    last_block = _div(live_end + (block - 1), block)
    share = _div(jnp.maximum(last_block - first_block, 0) + (splits - 1), splits)
    dot = lambda a, b, axis: lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )

    def step(i, carry):
        m, total, acc = carry
        token = lax.iota(jnp.int32, block)
        position = i * block + token
        live = position < live_end
        if x.page_table is None:
            at, slot = b, position
        else:
            at, slot = x.page_table[b, _div(i, page // block)], _rem(i, page // block) * block + token

        def cached(ref, *group):
            """A tile of a cache, zeros where dead: 0 NaN is NaN, and the columns past the width are summed."""
            width = ref.shape[-1]
            mask = live[:, None] & (column(width) < width)
            none = jnp.zeros((), ref.dtype)
            return _widen(plt.load(ref.at[at, *group, slot[:, None], column(width)], mask=mask, other=none), dtype)

        def scales(ref):
            return plt.load(ref.at[at, g, slot], mask=live, other=0.0).astype(jnp.float32)[None]

        v = cached(x.values, g)
        s = dot(q, v if x.keys is None else cached(x.keys, g), 1)
        if x.key_scales is not None:
            s = s * scales(x.key_scales)
        if q_rope is not None:
            s = s + dot(q_rope, cached(x.rope_keys), 1)
        s = s * scale
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        seen = (position[None] < end) & live[None]
        if window is not None:
            seen = seen & (position[None] >= end - window)
        s = jnp.where(seen, s, -jnp.inf)

        m_new = jnp.maximum(m, s.max(axis=1))
        base = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # nothing seen yet: any base does
        p = jnp.exp(s - base[:, None])
        shrink = jnp.exp(m - base)
        weights = p if x.value_scales is None else p * scales(x.value_scales)
        acc = acc * shrink[:, None] + dot(weights.astype(dtype), v, 0)
        return m_new, total * shrink + p.sum(axis=1), acc

    start = first_block + split * share
    m, total, acc = lax.fori_loop(
        start,
        jnp.minimum(start + share, last_block),
        step,
        (
            jnp.full((rows,), -jnp.inf, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, _pad(dv)), jnp.float32),
        ),
    )
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, m + jnp.log(total), -jnp.inf)
    mask = row < T * h
    plt.store(lse_ref.at[split, b, t, head], lse, mask=mask)
    if splits > 1:  # what saw nothing is not read again
        mask = mask & some
    plt.store(
        out_ref.at[split, b, t[:, None], head[:, None], column(dv)],
        (acc / total[:, None]).astype(out_ref.dtype),
        mask=mask[:, None] & (column(dv) < dv),
    )


def _widen(x, dtype):
    """A tile in q's dtype. Cards before 8.9 cannot convert e4m3: but for the exponent's bias, and NaN, its bits are a
    float16's, moved by 7.
    """
    if x.dtype == jnp.float8_e4m3fn:
        bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
        half = lax.bitcast_convert_type((bits << 7) & 0x3F80 | bits & -0x8000, jnp.float16)
        x = jnp.where(bits & 0x7F == 0x7F, jnp.nan, half.astype(jnp.float32) * 2.0**8)
    return x.astype(dtype)


def _merge(x: _Partials, out_ref, lse_ref):
    """One program: the splits of one query and head. The sink takes its weight here, once."""
    b, t, head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    n, dv = x.out.shape[0], x.out.shape[-1]
    real = True if x.q_lengths is None else t < x.q_lengths[b]
    split = lax.iota(jnp.int32, _pad(n))
    lse = plt.load(x.lse.at[split, b, t, head], mask=split < n, other=-jnp.inf)
    m = lse.max(axis=0)
    if x.sinks is not None:  # queries that are not real have none
        sink = jnp.where(real, x.sinks[head].astype(jnp.float32), -jnp.inf)
        m = jnp.maximum(m, sink)
    base = jnp.where(m == -jnp.inf, 0.0, m)
    total = jnp.exp(lse - base).sum(axis=0)
    if x.sinks is not None:
        total = total + jnp.exp(sink - base)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    column = lax.iota(jnp.int32, _pad(dv))

    def add(i, acc):
        split = i * MERGED + lax.iota(jnp.int32, MERGED)
        lse = plt.load(x.lse.at[split, b, t, head], mask=split < n, other=-jnp.inf)
        mask = (lse > -jnp.inf)[:, None] & (column < dv)[None]  # an empty split has left nothing here
        out = plt.load(x.out.at[split[:, None], b, t, head, column[None]], mask=mask, other=0.0)
        return acc + (out * jnp.exp(lse - base)[:, None]).sum(axis=0)

    acc = lax.fori_loop(np.int32(0), np.int32(pl.cdiv(n, MERGED)), add, jnp.zeros((_pad(dv),), jnp.float32))
    plt.store(out_ref.at[b, t, head, column], (acc / total).astype(out_ref.dtype), mask=column < dv)
    lse_ref[b, t, head] = jnp.where(some, base + jnp.log(total), -jnp.inf)
