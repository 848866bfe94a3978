"""What one device does in a compiled program: FLOPs, bytes of HBM, bytes over each mesh axis, with loops' trips.

Matrix products are counted (`dot`, `convolution`, and those of kernels), multiply and add as two; elementwise work is
left out, as in `gva_jax.info`. Bytes of HBM are those that operations read and write as they were fused: an operand
that only a slice is read of counts that slice, one that is updated in place the update, what lies in a TPU's vector
memory nothing. A collective counts what one device receives if it is done in the least traffic (ring).
"""

import collections
import itertools
import math
import re
from dataclasses import dataclass, field

import numpy as np

from gva_jax.plan import kernels
from gva_jax.plan.hlo import Array, Computation, Op, Program

# Collectives: bytes that a device of a group of n receives, over those of the largest of its operand and result.
SHARES = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-broadcast": lambda n: 1,
    "collective-permute": lambda n: 1,
}
# Operations that move nothing: views, and what is counted elsewhere.
_STILL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
          "call-start", "after-all", "partition-id", "replica-id", "opt-barrier", "optimization-barrier", "iota",
          "async-start", "async-update", "async-done", "broadcast"}  # fmt: skip


@dataclass
class Collective:
    """All that one channel moves: `nbytes` received by a device, over the mesh axes `axes`, in groups of `ways`."""

    kind: str
    axes: tuple[str, ...]
    ways: int
    nbytes: float
    source: str


@dataclass
class Counts:
    """Of one device and one step."""

    matmul_flops: int = 0  # the compiler's own products
    kernel_flops: int = 0  # those of attention kernels
    kernel_calls: dict[str, int] = field(default_factory=dict)  # of each attention kernel
    hbm_bytes: int = 0
    collectives: list[Collective] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)  # custom calls whose FLOPs are not known

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.kernel_flops

    def bytes_over(self) -> dict[str, float]:
        """Bytes that a device receives over each mesh axis, or set of axes that one collective spans."""
        total: dict[str, float] = collections.defaultdict(float)
        for one in self.collectives:
            total[" x ".join(one.axes)] += one.nbytes
        return dict(total)


def count(program: Program, mesh: dict[str, int]) -> Counts:
    """Counts of a program that was compiled for a mesh of these axes, `{"data": 2, "fsdp": 4}`, the last one minor.

    Raises:
      UnknownTrips: a loop that does not count up to a constant.
    """
    counts, channels = Counts(), {}
    fused = {name for c in program.computations.values() for op in c.ops.values() if op.opcode == "fusion"
             for name in op.called}  # fmt: skip
    for name, times in program.times.items():
        computation = program.computations[name]
        if not times:
            continue
        inside = name in fused or name.startswith("async_computation")
        for op in computation.ops.values():
            shapes = [a for operand in op.operands if operand in computation.ops for a in
                      computation.ops[operand].shape]  # fmt: skip
            if op.opcode == "dot":
                counts.matmul_flops += times * _dot(op, shapes)
            elif op.opcode == "convolution":
                counts.matmul_flops += times * _convolution(op, shapes)
            elif op.opcode == "custom-call":
                found = kernels.flops(program, op, shapes)
                if found is None:
                    counts.uncounted.add(op.target)
                elif kind := kernels.attention(op):
                    counts.kernel_flops += times * found
                    counts.kernel_calls[kind] = counts.kernel_calls.get(kind, 0) + times
                else:
                    counts.matmul_flops += times * found
            elif (kind := op.opcode.removesuffix("-start")) in SHARES:
                one = _collective(program, computation, op, kind, shapes, mesh)
                key = _channel(op)
                if one.axes and (key not in channels or times < channels[key][0]):
                    channels[key] = times, one
            if not inside:
                counts.hbm_bytes += times * _moved(program, computation, op)
    for times, one in channels.values():
        one.nbytes *= times
        counts.collectives.append(one)
    return counts


# ---- products --------------------------------------------------------------------------------------------------------


def _dot(op: Op, shapes: list[Array]) -> int:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes).group(1)
    return 2 * op.shape[0].size * math.prod(shapes[0].dims[int(i)] for i in contracted.split(",") if i)


