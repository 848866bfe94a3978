"""The text of a compiled XLA program, read into operations, and how often each of them runs.

A compiled program is a set of computations that call each other; a loop's body is one of them, so whatever is in a
scanned layer stands in the text once. `Program.times` is the number of times that each computation runs.
"""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
        "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}  # fmt: skip

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")


class UnknownTrips(ValueError):
    """A loop whose number of trips the text does not tell."""


@dataclass(frozen=True)
class Array:
    """One array of a shape. `on_chip`: it lies in a TPU's vector memory, not in HBM."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    on_chip: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Without padding."""
        return self.size * BITS.get(self.dtype, 0) // 8

    @property
    def padded_bytes(self) -> int:
        """With the padding of its tiles: on TPUs a minor axis of 64 occupies 128 lanes."""
        dims = [self.dims[i] for i in reversed(self.minor_to_major)] or list(self.dims)
        for at, size in enumerate(reversed(self.tile), 1):
            if at <= len(dims):
                dims[-at] = -(-dims[-at] // size) * size
        return math.prod(dims) * BITS.get(self.dtype, 0) // 8


@dataclass
class Op:
    name: str
    opcode: str
    shape: tuple[Array, ...]  # of a tuple its leaves, in order
    operands: tuple[str, ...]
    attributes: str
    arguments: str  # what stands in the parentheses
    root: bool = False

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that run when it does, but for those applied to single elements (a sum's addition)."""
        if self.opcode in ("reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter", "all-reduce",
                           "reduce-scatter", "all-reduce-start"):  # fmt: skip
            return ()
        return tuple(name for found in _CALLED.findall(self.attributes) for name in _NAME.findall(found))

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def source(self) -> str:
        """The JAX operation that it comes from, with the path of modules and transformations."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclass
class Computation:
    name: str
    ops: dict[str, Op] = field(default_factory=dict)

    @cached_property
    def root(self) -> Op:
        return next(op for op in self.ops.values() if op.root)

    @cached_property
    def users(self) -> dict[str, list[Op]]:
        found: dict[str, list[Op]] = {}
        for op in self.ops.values():
            for name in op.operands:
                found.setdefault(name, []).append(op)
        return found

    def parameters(self) -> list[Op]:
        """In the order in which they are passed."""
        return sorted((op for op in self.ops.values() if op.opcode == "parameter"), key=lambda op: int(op.arguments))


@dataclass
class Program:
    computations: dict[str, Computation]
    entry: Computation

    @cached_property
    def times(self) -> dict[str, float]:
        """How often each computation runs. Of the branches of a conditional each counts as its share of devices or of
        times, all equal.

        Raises:
          UnknownTrips: a loop that does not count up to a constant.
        """
        times = dict.fromkeys(self.computations, 0)
        times[self.entry.name] = 1
        for name in self._callers_first():
            for op in self.computations[name].ops.values():
                trips = self.trips(self.computations[name], op) if op.opcode == "while" else 1
                for called in op.called:
                    runs = times[name] * trips
                    times[called] += runs / len(op.called) if op.opcode == "conditional" else runs
        return times

    def _callers_first(self) -> list[str]:
        order, seen = [], set()

        def visit(name):
            seen.add(name)
            for op in self.computations[name].ops.values():
                for called in op.called:
                    if called not in seen:
                        visit(called)
            order.append(name)

        visit(self.entry.name)
        return order[::-1]

    def trips(self, computation: Computation, loop: Op) -> int:
        """Trips of a loop: what the compiler says, or else from its condition, its start and its step."""
        if found := re.search(r'known_trip_count[^\d]*"?n"?[^\d]*(\d+)', loop.attributes):
            return int(found.group(1))
        condition = self.computations[re.search(r"condition=%([\w.\-]+)", loop.attributes).group(1)]
        body = self.computations[re.search(r"body=%([\w.\-]+)", loop.attributes).group(1)]
        test = self._comparison(condition)
        if test is None:
            raise UnknownTrips(f"loop {loop.name}: its condition compares no counter with a constant")
        index, limit, inclusive = test
        start = self._constant(computation, self._element(computation, loop.operands[0], index))
        step = self._step(body, index)
        if start is None or step is None:
            raise UnknownTrips(f"loop {loop.name}: its counter does not start at a constant or step by one")
        return max(0, -(-(limit + inclusive - start) // step))

    def _comparison(self, condition: Computation) -> tuple[int, int, int] | None:
        """(index of the counter in the carried tuple, its limit, 1 where the limit is included)."""
        op, within, known = condition.root, condition, {}
        while op.opcode in ("fusion", "call", "bitcast", "copy"):
            if op.called:  # the comparison lies in a fusion: its parameters stand for the operands
                inner = self.computations[op.called[0]]
                known = {p.name: (within, name) for p, name in zip(inner.parameters(), op.operands, strict=True)}
                within, op = inner, inner.root
            else:
                op = within.ops[op.operands[0]]
        if op.opcode != "compare":
            return None
        direction = re.search(r"direction=(\w+)", op.attributes).group(1)
        sides = []
        for name in op.operands:
            where, name = known.get(name) or (within, name)
            side = where.ops[name]
            while side.opcode in ("copy", "bitcast", "convert"):
                side = where.ops[side.operands[0]]
            found = re.search(r"index=(\d+)", side.attributes) if side.opcode == "get-tuple-element" else None
            sides.append(("counter", int(found.group(1))) if found else ("limit", self._constant(where, side)))
        if direction in ("GT", "GE"):
            sides, direction = sides[::-1], {"GT": "LT", "GE": "LE"}[direction]
        (left, index), (right, limit) = sides
        if (left, right) != ("counter", "limit") or limit is None or direction not in ("LT", "LE"):
            return None
        return index, limit, int(direction == "LE")

    def _element(self, computation: Computation, name: str, index: int) -> Op | None:
        """Element `index` of a tuple."""
        op = computation.ops[name]
        while op.opcode in ("copy", "bitcast", "optimization-barrier"):
            op = computation.ops[op.operands[0]]
        return computation.ops[op.operands[index]] if op.opcode == "tuple" else None

    def _constant(self, computation: Computation, op: Op | None) -> int | None:
        while op is not None and op.opcode in ("copy", "bitcast", "convert", "broadcast", "copy-done", "copy-start"):
            op = computation.ops[op.operands[0]]
        if op is None:
            return None
        if op.opcode == "constant" and re.fullmatch(r"-?\d+", op.arguments):
            return int(op.arguments)
        if op.opcode == "fusion" and len(op.called) == 1 and not op.operands:
            inner = self.computations[op.called[0]]
            return self._constant(inner, inner.root)
        return None

    def _step(self, body: Computation, index: int) -> int | None:
        """What one trip adds to element `index` of the carried tuple."""
        op = self._element(body, body.root.name, index)
        inner, known = body, {}
        while op is not None and op.opcode in ("copy", "bitcast", "fusion"):
            if op.opcode == "fusion":
                next_inner = self.computations[op.called[0]]
                known = dict(zip((p.name for p in next_inner.parameters()), op.operands, strict=True))
                inner, op = next_inner, next_inner.root
                if op.opcode == "tuple":
                    return None
            else:
                op = inner.ops[op.operands[0]]
        if op is None or op.opcode != "add":
            return None
        for name in op.operands:
            side = inner.ops[name]
            if side.opcode == "parameter" and name in known:
                side = body.ops[known[name]]
                value = self._constant(body, side)
            else:
                value = self._constant(inner, side)
            if value:
                return value
        return None


def arrays(text: str) -> tuple[Array, ...]:
    """Arrays of a printed shape."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        order, _, rest = layout.partition(":")
        tile = re.search(r"T\(([\d,]*)\)", rest)
        found.append(Array(
            dtype,
            tuple(int(n) for n in dims.split(",") if n),
            tuple(int(n) for n in order.split(",") if n),
            tuple(int(n) for n in tile.group(1).split(",") if n) if tile else (),
            "S(1)" in rest,
        ))  # fmt: skip
    return tuple(found)


def parse(text: str) -> Program:
    """The program behind the text of `compiled.as_text()`."""
    computations, entry, current, pending = {}, None, None, ""

    def finish():
        nonlocal pending
        if current is not None and pending and (op := _operation(pending)):
            current.ops[op.name] = op
        pending = ""

    for line in text.splitlines():
        if re.match(r"\s+(ROOT )?%?[\w.\-]+ = ", line):
            finish()
            pending = line
        elif re.match(r"\}(, execution_thread=| //|$)", line):
            finish()
            current = None
        elif current is None and line.endswith("{") and (found := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            current = computations[found.group(2)] = Computation(found.group(2))
            entry = current if found.group(1) else entry
        else:  # an operation's attributes may go on over several lines
            pending += line
    return Program(computations, entry)


def _operation(line: str) -> Op | None:
    left, equals, right = line.strip().partition(" = ")
    if not equals:
        return None
    shape, rest = _balanced(right) if right.startswith("(") else _word(right)
    opcode, parenthesis, _ = rest.partition("(")
    if not parenthesis:
        return None
    arguments, attributes = _balanced(rest[len(opcode) :])
    return Op(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=opcode.strip(),
        shape=arrays(shape),
        operands=tuple(_NAME.findall(arguments)),
        attributes=attributes,
        arguments=arguments[1:-1],
        root=left.startswith("ROOT "),
    )


def _word(text: str) -> tuple[str, str]:
    word, _, rest = text.partition(" ")
    return word, rest


def _balanced(text: str) -> tuple[str, str]:
    """(the parenthesis that the text begins with, what follows)."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: at + 1], text[at + 1 :].lstrip()
    return text, ""
