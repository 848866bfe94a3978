"""What crosses the network in a compiled program, read off its text."""

import math
import re
from dataclasses import dataclass

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
         "ragged-all-to-all")  # fmt: skip
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "s32": 32, "u32": 32, "s64": 64, "u64": 64, "s8": 8,
         "u8": 8, "s16": 16, "u16": 16}  # fmt: skip
_LINE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|f\d+|[su]\d+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One array that one collective makes on a device: shapes are a device's own. `axes` are the mesh's it runs over,
    None if its groups are not those of any.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] | None
    operation: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    def __str__(self) -> str:
        over = "no axes of the mesh" if self.axes is None else " x ".join(self.axes)
        return f"{self.kind} of {self.dtype}{list(self.shape)} over {over} ({self.operation})"


def read(text: str, mesh: dict[str, int]) -> list[Collective]:
    """The collectives of a compiled program's text, each once however many copies of it the compiler made; the body of
    a loop counts once. `mesh` is the sizes of its axes by name, in order.
    """
    found = {}
    for at, line in enumerate(text.splitlines()):
        if (match := _LINE.search(line)) is None:
            continue
        made, kind, started = match.groups()
        arrays = [(dtype, tuple(map(int, dims.split(","))) if dims else ()) for dtype, dims in _ARRAY.findall(made)]
        if started:  # operands, results, and what tells when they are there
            arrays = [array for array in arrays if not (array[0] == "u32" and array[1] == ())]
            arrays = arrays[len(arrays) // 2 :]
        operation = _between(line, 'op_name="', '"').replace("\\'", "'")
        if (axes := _axes(line, mesh)) == ():  # of one device
            continue
        for i, (dtype, shape) in enumerate(arrays):
            # TPUs' asynchronous ones are several, in fusions of one chain.
            chain = _between(line, 'chain_id="', '"') or f"line {at}"
            found[chain, kind, operation, i, dtype, shape] = Collective(kind, dtype, shape, axes, operation)
    return list(found.values())


@dataclass(frozen=True)
class Expected:
    """What a training step may send, in the sizes of one device. B and T have factors that no other size has (3 and 7),
    so that arrays of tokens are known by their shapes; all others are parameters, gradients and sums.

    Attributes:
      batch, local, whole: rows, tokens of a device, tokens of a sequence.
      stream: shapes, behind (B, T), of what attention gathers along the context axis.
      sums: shapes, behind (B, T), of the activations that the tensor axis sums.
      unsplit: global shapes of the matrices (D, ...) that the tensor axis does not split.
    """

    batch: int
    local: int
    whole: int
    stream: tuple[tuple[int, ...], ...]
    sums: tuple[tuple[int, ...], ...]
    unsplit: tuple[tuple[int, int], ...] = ()

    def __contains__(self, found: Collective) -> bool:
        kind, shape, axes = found.kind, _plain(found.shape), found.axes
        if not any(size % factor == 0 for size in shape for factor in (3, 7)):
            return self._parameters(kind, shape, axes)
        of = lambda tokens, every: {_plain((self.batch, tokens, *rest)) for rest in every}
        if axes == ("tensor",):  # partial products, and the softmax over the vocabulary
            return kind == "all-reduce" and shape in of(self.local, ((), *self.sums))
        if axes == ("context",) and kind == "all-gather":
            integers = found.dtype[0] in "su"  # segment ids, positions
            return shape in of(self.whole, ((),) if integers else self.stream)
        return axes == ("context",) and kind == "reduce-scatter" and shape in of(self.local, self.stream)

    def _parameters(self, kind, shape, axes) -> bool:
        if axes is None:
            return False
        if kind in ("all-reduce", "reduce-scatter") or (kind == "all-gather" and axes == ("fsdp",)):
            return True
        # XLA gathers a matrix that is whole on the tensor axis over either axis, and permutes its parts for that.
        parts = {tuple(sorted(x)) for rows, columns in self.unsplit for x in [(rows, columns), (rows // 2, columns)]}
        permuted = kind in ("all-gather", "collective-permute") and "data" not in axes
        return permuted and shape in parts


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without axes of one, which compilers drop, and in one order, since they transpose."""
    return tuple(sorted(size for size in shape if size > 1))


def context_bytes(found: list[Collective]) -> dict[str, int]:
    """Bytes of the arrays that a device gathers along the context axis, or sends back summed, in one step: in the
    forward pass, in the backward pass, and integers (segment ids, positions).
    """
    sums = {"forward": 0, "gathered again": 0, "sent back": 0, "integers": 0}
    for one in found:
        if one.axes != ("context",) or one.kind not in ("all-gather", "reduce-scatter", "collective-permute"):
            continue
        if one.dtype[0] in "su":
            sums["integers"] += one.bytes
        elif one.kind == "reduce-scatter":
            sums["sent back"] += one.bytes
        else:
            sums["gathered again" if "transpose(" in one.operation else "forward"] += one.bytes
    return sums


def _between(text: str, start: str, stop: str) -> str:
    _, found, rest = text.partition(start)
    return rest.partition(stop)[0] if found else ""


def _axes(line: str, mesh: dict[str, int]) -> tuple[str, ...] | None:
    """The axes over which the groups of devices extend."""
    groups, where = _groups(line), np.indices(tuple(mesh.values())).reshape(len(mesh), -1)
    axes = set()
    for group in groups:
        places = where[:, group]
        axes |= {axis for axis, row in zip(mesh, places, strict=True) if len(set(row)) > 1}
    size = math.prod(mesh[axis] for axis in axes)
    whole = all(len(group) == size for group in groups) or "source_target_pairs" in line
    return tuple(axis for axis in mesh if axis in axes) if whole else None


def _groups(line: str) -> list[list[int]]:
    """Devices in any of the ways in which XLA writes them: listed, as a counted array, or as axes of a mesh."""
    numbers = lambda text: [int(x) for x in text.split(",")]
    if listed := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}", line):
        return [numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if counted := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?), ", line):
        return _counted(counted[2]).reshape(numbers(counted[1])).tolist()
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        along, names = re.findall(r"'(\w+)'", named[3]), list(sizes)
        ids = _counted(named[2] or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
        rest = [name for name in names if name not in along]
        ids = ids.transpose([names.index(name) for name in rest + along])
        return ids.reshape(-1, math.prod(sizes[name] for name in along)).tolist()
    raise ValueError(f"no groups of devices found in {line.strip()!r}")


def _counted(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: 0, 1, ... in this shape, transposed."""
    shape, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    shape = [int(x) for x in shape.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose([int(x) for x in order.split(",")])
