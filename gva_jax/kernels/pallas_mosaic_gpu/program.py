"""One program of the launch: its memory, what it copies and when, and its loop over the blocks of a split.

What differs between cards is how products are made and laid out in registers: an `Arithmetic`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gva_jax.kernels.pallas_mosaic_gpu import blocks
from gva_jax.kernels.pallas_mosaic_gpu.blocks import F32


class Arithmetic(NamedTuple):
    """Of one way to make products.

    Attributes:
      layout, transposed: of a product in registers, and the one in which its transpose is written to shared memory.
      memory: types of what `Memory` holds for it, of a plan.
      products: (plan, memory, long, operands) to a float32 array (long, columns): for each group the sum of the
        products of the pairs that `operands(group)` lists, (long, k) and (k, rows) in shared memory, in float32.
    """

    layout: Any
    transposed: Any
    memory: Callable
    products: Callable


class Memory(NamedTuple):
    """Shared memory and barriers of a program; caches by stage, and by group what they have one of per group."""

    q: Any
    values: Any
    weights: Any  # (columns, tokens)
    out: Any
    lse: Any
    queries_here: Any
    stage_here: Any
    q_rope: Any = None
    keys: Any = None
    rope_keys: Any = None
    value_scales: Any = None
    key_scales: Any = None
    wide_values: Any = None  # of one stage, in the dtype of products, where they are cached in another
    wide_keys: Any = None
    product: Any = None  # in tensor memory, where products are made there
    product_here: Any = None


def attend(arithmetic: Arithmetic, plan, options, x, interpret):
    """(out, lse) by split and program, (splits, programs, columns, ...): normalised, without sinks."""
    present = [name for name, a in x._asdict().items() if a is not None]
    missing = {name: None for name in x._fields if name not in present}

    def gva_decode_mosaic(*refs, **memory):
        *refs, out, lse = refs
        operands = type(x)(**missing, **dict(zip(present, refs, strict=True)))
        _program(arithmetic, plan, options, operands, Memory(**memory), out, lse)

    return plgpu.kernel(
        gva_decode_mosaic,
        out_type=blocks.result_shapes(plan, options),
        grid=(options.splits, plan.programs),
        grid_names=("split", "program"),  # programs that read the same tokens are neighbours
        scratch_types=_memory(plan, options, x) | arithmetic.memory(plan),
        **blocks.launch_options(interpret),
    )(*(getattr(x, name) for name in present))


def _memory(plan, options, x) -> dict:
    """Types of `Memory`'s fields, where there is such a thing."""
    stages, block, groups, columns = plan.stages, plan.block, plan.groups, plan.columns
    copies = 1 + (plan.keys is not None) + (x.value_scales is not None) + (x.key_scales is not None)
    query = lambda operand: _tiled((groups, plan.rows, operand.padded), plan.dtype, operand.column(plan.dtype))
    types = {
        "q": query(plan.key),
        # Swizzled as the values are that they are multiplied with.
        "weights": _tiled((columns, block), plan.dtype, plan.values.column(plan.dtype)),
        "out": _tiled((columns, plan.chunk), options.out_dtype, 128 // options.out_dtype.itemsize),
        "lse": plgpu.SMEM((columns,), F32),
        "queries_here": plgpu.Barrier(num_arrivals=1 + (plan.rope is not None)),
        "stage_here": plgpu.Barrier(num_arrivals=groups * copies + (plan.rope is not None), num_barriers=stages),
    }
    if plan.rope:
        types["q_rope"] = query(plan.rope)
        types["rope_keys"] = _tiled((stages, block, plan.rope.padded), plan.dtype, plan.rope.column())
    for name, operand in (("values", plan.values), ("keys", plan.keys)):
        if operand:
            tile = groups, block, operand.padded
            types[name] = _tiled((stages, *tile), operand.dtype, operand.column())
            if operand.dtype != plan.dtype:
                types[f"wide_{name}"] = _tiled(tile, plan.dtype, operand.column(plan.dtype))
    for name in ("value_scales", "key_scales"):
        if getattr(x, name) is not None:
            types[name] = plgpu.SMEM((stages, groups, block), F32)
    return types


def _tiled(shape, dtype, columns):
    """Shared memory as tensor cores and the copy engine want it: tiles of 8 rows, swizzled."""
    swizzle = columns * jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)))


