"""Products as they have been since Ampere, by mma, in registers: all that cards of compute capability 12.x have, and on
10.x for tiles of which tensor memory's 128 tokens would not fit twice.

Cards of 8.x have no copy engine, and Mosaic GPU's copies there fill nothing with zeros: those are left to Triton.
"""

import functools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gva_jax.kernels.pallas_mosaic_gpu import program
from gva_jax.kernels.pallas_mosaic_gpu.blocks import F32

LAYOUT, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED


def _products(mma, plan, memory, long, operands):
    of_groups = []
    for g in range(plan.groups):
        product = plgpu.layout_cast(jnp.zeros((long, plan.rows), F32), LAYOUT)
        for a, b in operands(g):
            a = plgpu.load(a, layout=plgpu.Layout.MMA_LHS(plan.dtype))
            b = plgpu.load(b, layout=plgpu.Layout.MMA_RHS(plan.dtype))
            product = mma(product, a, b)
        of_groups.append(product)
    return of_groups[0] if plan.groups == 1 else jnp.concatenate(of_groups, axis=1)


def _interpreted_mma(product, a, b):
    """JAX's interpreter has none."""
    return product + jnp.dot(a, b, preferred_element_type=F32)


def attend(plan, options, x, interpret):
    """(out, lse) by split and program, see `program.attend`."""
    products = functools.partial(_products, _interpreted_mma if interpret else plgpu.mma)
    return program.attend(
        program.Arithmetic(LAYOUT, TRANSPOSED, lambda plan: {}, products), plan, options, x, interpret
    )
