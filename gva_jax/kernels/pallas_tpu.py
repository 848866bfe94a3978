"""Decode attention for TPUs: a Pallas kernel over the tokens-minor cache, where tokens lie on the lanes.

The kernel copies the cache from HBM by hand. Loops over a row's live blocks have a dynamic length, so dead blocks cost
neither a copy nor a step, and the next blocks are on their way while one is used, across the borders of rows too.

A grid step (split, tile) takes one split of the tokens of each row in a tile of rows. For every block of `block`
tokens it copies the pieces of `piece` tokens that are live and runs an online softmax:

    s (R, block) = q (R, d) values (d, block) + q_rope (R, r) rope_keys (r, block)
    out (R, d)  += p (R, block) values^T                R = T h: the queries of one group of values

Groups narrower than the matrix unit are packed: `pack` groups become one of width pack d, their queries lie block-
diagonally in (pack T h, pack d), and a matrix pass that would load a half-empty tile of values loads a full one.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gva_jax.cache import MULTIPLE
from gva_jax.compat import target_kind, target_platform
from gva_jax.kernels.merge import merge_splits, with_sinks

LANES = 128
BLOCK_BYTES = 1 << 20  # of the cache in one block; enough to keep HBM busy while another block is computed
MAX_BLOCK = 2048  # tokens
PIECE = 256  # tokens of one copy at most: a short row copies little beyond its end, and HBM is still read in long runs
SCORES_BYTES = 2 << 20  # of one block's float32 scores
BUFFERS = 3  # blocks in VMEM: one in use, two on their way
ROWS_BYTES = 4 << 20  # of queries and outputs that a grid step holds
PAGE_IDS = 1 << 15  # page ids of one grid step, in scalar memory
MATRIX = 256  # width of the largest matrix unit; smaller ones divide it
VMEM_BYTES = 48 << 20  # of one core at most; chips have 64 MiB or more, but those of
SMALL_VMEM = {"TPU v2": 16 << 20, "TPU v3": 16 << 20, "TPU v4": 16 << 20}
DTYPES = ("bfloat16", "float32")
CACHE_DTYPES = (*DTYPES, "int8", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Plan:
    """Sizes that are fixed when the kernel is compiled."""

    block: int  # tokens
    piece: int  # tokens of one copy
    page: int  # tokens of a page; S where there are no pages
    pack: int  # groups side by side in one matrix product
    queries: int  # of one group, T h
    splits: int  # of a row's tokens, over a grid axis
    rows: int  # of the batch, in one grid step
    tiles: int  # grid steps that cover the batch
    paged: bool
    scale: float
    window: int | None
    softcap: float | None


def decode_attention(
    q, values, *, keys=None, q_rope=None, rope_keys=None, lengths, q_lengths=None, scale, window=None, softcap=None,
    sinks=None, value_scales=None, key_scales=None, page_table=None, layout, interpret=False,
):  # fmt: skip
    """See `gva_jax.kernels.decode_attention`."""
    (B, T, H, _), (_, G, dv, page) = q.shape, values.shape
    cache = {"values": values, "keys": keys, "rope_keys": rope_keys, "value_scales": value_scales,
             "key_scales": key_scales}  # fmt: skip
    cache = {name: x for name, x in cache.items() if x is not None}
    if not interpret and (platform := target_platform()) != "tpu":
        raise ValueError(f"pallas_tpu runs on TPUs, the target is {platform}: pass interpret=True there")
    if why := refusal(q, values, keys=keys, rope_keys=rope_keys, layout=layout):
        raise ValueError(f"pallas_tpu: {why}")
    h = H // G
    pack = _pack(G, T * h, (values, values if keys is None else keys))
    plan = _plan(q, q_rope, cache, page_table, pack, scale, window, softcap)
    Gp, R = G // pack, pack * T * h
    spare = -(-R // 8) * 8 - R  # rows that fill the last tile of sublanes

    # (B, T, H, x) -> (B, G / pack, R, x): the queries of a pack's groups, group by group.
    group = lambda x: x.reshape(B, T, Gp, pack, h, -1).transpose(0, 2, 3, 1, 4, 5)
    fill = lambda x: jnp.pad(x, [(0, plan.rows * plan.tiles - B)] + [(0, 0)] * (x.ndim - 1))  # with empty rows
    fill_rows = lambda x: fill(jnp.pad(x.reshape(B, Gp, R, -1), [(0, 0), (0, 0), (0, spare), (0, 0)]))
    own = np.eye(pack, dtype=bool)[:, None, None, :, None]  # a query meets its own group's values only
    operands = {"q": fill_rows(jnp.where(own, group(q)[..., None, :], 0))}
    if q_rope is not None:
        q_rope = fill_rows(group(q_rope.astype(q.dtype)))
        operands["q_rope"] = q_rope.reshape(q_rope.shape[0], -1, q_rope.shape[-1])
    if page_table is not None:
        operands["page_table"] = fill(page_table.astype(jnp.int32)).reshape(plan.tiles, plan.rows, -1)
    query = np.pad(np.tile(np.repeat(np.arange(T, dtype=np.int32), h), pack), (0, spare))  # t of each of the R rows

    lengths = lengths.astype(jnp.int32)
    q_lengths = jnp.full((B,), T, jnp.int32) if q_lengths is None else q_lengths.astype(jnp.int32)
    capacity = page if page_table is None else page * page_table.shape[1]
    schedule = _schedule(plan, fill(lengths), fill(q_lengths), capacity)
    out, lse = _call(plan, schedule, jnp.asarray(query)[:, None], operands, cache, dv * pack, interpret)

    # (splits, B, G / pack, R, pack dv) -> (splits, B, T, H, dv): of each query's row, its own group's columns.
    heads = lambda x: x.transpose(0, 1, 4, 2, 3, 5, 6).reshape(plan.splits, B, T, H, -1)
    out, lse = (x[:, :B, :, :R].reshape(plan.splits, B, Gp, pack, T, h, -1) for x in (out, lse))
    out = out.reshape(*out.shape[:-1], pack, dv)
    out = heads(jnp.stack([out[:, :, :, j, :, :, j] for j in range(pack)], axis=3))
    lse = heads(lse)[..., 0]
    out, lse = (out[0], lse[0]) if plan.splits == 1 else merge_splits(out, lse)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks, None)  # queries that are not real are cleared below
    real = (jnp.arange(T, dtype=jnp.int32) < q_lengths[:, None])[:, :, None]
    return jnp.where(real[..., None], out, 0).astype(q.dtype), jnp.where(real, lse, -jnp.inf)


def refusal(q, values, *, keys=None, rope_keys=None, layout) -> str | None:
    """Why this implementation cannot run on these operands, or None."""
    if layout != "tokens_minor":
        return f"layout = {layout!r}: must be tokens_minor"
    if (tokens := values.shape[-1]) % MULTIPLE:
        return f"values have {tokens} tokens (of a row, or of a page): must be a multiple of {MULTIPLE}"
    if q.dtype not in DTYPES:
        return f"q is {q.dtype}: must be one of {', '.join(DTYPES)}"
    for name, x in (("values", values), ("keys", keys), ("rope_keys", rope_keys)):
        if x is not None and x.dtype not in CACHE_DTYPES:
            return f"{name} are {x.dtype}: must be one of {', '.join(CACHE_DTYPES)}"
    return None


def _pack(G: int, R: int, tensors) -> int:
    """Groups to a matrix product: while they fit the matrix unit's width and their queries cost it nothing."""

    def fits(pack):
        narrow = all(pack * x.shape[2] <= MATRIX and x.shape[2] % (32 // x.dtype.itemsize) == 0 for x in tensors)
        return pack == 1 or (narrow and pack * R <= 64)

    return max(pack for pack in range(1, G + 1) if G % pack == 0 and fits(pack))


def _plan(q, q_rope, cache, page_table, pack, scale, window, softcap) -> Plan:
    (B, T, H, dk), (_, G, dv, page) = q.shape, cache["values"].shape
    token_bytes = sum(math.prod(x.shape[1:-1]) * x.dtype.itemsize for x in cache.values())
    query_rows = G // pack * -(-pack * T * H // G // 8) * 8
    capacity = page if page_table is None else page * page_table.shape[1]
    block = min(BLOCK_BYTES // token_bytes, SCORES_BYTES // (4 * query_rows), MAX_BLOCK)
    block = min(1 << max(block, LANES).bit_length() - 1, capacity)
    if page < block:
        block = block // page * page
    splits = 2 if B < 16 and block < capacity else 1  # a chip has at most two cores to share the grid
    lanes = lambda *widths: sum(-(-width // LANES) * LANES for width in widths)
    row_bytes = query_rows * 4 * lanes(pack * dk, pack * dv, 1, 0 if q_rope is None else 1)
    rows = max(1, min(ROWS_BYTES // (2 * row_bytes), B if splits == 2 else -(-B // 2)))
    if page_table is not None:
        rows = max(1, min(rows, PAGE_IDS // page_table.shape[1]))
    tiles = -(-B // rows)
    if (needed := BUFFERS * block * token_bytes + 2 * rows * row_bytes) > _vmem() * 3 // 4:
        raise ValueError(
            f"pallas_tpu: would hold {needed >> 20} MiB in VMEM at T = {T}, H = {H}, G = {G}: "
            "use fewer queries at a time, or shard the groups over chips"
        )
    return Plan(
        block=block, piece=math.gcd(block, page, PIECE), page=page, pack=pack, queries=T * H // G, splits=splits,
        rows=-(-B // tiles), tiles=tiles, paged=page_table is not None, scale=scale,
        window=None if window is None else min(window, 1 << 30), softcap=softcap,
    )  # fmt: skip


def _vmem() -> int:
    return SMALL_VMEM.get(target_kind(), VMEM_BYTES)


def _schedule(plan: Plan, lengths, q_lengths, capacity: int):
    """What a row's copies and masks go by, all int32.

    begin, stop, end (B,): first token of block 0; live tokens; end of query 0 (query t sees positions below end + t).
    first, last (splits B,): each split's blocks of each row.
    seek (splits (B + 1),): the first row from this one on that has blocks in this split, else B.
    """
    end = lengths - (q_lengths - 1)
    stop = jnp.where(q_lengths > 0, jnp.clip(lengths, 0, capacity), 0)
    begin = jnp.zeros_like(stop)
    if plan.window is not None:
        begin = jnp.clip(end - plan.window, 0, stop) // np.int32(plan.piece) * np.int32(plan.piece)
    blocks = (stop - begin + np.int32(plan.block - 1)) // np.int32(plan.block)
    share = (blocks + np.int32(plan.splits - 1)) // np.int32(plan.splits)
    split = np.arange(plan.splits, dtype=np.int32)[:, None]
    first, last = (jnp.minimum(blocks, i * share) for i in (split, split + 1))
    row = np.arange(len(lengths), dtype=np.int32)
    seek = lax.cummin(jnp.where(first < last, row, np.int32(len(row))), axis=1, reverse=True)
    seek = jnp.pad(seek, ((0, 0), (0, 1)), constant_values=len(row))
    return begin, stop, end, first.reshape(-1), last.reshape(-1), seek.reshape(-1)


def _call(plan: Plan, schedule, query, operands, cache, width: int, interpret):
    """out (splits, B, G / pack, R, width), lse (splits, B, G / pack, R, 1), both float32."""
    B, Gp, R, _ = operands["q"].shape
    o = np.int32(0)  # a Python integer would be 64 bits wide where x64 is on
    tile = lambda x: pl.BlockSpec((plan.rows, *x.shape[1:]), lambda split, i, *_: (i, *[o] * (x.ndim - 1)))
    specs = {name: tile(x) for name, x in operands.items()}
    if plan.paged:  # a step's rows at a time: the page table of a large batch would not fit scalar memory
        shape = (1, *operands["page_table"].shape[1:])
        specs["page_table"] = pl.BlockSpec(shape, lambda split, i, *_: (i, o, o), memory_space=pltpu.SMEM)
    result = lambda width: pl.BlockSpec((1, plan.rows, Gp, R, width), lambda split, i, *_: (split, i, o, o, o))
    shape = lambda width: jax.ShapeDtypeStruct((plan.splits, B, Gp, R, width), jnp.float32)
    buffers = {name: pltpu.VMEM((BUFFERS, *x.shape[1:-1], plan.block), x.dtype) for name, x in cache.items()}
    if not interpret:  # XLA would fetch a small operand into VMEM first, its dead tokens too
        cache = {name: pltpu.with_memory_space_constraint(x, pltpu.HBM) for name, x in cache.items()}
    return pl.pallas_call(
        lambda *refs: _kernel(plan, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(schedule),
            grid=(plan.splits, plan.tiles),
            in_specs=[
                pl.BlockSpec((R, 1), lambda *_: (o, o)),
                specs,
                {name: pl.BlockSpec(memory_space=pltpu.HBM) for name in cache},
            ],
            out_specs=[result(width), result(1)],
            scratch_shapes=[
                buffers,
                pltpu.VMEM((Gp, R, 1), jnp.float32),
                pltpu.VMEM((Gp, R, 1), jnp.float32),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
            ],
        ),
        out_shape=[shape(width), shape(1)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_vmem()),
        interpret=interpret,
        name="gva_decode",
    )(*schedule, query, operands, cache)


def _kernel(plan, begin, stop, end, first, last, seek, query, operands, cache, out, lse, buffers, m, total, arrived):
    split, tile, B = pl.program_id(0), pl.program_id(1), pl.num_programs(1) * plan.rows
    tile_begin = tile * plan.rows
    tile_end = tile_begin + plan.rows
    block_first = lambda row: first[split * B + row]
    seek_row = lambda row: seek[split * (B + 1) + row]

    def copies(row, i, slot, do):
        """Starts or awaits the copies of block i of a row into a buffer: its live pieces, no others."""
        token = begin[row] + i * plan.block

        def piece(j, _):
            at = token + j * plan.piece
            if plan.paged:
                page = operands["page_table"][0, row - tile_begin, lax.div(at, np.int32(plan.page))]
                at = lax.rem(at, np.int32(plan.page))
            else:
                page = row
            source = pl.ds(pl.multiple_of(at, LANES), plan.piece)
            target = pl.ds(pl.multiple_of(j * plan.piece, LANES), plan.piece)
            for name, x in cache.items():
                between = (slice(None),) * (len(x.shape) - 2)
                do(pltpu.make_async_copy(
                    x.at[(page, *between, source)], buffers[name].at[(slot, *between, target)], arrived.at[slot]
                ))  # fmt: skip
            return _

        live = jnp.minimum(stop[row] - token, plan.block)
        lax.fori_loop(np.int32(0), lax.div(live + (plan.piece - 1), np.int32(plan.piece)), piece, np.int32(0))

    def fetch(row, i, slot):
        """Starts the copies of a block, if there is one, and returns the next."""

        @pl.when(row < tile_end)
        def _():
            copies(row, i, slot, lambda copy: copy.start())

        here = jnp.minimum(row, tile_end - 1)
        within = (row < tile_end) & (i + 1 < last[split * B + here])
        row = jnp.where(within, here, seek_row(here + 1))
        return row, jnp.where(within, i + 1, block_first(jnp.minimum(row, tile_end - 1)))

    def block(row, i, carry):
        step, *ahead = carry
        ahead = fetch(*ahead, lax.rem(step + (BUFFERS - 1), np.int32(BUFFERS)))
        slot = lax.rem(step, np.int32(BUFFERS))
        copies(row, i, slot, lambda copy: copy.wait())
        token = begin[row] + i * plan.block
        _attend(plan, row - tile_begin, slot, token, stop[row], end[row], query, operands, buffers, out, m, total)
        return step + 1, *ahead

    def row(b, carry):
        r = b - tile_begin
        m[...] = jnp.full(m.shape, -jnp.inf, m.dtype)
        total[...] = jnp.zeros(total.shape, total.dtype)
        out[0, r] = jnp.zeros(out.shape[2:], out.dtype)
        carry = lax.fori_loop(block_first(b), last[split * B + b], lambda i, carry: block(b, i, carry), carry)
        weight = total[...]
        out[0, r] = out[0, r] / jnp.where(weight == 0, 1.0, weight)
        lse[0, r] = jnp.where(weight == 0, -jnp.inf, jnp.log(weight) + m[...])
        return carry

    start = seek_row(tile_begin)
    ahead = start, block_first(jnp.minimum(start, tile_end - 1))
    for slot in range(BUFFERS - 1):
        ahead = fetch(*ahead, np.int32(slot))
    lax.fori_loop(tile_begin, tile_end, row, (np.int32(0), *ahead))


def _attend(plan, r, slot, token, stop, end, query, operands, buffers, out, m, total):
    """Adds one block, in `buffers[...][slot]`, to the running softmax of row r of the tile."""
    values, q = buffers["values"], operands["q"]
    keys = buffers.get("keys", values)
    key_scales = buffers.get("key_scales" if "keys" in buffers else "value_scales")
    value_scales = buffers.get("value_scales")
    (Gp, R), pack, dtype = m.shape[:2], plan.pack, q.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def dot(a, b, axis):
        """a (R, x) with b along b's `axis`."""
        return lax.dot_general(
            a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    # A weight of 0 does not silence a NaN: past the row's end the values themselves are cleared, in place and only in
    # the block that holds the end. Keys need no clearing, a dead key spoils no score but its own.
    @pl.when(stop - token < plan.block)
    def _():
        for g in range(values.shape[1]):
            tile = values[slot, g]
            live = token + lax.broadcasted_iota(jnp.int32, tile.shape, 1) < stop
            values[slot, g] = jnp.where(live, tile.astype(jnp.float32), 0).astype(tile.dtype)

    def packed(buffer, g):
        """(pack d, block) of a pack's groups."""
        if pack == 1:
            return buffer[slot, g].astype(dtype)
        return buffer[slot, pl.ds(g * pack, pack)].reshape(-1, plan.block).astype(dtype)

    def scaled(x, scales, g):
        """x (R, block) by the factor of each row's group and of each token."""
        factor = scales[slot, pl.ds(g * pack, 1)].astype(jnp.float32)
        row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        for j in range(1, pack):
            factor = jnp.where(row < j * plan.queries, factor, scales[slot, pl.ds(g * pack + j, 1)].astype(jnp.float32))
        return x * factor

    if "q_rope" in operands:
        s_rope = dot(operands["q_rope"][r], buffers["rope_keys"][slot].astype(dtype), 0)  # (G R, block)
    position = token + lax.broadcasted_iota(jnp.int32, (1, plan.block), 1)
    query_end = end + query[...]  # (R, 1)
    seen = position < jnp.minimum(query_end, stop)
    if plan.window is not None:
        seen &= position >= query_end - plan.window

    for g in range(Gp):
        s = dot(q[r, g], packed(keys, g), 0)
        if key_scales is not None:
            s = scaled(s, key_scales, g)
        if "q_rope" in operands:
            s += s_rope[g * R : (g + 1) * R]
        s *= plan.scale
        if plan.softcap is not None:
            s = plan.softcap * jnp.tanh(s / plan.softcap)
        s = jnp.where(seen, s, -jnp.inf)
        m_old = m[g]
        m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
        base = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # nothing seen yet: any base does
        p, shrink = jnp.exp(s - base), jnp.exp(m_old - base)
        m[g] = m_new
        total[g] = total[g] * shrink + jnp.sum(p, axis=1, keepdims=True)
        if value_scales is not None:
            p = jnp.where(seen, scaled(p, value_scales, g), 0.0)  # dead scales may hold NaN
        out[0, r, g] = out[0, r, g] * shrink + dot(p.astype(dtype), packed(values, g), 1)