def _convolution(op: Op, shapes: list[Array]) -> int:
    """TPUs have convolutions for products, some with windows that reach over the edge: what lies there is left out."""
    lhs, rhs, out = (s.strip() for s in re.split(r"_|->", re.search(r"dim_labels=(\S+?)(?:,|$)", op.attributes)[1]))
    window = _window(op.attributes)
    result = 2 * op.shape[0].dims[out.index("b")] * op.shape[0].dims[out.index("f")]
    result *= shapes[1].dims[rhs.index("i")]
    for at in range(len(rhs) - 2):
        into, over, onto = (labels.index(str(at)) for labels in (lhs, rhs, out))
        size = shapes[0].dims[into]
        low, dilated, spread, stride = window["pad"][at][0], window["rhs"][at], window["lhs"][at], window["stride"][at]
        span = (size - 1) * spread + 1
        places = itertools.product(range(op.shape[0].dims[onto]), range(shapes[1].dims[over]))
        at_input = (i * stride + j * dilated - low for i, j in places)
        result *= sum(0 <= p < span and p % spread == 0 for p in at_input)
    batch_groups = re.search(r"batch_group_count=(\d+)", op.attributes)
    return result // (int(batch_groups.group(1)) if batch_groups else 1)


def _window(attributes: str) -> dict[str, list]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in found.group(1).split()) if found else {}
    rank = len(parts.get("size", "").split("x")) if parts.get("size") else 0
    numbers = lambda name: [int(n) for n in parts[name].split("x")] if name in parts else [1] * rank
    pads = [tuple(map(int, p.split("_"))) for p in parts["pad"].split("x")] if "pad" in parts else [(0, 0)] * rank
    return {"pad": pads, "stride": numbers("stride"), "lhs": numbers("lhs_dilate"), "rhs": numbers("rhs_dilate")}


# ---- collectives -----------------------------------------------------------------------------------------------------


def _channel(op: Op) -> str:
    """One collective may stand in the text several times, in the pieces that it is overlapped with: by its channel."""
    found = re.search(r"channel_id=(\d+)", op.attributes)
    return found.group(1) if found else op.name


def _collective(
    program: Program, computation: Computation, op: Op, kind: str, shapes: list[Array], mesh: dict[str, int]
) -> Collective:
    devices = math.prod(mesh.values())
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", op.attributes)
    if pairs:
        groups = [[int(n) for n in pair.split(",")] for pair in re.findall(r"(\d+,\d+)", pairs.group(1))]
    else:
        groups = replica_groups(op.attributes, devices)
    if kind == "all-reduce" and "all-reduce-scatter" in computation.name:
        kind = "reduce-scatter"  # how TPUs have it: a fusion of a sum and a slice
    axes = spanned(groups, mesh)
    ways = math.prod(mesh[axis] for axis in axes) if pairs else max(map(len, groups), default=1)
    # A start's result repeats its operands: the operands count, or the result where it is what grows.
    operand, result = sum(a.nbytes for a in shapes), sum(a.nbytes for a in op.shape)
    if op.opcode.endswith("-start") and kind != "all-reduce":
        result = max(result - operand, 0)
    nbytes = result if kind == "all-gather" else operand
    return Collective(kind, axes, ways, nbytes * SHARES[kind](ways), op.source)


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Groups of partition numbers in any of the three ways that XLA prints them."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:\([^)]*\))? ?\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
        return _mesh_groups(sizes, re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found.group(2)))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        count, size, dims, order = found.groups()
        ids = np.arange(int(count) * int(size)).reshape([int(n) for n in dims.split(",")])
        ids = ids.transpose([int(n) for n in order.split(",")]) if order else ids
        return ids.reshape(int(count), int(size)).tolist()
    if (found := re.search(r"replica_groups=\{(\{.*?\})\}", attributes)) is not None:
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", found.group(1))]
    return [list(range(devices))]


