"""What a launch needs to know beforehand: how work is cut into programs and tiles, and what shared memory that takes.

Knows no Pallas, so that it can be asked on any version of JAX.
"""

from typing import NamedTuple

import jax.numpy as jnp

STAGES = 2  # tiles in flight a program; several programs share a multiprocessor
PROGRAMS = 4  # a multiprocessor, aimed at by splitting
SPLIT = 256  # fewest tokens worth a split
ROWS = 32  # most query rows a program, and
ACCUMULATOR = 8192  # most of its output's elements: 64 registers a thread
CHUNK = 2048  # of those made by one product, in 16 more
COLUMNS = 16  # query rows up to which a program takes more groups
SCORES = 2048  # most scores a step of 128 tokens; a step is 64 where there would be more, or
TILE_BYTES = 20 * 1024  # more of the cache than this


class Products(NamedTuple):
    """A way in which cards make products, and what it asks of tiles."""

    module: str  # beside this one
    shared: int  # bytes of shared memory that a program may use on the card
    rows: int  # query rows are a multiple of this, and
    columns: int  # so are the values' columns: tokens and columns are the long side of products, query rows the short
    blocks: tuple[int, ...]  # tokens a step, by preference the last


# By the major number of the compute capability, the first one preferred, unless another has more stages in flight.
PRODUCTS = {
    9: (Products("hopper", 226 * 1024, 8, 64, (64, 128)),),
    10: (Products("blackwell", 226 * 1024, 16, 128, (128,)), Products("mma", 226 * 1024, 8, 64, (64, 128))),
    12: (Products("mma", 98 * 1024, 8, 64, (64, 128)),),
}


