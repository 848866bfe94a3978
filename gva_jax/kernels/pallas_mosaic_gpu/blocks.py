"""What all kernels share: which tokens a program reads, where they lie, and the online softmax.

Scores and weights are (tokens, columns): a column is a query row of one of the program's groups.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
F32 = jnp.float32

# Of int32 that are not negative; `//` would correct for signs, and widen where x64 is on.
div = lambda a, n: lax.div(a, np.int32(n))
rem = lambda a, n: lax.rem(a, np.int32(n))


class Share(NamedTuple):
    """What a program reads: blocks `first` up to `last`, of tokens below `live_end`, for groups from `group` on."""

    b: Any
    group: Any  # the first of its groups
    tile: Any  # of query rows
    length: Any
    live_end: Any
    first: Any
    last: Any


def share(plan, options, x, capacity: int, split, program) -> Share:
    """The work of one program, out of its place in the grid."""
    tile, rest = rem(program, plan.tiles), div(program, plan.tiles)
    per_row = plan.G // plan.groups
    b, group = div(rest, per_row), rem(rest, per_row) * plan.groups
    length = x.lengths[b]
    q_length = np.int32(plan.T) if x.q_lengths is None else x.q_lengths[b]
    live_end = jnp.where(q_length > 0, jnp.clip(length, 0, capacity), 0)
    start = 0 if options.window is None else div(jnp.maximum(length - (q_length - 1) - options.window, 0), plan.block)
    end = div(live_end + (plan.block - 1), plan.block)
    blocks = div(jnp.maximum(end - start, 0) + (options.splits - 1), options.splits)
    first = start + split * blocks
    return Share(b, group, tile, length, live_end, first, jnp.minimum(first + blocks, end))


def page_of(plan, x, mine: Share, block, count: int):
    """The page of a block, and of blocks past the last one any page of the row's: its id may be anything."""
    if x.page_table is None:
        return mine.b
    return x.page_table[mine.b * count + jnp.minimum(div(block, plan.page // plan.block), count - 1)]


def first_token(plan, block):
    """Where a block's tokens begin in their page."""
    return rem(block, plan.page // plan.block) * plan.block


def unit(options) -> float:
    """What one unit of the softmax's scores is worth: scaled after the maximum is taken off, they round once less."""
    return options.scale if options.softcap is None and options.scale > 0 else 1.0


def softmax_start(plan, layout):
    """(m, total) of nothing: the maximum of each column, and sums that are not yet summed over tokens."""
    m = plgpu.layout_cast(jnp.full((plan.columns,), -jnp.inf, F32), layout.reduce(0))
    return m, plgpu.layout_cast(jnp.zeros((plan.block, plan.columns), F32), layout)


def softmax_step(plan, options, mine: Share, block, s, ends, m, total, layout):
    """One block's weights, the factor by which what came before shrinks, and the new (m, total).

    `s` are products of queries and keys, `ends` those of `Operands`, in registers.
    """
    shape = (plan.block, plan.columns)
    down = lambda a: lax.broadcast_in_dim(a, shape, [1])
    if unit(options) == 1:
        s = s * options.scale
    if options.softcap is not None:
        # tanh from exp2: the hardware's own tanh errs by 5e-4, which a cap of 50 makes a weight's 2 %.
        grown = jnp.exp2(s * (2 * LOG2E / options.softcap))
        s = options.softcap - (2 * options.softcap) / (grown + 1)
    base = block * plan.block
    token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    seen = token < mine.live_end - base
    if ends is None:
        if options.window is not None:
            seen = seen & (token >= mine.length - options.window - base)
    else:
        seen = seen & (token < down(ends - base))
        if options.window is not None:
            seen = seen & (token >= down(ends - (options.window + base)))
    s = jnp.where(seen, s, -jnp.inf)
    m_new = jnp.maximum(m, s.max(axis=0))
    origin = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # nothing seen yet: any origin does
    p = jnp.exp2((s - down(origin)) * (unit(options) * LOG2E))
    shrink = jnp.exp2((m - origin) * (unit(options) * LOG2E))
    return p, shrink, m_new, total * down(shrink) + p


def softmax_end(options, m, total):
    """(factor, lse): what normalises the output, 0 where nothing was seen, and the natural logarithm of the sum."""
    total = total.sum(axis=0)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    return jnp.where(some, 1.0 / total, 0.0), jnp.where(some, m * unit(options) + jnp.log(total), -jnp.inf)


def clear(ref, first_dead, layout):
    """Zeros for a tile's rows from `first_dead` on, 64 columns at a time: 0 NaN is NaN in the products."""
    for at in range(0, ref.shape[-1], 64):
        part = ref.at[:, pl.ds(at, 64)]
        part[...] = live_rows(plgpu.load(part, layout=layout), first_dead, layout)


def widen(ref, into, first_dead, layout, step):
    """A tile in the dtype of products, its dead rows zeros, `step` columns at a time."""
    for at in range(0, ref.shape[-1], step):
        columns = pl.ds(at, step)
        tile = plgpu.load(ref.at[:, columns], layout=layout)
        if tile.dtype != jnp.int8:  # an eight-bit float fits float16
            tile = tile.astype(jnp.float16).astype(F32)
        into.at[:, columns][...] = live_rows(tile.astype(into.dtype), first_dead, layout)


def live_rows(tile, first_dead, layout):
    row = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=layout)
    return jnp.where(row < first_dead, tile, jnp.zeros_like(tile))


def launch_options(interpret) -> dict:
    """Of `plgpu.kernel`: its compiler's parameters, and the interpreter's where there is one."""
    options = {"compiler_params": plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=2048)}
    if interpret:
        options["interpret"] = plgpu.InterpretGPUParams() if interpret is True else interpret
    return options


def result_shapes(plan, options):
    """Of (out, lse), by split and program; out with the columns that pad the values' width."""
    return (
        jax.ShapeDtypeStruct((options.splits, plan.programs, plan.columns, plan.values.padded), options.out_dtype),
        jax.ShapeDtypeStruct((options.splits, plan.programs, plan.columns), F32),
    )
