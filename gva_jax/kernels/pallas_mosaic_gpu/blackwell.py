"""Compute capability 10.x: products by tcgen05, of 128 rows, accumulated in tensor memory."""

import functools

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gva_jax.kernels.pallas_mosaic_gpu import program
from gva_jax.kernels.pallas_mosaic_gpu.blocks import F32

LAYOUT, TRANSPOSED = plgpu.Layout.TCGEN05, plgpu.Layout.TCGEN05_TRANSPOSED


def _memory(plan):
    return {
        "product": plgpu.TMEM((128, plan.columns), F32),
        "product_here": plgpu.Barrier(orders_tensor_core=True),
    }


def _products(plan, memory, long, operands):
    assert long == 128
    plgpu.commit_smem()  # all warps have read the product before
    for g in range(plan.groups):
        for n, (a, b) in enumerate(operands(g)):
            of_group = memory.product.at[:, pl.ds(g * plan.rows, plan.rows)]
            plgpu.tcgen05_mma(of_group, a, b, accumulate=n > 0)
    plgpu.tcgen05_commit_arrive(memory.product_here)
    plgpu.barrier_wait(memory.product_here)
    product = plgpu.async_load_tmem(memory.product, layout=LAYOUT)
    plgpu.wait_load_tmem()
    return product


attend = functools.partial(program.attend, program.Arithmetic(LAYOUT, TRANSPOSED, _memory, _products))
