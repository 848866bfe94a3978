"""FLOPs of products that a compiled program leaves to kernels, which its text shows as custom calls.

JAX's splash attention: the tiles that the causal mask leaves are computed whole, so that is what is counted (five
eighths of all at 2,048 positions in tiles of 512), not half of the square.
"""

import json
import math
import re

from gva_jax.plan.hlo import Op, Program

# Products of one tile of queries and keys, by the width that they run over: k of keys, v of values.
SPLASH = {
    "splash_mha_fwd": "kv",  # scores, output
    "splash_mha_dq": "kvk",  # scores again, the weights' gradient, that of the queries
    "splash_mha_dkv": "kvvk",  # the same two, gradients of values and of keys
}


def flops(program: Program, op: Op, shapes) -> int | None:
    """Multiplications and additions of a custom call: 0 where it multiplies no matrices, None where it is unknown.

    `shapes` are the arrays of its operands, in order.
    """
    if op.target == "tpu_custom_call":
        return _splash(op, shapes)
    if op.target.startswith("__cublas"):
        return _gemm(op, shapes)
    if op.target.startswith(("__cudnn", "mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call")):
        return None
    return 0


def attention(op: Op) -> str | None:
    """Which attention kernel it is, None if it is none."""
    return next((kind for kind in SPLASH if op.name.startswith(kind)), None)


def _splash(op: Op, shapes) -> int | None:
    if (kind := attention(op)) is None:
        return None
    # Operands: two tables of tiles (.., queries, keys), then q (B, H, T, dk), k (B, G, S, dk), v (B, G, S, dv); without
    # B where a device has one sequence.
    table = next(a for a in shapes if a.dtype in ("s8", "s16", "s32") and len(a.dims) >= 2)
    q, k, v = [a for a in shapes if a.dtype in ("bf16", "f32") and len(a.dims) >= 3][:3]
    (*batch, T, dk), S, dv = q.dims, k.dims[-2], v.dims[-1]
    blocks = table.dims[-1]  # along queries as along keys: `gva_jax.attention.training.splash` has square tiles
    pairs = math.prod(batch) * (blocks * (blocks + 1) // 2) * (T // blocks) * (S // blocks)
    return 2 * pairs * sum({"k": dk, "v": dv}[width] for width in SPLASH[kind])


def _gemm(op: Op, shapes) -> int:
    found = re.search(r'"lhs_contracting_dimensions":\s*(\[[^\]]*\])', op.attributes)
    contracted = math.prod(shapes[0].dims[int(i)] for i in json.loads(found.group(1)))
    return 2 * op.shape[0].size * contracted