def _mesh_groups(sizes: dict[str, int], axes) -> list[list[int]]:
    """Groups along some axes of a mesh, or along parts of axes, `(major)size`."""
    dims, kept = [], []
    for name, size in sizes.items():
        parts = sorted((int(major or 1), int(part or size)) for axis, major, part in axes if axis == name)
        at = 1
        for major, part in parts:
            dims, kept = [*dims, major // at, part], [*kept, False, True]
            at = major * part
        dims, kept = [*dims, size // at], [*kept, False]
    ids = np.arange(math.prod(dims)).reshape(dims)
    order = [i for i, keep in enumerate(kept) if not keep] + [i for i, keep in enumerate(kept) if keep]
    size = math.prod(n for n, keep in zip(dims, kept, strict=True) if keep)
    return ids.transpose(order).reshape(-1, size).tolist()


def spanned(groups: list[list[int]], mesh: dict[str, int]) -> tuple[str, ...]:
    """Mesh axes along which members of a group differ."""
    shape = tuple(mesh.values())
    varied = set()
    for group in groups:
        places = np.array(np.unravel_index(np.array(group), shape))
        varied |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)))
    return tuple(axis for at, axis in enumerate(mesh) if at in varied)


# ---- memory traffic --------------------------------------------------------------------------------------------------


def _moved(program: Program, computation: Computation, op: Op) -> int:
    """Bytes that an operation reads from HBM and writes to it."""
    if op.opcode in _STILL or op.opcode.endswith("-done") or op.opcode.removesuffix("-start") in SHARES:
        return 0
    in_hbm = lambda arrays: sum(a.padded_bytes for a in arrays if not a.on_chip)
    inputs = [computation.ops[name].shape for name in op.operands if name in computation.ops]
    if op.opcode == "copy-start":  # (to, from, ..), one of them usually in vector memory
        return in_hbm(op.shape[:2])
    if op.opcode == "slice-start":  # (from, to, ..)
        return op.shape[-2].padded_bytes
    if op.target in ("AllocateBuffer", "ConcatBitcast"):
        return 0
    if op.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * in_hbm(op.shape)
    if op.opcode == "dynamic-update-slice":
        return 2 * in_hbm(inputs[1])
    if op.opcode == "fusion":
        inner = program.computations[op.called[0]]
        if len(inner.parameters()) == len(inputs):
            return _fusion(inner, inputs, op)
    return in_hbm(op.shape) + sum(map(in_hbm, inputs))


def _fusion(inner: Computation, inputs, op: Op) -> int:
    in_hbm = lambda arrays: sum(a.padded_bytes for a in arrays if not a.on_chip)
    updated, total = set(), 0
    leaves = [inner.ops[name] for name in inner.root.operands] if inner.root.opcode == "tuple" else [inner.root]
    for leaf, shape in itertools.zip_longest(leaves, op.shape[: len(leaves)]):
        while leaf.opcode in ("bitcast", "copy") and leaf.operands[0] in inner.ops:
            leaf = inner.ops[leaf.operands[0]]
        if leaf.opcode == "dynamic-update-slice":
            updated.add(leaf.operands[0])
            total += 0 if shape is None or shape.on_chip else sum(a.nbytes for a in inner.ops[leaf.operands[1]].shape)
        elif shape is not None:
            total += in_hbm([shape])
    for parameter, arrays in zip(inner.parameters(), inputs, strict=True):
        if in_hbm(arrays) == 0:
            continue
        users = _through_views(inner, parameter.name)
        if parameter.name in updated or all(u.opcode == "dynamic-update-slice" and _in_place(inner, u, parameter)
                                            for u in users):  # fmt: skip
            continue
        if users and all(u.opcode in ("dynamic-slice", "slice", "gather") for u in users):
            total += min(in_hbm(arrays), sum(a.nbytes for u in users for a in u.shape))
        else:
            total += in_hbm(arrays)
    return total


def _in_place(inner: Computation, update: Op, parameter: Op) -> bool:
    """Whether `parameter` is what an update goes into, perhaps seen through views."""
    name = update.operands[0]
    while inner.ops[name].opcode in ("bitcast", "copy"):
        name = inner.ops[name].operands[0]
    return name == parameter.name


def _through_views(inner: Computation, name: str) -> list[Op]:
    found = []
    for user in inner.users.get(name, ()):
        found += _through_views(inner, user.name) if user.opcode == "bitcast" else [user]
    return found