def _program(arithmetic, plan, options, x, memory, out, lse):
    layout = arithmetic.layout
    split, program = lax.axis_index("split"), lax.axis_index("program")
    table = 1 if x.page_table is None else x.page_table.shape[0] // plan.B
    mine = blocks.share(plan, options, x, plan.page * table, split, program)
    page_of = functools.partial(blocks.page_of, plan, x, mine, count=table)
    fetch = functools.partial(_fetch, plan, x, mine, memory)
    down = lambda a, like: lax.broadcast_in_dim(a, like.shape, [1])

    _fetch_queries(plan, x, mine, memory)
    for n in range(plan.stages):
        i = mine.first + n
        pl.when(i < mine.last)(functools.partial(fetch, i, np.int32(n), page_of(i)))
    ends = None
    if x.ends is not None:
        at = mine.b * plan.tiles + mine.tile
        ends = plgpu.load(x.ends.at[at], layout=layout.reduce(0), optimized=False)
    plgpu.barrier_wait(memory.queries_here)

    def step(i, carry):
        acc, m, total, next_page = carry
        slot = lax.rem(i - mine.first, np.int32(plan.stages))
        plgpu.barrier_wait(memory.stage_here.at[slot])
        first_dead = mine.live_end - i * plan.block
        values, keys = _tiles(plan, memory, first_dead, slot, layout)
        value_scales, key_scales = _scales(plan, memory, first_dead, slot, layout)
        s = _scores(arithmetic, plan, memory, keys, key_scales, slot)
        p, shrink, m, total = blocks.softmax_step(plan, options, mine, i, s, ends, m, total, layout)
        weights = p if value_scales is None else p * value_scales
        memory.weights.T[...] = plgpu.layout_cast(weights.astype(plan.dtype), arithmetic.transposed)
        plgpu.commit_smem()

        def add(n, a):
            columns = pl.ds(n * plan.chunk, plan.chunk)
            pairs = lambda g: [(values.at[g, :, columns].T, memory.weights.at[pl.ds(g * plan.rows, plan.rows)].T)]
            return a * down(shrink, a) + arithmetic.products(plan, memory, plan.chunk, pairs)

        acc = tuple(add(n, a) for n, a in enumerate(acc))
        ahead = i + plan.stages
        pl.when(ahead < mine.last)(functools.partial(fetch, ahead, slot, next_page))
        return acc, m, total, page_of(ahead + 1)

    nothing = plgpu.layout_cast(jnp.zeros((plan.chunk, plan.columns), F32), layout)
    acc = (nothing,) * (plan.values.padded // plan.chunk)
    carry = acc, *blocks.softmax_start(plan, layout), page_of(mine.first + plan.stages)
    acc, m, total, _ = lax.fori_loop(mine.first, mine.last, step, carry)

    factor, memory.lse[...] = blocks.softmax_end(options, m, total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory.lse, lse.at[split, program])
    for n, a in enumerate(acc):
        plgpu.wait_smem_to_gmem(0)  # for the copy before
        memory.out.T[...] = plgpu.layout_cast((a * down(factor, a)).astype(options.out_dtype), arithmetic.transposed)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.out, out.at[split, program, :, pl.ds(n * plan.chunk, plan.chunk)])
    plgpu.wait_smem_to_gmem(0)


def _fetch_queries(plan, x, mine, memory):
    groups, rows = pl.ds(mine.b * plan.G + mine.group, plan.groups), pl.ds(mine.tile * plan.rows, plan.rows)
    for ref, smem in ((x.q, memory.q), (x.q_rope, memory.q_rope)):
        if ref is not None:
            plgpu.copy_gmem_to_smem(ref.at[groups, rows, _columns(smem, mine)], smem, memory.queries_here)


def _columns(smem, mine):
    """All of a tile's. Those past an array's width come as zeros, though not if JAX knew: it would refuse."""
    return pl.ds(mine.b * 0, smem.shape[-1])


def _fetch(plan, x, mine, memory, i, slot, page):
    """Start the copies of block i, which lies in a page, into a slot."""
    here = memory.stage_here.at[slot]
    tokens = lambda of: pl.ds(of * plan.page + blocks.first_token(plan, i), plan.block)
    for g in range(plan.groups):
        of_group = tokens(page * plan.G + mine.group + g)
        for ref, smem in ((x.values, memory.values), (x.keys, memory.keys)):
            if ref is not None:
                plgpu.copy_gmem_to_smem(ref.at[of_group, _columns(smem, mine)], smem.at[slot, g], here)
        for ref, smem in ((x.value_scales, memory.value_scales), (x.key_scales, memory.key_scales)):
            if ref is not None:
                plgpu.copy_gmem_to_smem(ref.at[of_group], smem.at[slot, g], here)
    if plan.rope:
        smem = memory.rope_keys
        plgpu.copy_gmem_to_smem(x.rope_keys.at[tokens(page), _columns(smem, mine)], smem.at[slot], here)


def _tiles(plan, memory, first_dead, slot, layout):
    """A block's values and keys as the products take them, by group; dead values are zeros."""
    wide = (memory.values, memory.wide_values), (memory.keys, memory.wide_keys)
    for (cached, widened), operand in zip(wide, (plan.values, plan.keys), strict=True):
        if widened is not None:
            step = max(operand.column(), operand.column(plan.dtype))
            for g in range(plan.groups):
                blocks.widen(cached.at[slot, g], widened.at[g], first_dead, layout, step)
            plgpu.commit_smem()
    if memory.wide_values is None:

        @pl.when(first_dead < plan.block)
        def _():
            for g in range(plan.groups):
                blocks.clear(memory.values.at[slot, g], first_dead, layout)
            plgpu.commit_smem()

    values, keys = (cached.at[slot] if widened is None and cached is not None else widened for cached, widened in wide)
    return values, values if keys is None else keys


def _scales(plan, memory, first_dead, slot, layout):
    """Factors of a block's weights and scores, (tokens, columns), or None; those of dead tokens are zeros."""

    def load(smem):
        if smem is None:
            return None
        scales = None
        for g in range(plan.groups):
            of_group = plgpu.load(smem.at[slot, g], layout=layout.reduce(1))
            of_group = lax.broadcast_in_dim(of_group, (plan.block, plan.columns), [0])
            column = plgpu.broadcasted_iota(jnp.int32, of_group.shape, 1, layout=layout)
            scales = of_group if scales is None else jnp.where(column < g * plan.rows, scales, of_group)
        return blocks.live_rows(scales, first_dead, layout)

    value_scales = load(memory.value_scales)
    return value_scales, value_scales if plan.keys is None else load(memory.key_scales)


def _scores(arithmetic, plan, memory, keys, key_scales, slot):
    """(tokens, columns): rotary products are not scaled, and so not added to the others before those are."""
    content = lambda g: [(keys.at[g], memory.q.at[g].T)]
    rotary = lambda g: [(memory.rope_keys.at[slot], memory.q_rope.at[g].T)] if plan.rope else []
    products = functools.partial(arithmetic.products, plan, memory, plan.block)
    if key_scales is None:
        return products(lambda g: rotary(g) + content(g))
    s = products(content) * key_scales
    return s + products(rotary) if plan.rope else s