class Operand(NamedTuple):
    """One cached array's tile in shared memory: `width` columns of data, zeros up to `padded`."""

    width: int
    padded: int
    dtype: jnp.dtype  # as it is cached

    def column(self, dtype=None) -> int | None:
        """Columns of a swizzled tile, as it is cached or in `dtype`: the widest, None where there is none.

        The copy engine fills with zeros whole tiles, or what is narrower than one.
        """
        itemsize = (dtype or self.dtype).itemsize
        for size in (128 // itemsize, 64 // itemsize, 32 // itemsize):
            if self.padded % size == 0 and (self.width <= size or self.width % size == 0):
                return size
        return None

    def bytes(self, dtype=None) -> int:
        """Of one token's row, as it is cached or in `dtype`."""
        return self.padded * (dtype or self.dtype).itemsize


class Plan(NamedTuple):
    """Sizes of a launch, in the letters of `gva_jax.kernels`, and how it is cut.

    A program takes `groups` groups of one row of the batch, `rows` query rows of each (the T H/G of a group, the heads
    of a query side by side, in `tiles` tiles), and a split of its tokens, `block` at a time.
    """

    products: Products
    B: int
    T: int
    H: int
    G: int
    page: int  # tokens that lie side by side: a page, or the whole capacity
    dtype: jnp.dtype  # of queries and products
    values: Operand
    keys: Operand | None
    rope: Operand | None
    scaled: bool  # one-byte values or keys come with scales
    rows: int
    tiles: int
    groups: int
    block: int
    stages: int

    @property
    def heads(self) -> int:
        """Query heads a group."""
        return self.H // self.G

    @property
    def columns(self) -> int:
        """Query rows a program: the minor axis of its scores."""
        return self.groups * self.rows

    @property
    def programs(self) -> int:
        """That read one split."""
        return self.B * (self.G // self.groups) * self.tiles

    @property
    def chunk(self) -> int:
        """Columns of the output made by one product, so that few registers hold two versions of them."""
        least = self.products.columns
        fits = lambda c: self.values.padded % c == 0 and (c == least or c * self.columns <= CHUNK)
        return next(c for c in (256, 128, 64) if c % least == 0 and fits(c))

    @property
    def key(self) -> Operand:
        """What the queries meet."""
        return self.values if self.keys is None else self.keys

    @property
    def shared(self) -> int:
        """Bytes of shared memory, about."""
        return _shared(self)

    def splits(self, capacity: int, multiprocessors: int) -> int:
        """Programs that share a row's tokens: enough to fill the card."""
        resident = max(1, min(PROGRAMS, self.products.shared // self.shared))
        return max(1, min(capacity // SPLIT, resident * multiprocessors // self.programs))


def make(capability: tuple[int, int], q, values, keys, rope_keys, *, scaled: bool) -> Plan | str:
    """The plan for arrays (or their shapes) in tokens_major on a card in PRODUCTS, or why there is none."""
    plans = [_make(products, q, values, keys, rope_keys, scaled) for products in PRODUCTS[capability[0]]]
    return max((plan for plan in plans if isinstance(plan, Plan)), key=lambda plan: plan.stages, default=plans[0])


def _make(products: Products, q, values, keys, rope_keys, scaled: bool) -> Plan | str:
    (B, T, H, _), (_, G, page, _) = q.shape, values.shape
    operands = []
    for name, x in (("values", values), ("keys", keys), ("rope_keys", rope_keys)):
        if x is None:
            operands.append(None)
            continue
        if x.shape[-1] * x.dtype.itemsize % 16:
            return f"{name} in {x.dtype} have width {x.shape[-1]}: a token's row must be a multiple of 16 bytes"
        # Columns of keys are only summed over, 16 at a time.
        operand = _operand(x, q.dtype, products.columns if name == "values" else 16)
        if operand is None:
            return f"{name} in {x.dtype} have width {x.shape[-1]}: must be a multiple of 16, or at most 64"
        operands.append(operand)
    value, key, rope = operands
    queries, multiple, blocks = T * H // G, products.rows, products.blocks
    most = max(multiple, min(ROWS, ACCUMULATOR // value.padded) // multiple * multiple)
    tiles = -(-queries // most)
    rows = -(-queries // (tiles * multiple)) * multiple
    plan = Plan(products, B, T, H, G, page, q.dtype, value, key, rope, scaled, rows, tiles, 1, blocks[0], STAGES)
    fits = lambda plan: _token_bytes(plan) * plan.block <= TILE_BYTES and plan.block * plan.columns <= SCORES
    for groups in range(2, COLUMNS // rows + 1) if tiles == 1 else ():
        more = plan._replace(groups=groups)
        plan = more if G % groups == 0 and fits(more) else plan
    for block in blocks[1:]:
        wide = plan._replace(block=block)
        plan = wide if fits(wide) else plan
    for stages in range(STAGES, 0, -1):
        plan = plan._replace(stages=stages)
        if plan.shared <= products.shared:
            return plan
    least = f"a tile of {plan.block} tokens takes {plan.shared} bytes of shared memory"
    return f"{least}: must be at most {products.shared}"


def _operand(x, dtype, multiple: int) -> Operand | None:
    """With the fewest columns that have swizzled tiles both as cached and in `dtype`."""
    for padded in range(-(-x.shape[-1] // multiple) * multiple, x.shape[-1] + 129, multiple):
        operand = Operand(x.shape[-1], padded, x.dtype)
        if operand.column() and operand.column(dtype):
            return operand
    return None


def _token_bytes(plan: Plan) -> int:
    """Of a token in one stage."""
    grouped = [x for x in (plan.values, plan.keys) if x is not None]
    scales = 4 * len(grouped) if plan.scaled else 0
    return plan.groups * (sum(x.bytes() for x in grouped) + scales) + (plan.rope.bytes() if plan.rope else 0)


def _shared(plan: Plan) -> int:
    caches = [(plan.values, plan.groups), (plan.keys, plan.groups), (plan.rope, 1)]
    widened = sum(n * x.bytes(plan.dtype) for x, n in caches if x is not None and x.dtype != plan.dtype)
    query = plan.columns * (plan.key.bytes(plan.dtype) + (plan.rope.bytes(plan.dtype) if plan.rope else 0))
    weights = plan.columns * plan.block * plan.dtype.itemsize
    tiles = plan.block * (plan.stages * _token_bytes(plan) + widened)
    return tiles + query + weights + plan.columns * plan.chunk * 4 + 8 * 1024  # alignment, barriers, reductions
