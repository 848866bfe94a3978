"""Compute capability 9.0: products by wgmma, of a warpgroup's 64 rows, accumulated in registers."""

import functools

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gva_jax.kernels.pallas_mosaic_gpu import program
from gva_jax.kernels.pallas_mosaic_gpu.blocks import F32


def _products(plan, memory, long, operands):
    def run(product):
        for g in range(plan.groups):
            for a, b in operands(g):
                plgpu.wgmma(product.at[:, pl.ds(g * plan.rows, plan.rows)], a, b)
        return product[...]

    return pl.run_scoped(run, plgpu.ACC((long, plan.columns), F32))


attend = functools.partial(
    program.attend,
    program.Arithmetic(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED, lambda plan: {}, _products),
)
