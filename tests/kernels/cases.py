"""What every implementation of decode attention is tried on: a cover of cases, their operands, and a brute force.

Operands are NumPy arrays in tokens_major without pages, floats in float64 that the dtype under test can hold; `Run`
brings them into the layout, pages and dtype of a case.
"""

import contextlib
import dataclasses
import importlib
import itertools
import random
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gva_jax.kernels import decode_attention

F64, F32, BF16 = (jnp.dtype(t) for t in ("float64", "float32", "bfloat16"))
BLOCK = 128  # of the blocked implementations, in these tests
S = 3 * BLOCK

# Every case runs all of these rows at once: lengths around nothing, around blocks, at and past the capacity; and how
# many of the row's queries are real (cut to T).
LENGTHS = np.array([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, S, S + 3, -4, 200, 2, S - 1], np.int32)
Q_LENGTHS = np.array([1, 1, 16, 2, 16, 3, 16, 5, 16, 0, 16, 1], np.int32)
B = len(LENGTHS)
NOWHERE = 2_147_480_000  # a page id that must not be looked up
CACHED = ("values", "keys", "rope_keys", "value_scales", "key_scales")


@dataclass(frozen=True)
class Case:
    """Sizes and options.

    `keys` is the width of separate keys, None where the values are the keys; `stored` an eight-bit dtype of values and
    keys, which then have a scale per token and group; `page` the tokens of a page.
    """

    H: int
    G: int
    T: int = 1
    d: int = 64
    r: int = 0
    keys: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    stored: str | None = None
    page: int | None = None
    layout: str = "tokens_major"

    def __str__(self):
        shown = [f"{f.name}={v}" for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default]
        return ",".join(shown)

    @property
    def options(self):
        # Sharper than usual: attention is far from uniform.
        scale = 2 * (self.keys or self.d + self.r) ** -0.5
        return {"scale": scale, "window": self.window, "softcap": self.softcap, "layout": self.layout}


SHAPES = {
    "heads_per_group": (1, 3, 4, 5, 7, 12),
    "G": (1, 2, 3),
    "T": (1, 2, 5, 16),
    "d": (32, 64, 80, 96, 128, 256, 512),
    "r": (0, 16, 24, 32, 64),
    "keys": (None, 64, 96),
}
OPTIONS = {
    "window": (None, 1, 33, BLOCK + 2, 300),
    "softcap": (None, 3.0),
    "sinks": (False, True),
    "stored": (None, "int8", "float8_e4m3fn", "float8_e5m2"),
    "page": (None, BLOCK, S),
    "layout": ("tokens_major", "tokens_minor"),
}
FACTORS = SHAPES | OPTIONS


def _case(heads_per_group, G, **fields) -> Case:
    return Case(H=heads_per_group * G, G=G, **fields)


def pairwise(seed: int = 0) -> list[Case]:
    """Cases in which every two values of two different factors meet at least once."""
    rng = random.Random(seed)
    names = list(FACTORS)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]}
    covers = lambda chosen: len(_pairs(chosen, names) & missing)
    cases = []
    while missing:
        candidates = []
        for (a, x), (b, y) in rng.sample(sorted(missing, key=repr), min(len(missing), 8)):
            chosen = {a: x, b: y}
            for name in rng.sample(names, len(names)):
                if name not in chosen:
                    choices = [chosen | {name: value} for value in rng.sample(FACTORS[name], len(FACTORS[name]))]
                    chosen = max(choices, key=covers)
            candidates.append(chosen)
        best = max(candidates, key=covers)
        missing -= _pairs(best, names)
        cases.append(_case(**best))
    return cases


def _pairs(chosen: dict, names: list[str]) -> set:
    """Pairs of (factor, value), in one order."""
    return set(itertools.combinations([(name, chosen[name]) for name in names if name in chosen], 2))


def every_shape(seed: int = 0) -> list[Case]:
    """The full product of SHAPES, each with options drawn by `seed`."""
    rng = random.Random(seed)
    shapes = (dict(zip(SHAPES, values, strict=True)) for values in itertools.product(*SHAPES.values()))
    return [_case(**shape, **{name: rng.choice(values) for name, values in OPTIONS.items()}) for shape in shapes]


# Beside the cover: the plainest case, and absorbed latent attention.
NAMED = [Case(2, 2, d=32), Case(16, 1, d=256, r=64), Case(16, 1, T=2, d=512, r=64, page=BLOCK)]


# ---- operands --------------------------------------------------------------------------------------------------------


def make(case: Case, dtype=F64, lengths=LENGTHS, q_lengths=Q_LENGTHS, tokens=S, seed=0) -> dict:
    """Normal data; nothing is dead yet, see `poisoned`."""
    rng = np.random.default_rng(seed)
    rounded = lambda x, to: x.astype(np.float32).astype(to).astype(np.float64)
    draw = lambda *shape: rounded(rng.normal(size=shape), dtype)
    B, k = len(lengths), case.keys or case.d

    def cached(*shape):
        x = rng.normal(size=shape)
        if case.stored == "int8":
            return np.clip(np.round(x * 40), -127, 127).astype(np.int8)
        return x.astype(np.float32).astype(jnp.dtype(case.stored)) if case.stored else rounded(x, dtype)

    unit = 40 if case.stored == "int8" else 1  # the product of code and scale is of order one
    scales = lambda: rounded(rng.uniform(0.4, 1.2, (B, case.G, tokens)) / unit, F32) if case.stored else None
    return {
        "q": draw(B, case.T, case.H, k),
        "values": cached(B, case.G, tokens, case.d),
        "keys": cached(B, case.G, tokens, k) if case.keys else None,
        "value_scales": scales(),
        "key_scales": scales() if case.keys else None,
        "q_rope": draw(B, case.T, case.H, case.r) if case.r else None,
        "rope_keys": draw(B, tokens, case.r) if case.r else None,
        "sinks": draw(case.H) if case.sinks else None,
        "lengths": np.asarray(lengths, np.int32),
        "q_lengths": np.minimum(q_lengths, case.T).astype(np.int32),
    }


def abstract(case: Case, dtype, batch: int, tokens: int) -> dict:
    """Shapes of what `decode_attention` takes, in the case's layout."""
    shape, k, stored = jax.ShapeDtypeStruct, case.keys or case.d, case.stored or dtype
    P, stretch = (batch * tokens // case.page, case.page) if case.page else (batch, tokens)
    cached = lambda *front, width, dtype: shape(
        (P, *front, *((stretch, width) if case.layout == "tokens_major" else (width, stretch))), dtype
    )
    scales = shape((P, case.G, stretch), F32) if case.stored else None
    return {
        "q": shape((batch, case.T, case.H, k), dtype),
        "values": cached(case.G, width=case.d, dtype=stored),
        "keys": cached(case.G, width=k, dtype=stored) if case.keys else None,
        "value_scales": scales,
        "key_scales": scales if case.keys else None,
        "q_rope": shape((batch, case.T, case.H, case.r), dtype) if case.r else None,
        "rope_keys": cached(width=case.r, dtype=dtype) if case.r else None,
        "sinks": shape((case.H,), F32) if case.sinks else None,
        "lengths": shape((batch,), jnp.int32),
        "q_lengths": shape((batch,), jnp.int32),
        "page_table": shape((batch, tokens // case.page), jnp.int32) if case.page else None,
    }


def poisoned(operands: dict) -> dict:
    """The same with NaN and infinities in every slot at or past its row's length (127 in int8, which has neither)."""
    dead = np.arange(operands["values"].shape[2]) >= operands["lengths"][:, None]
    operands = dict(operands)
    for name, fill in zip(CACHED, (np.nan, np.inf, -np.inf, np.nan, np.inf), strict=True):
        if (x := operands[name]) is not None:
            where = dead if name == "rope_keys" else dead[:, None]
            where = where if where.ndim == x.ndim else where[..., None]
            operands[name] = np.where(where, _fill(x.dtype, fill), x)
    return operands


def _fill(dtype, fill):
    return np.asarray(127 if dtype == np.int8 else fill if dtype == np.float64 else np.nan).astype(dtype)


def paged(case: Case, operands: dict) -> dict:
    """The cache cut into shuffled pages; the table's entries past a length point nowhere, spare pages hold NaN."""
    B, _, tokens, _ = operands["values"].shape
    N = tokens // case.page
    place = np.random.default_rng(0).permutation(B * N + 3)
    table = place[: B * N].reshape(B, N)
    operands = dict(operands)
    for name in CACHED:
        if (x := operands[name]) is not None:
            axis = 1 if name == "rope_keys" else 2
            shape = (len(place), *x.shape[1:axis], case.page, *x.shape[axis + 1 :])
            pages = np.full(shape, _fill(x.dtype, np.nan))
            pages[table] = np.stack(np.split(x, N, axis), axis=1)
            operands[name] = pages
    unused = np.arange(N) * case.page >= operands["lengths"][:, None]
    return operands | {"page_table": np.where(unused, np.resize([NOWHERE, -7], N), table).astype(np.int32)}


# ---- what is right ---------------------------------------------------------------------------------------------------


def brute_force(
    case: Case, *, q, values, keys, value_scales, key_scales, q_rope, rope_keys, sinks, lengths, q_lengths, late=0
):
    """The contract, query by query, in float64: (out, lse). `late` moves the mask: a broken one."""
    wide = lambda x, scales: x.astype(np.float64) * (1 if scales is None else scales[..., None])
    values = wide(values, value_scales)
    keys = values if keys is None else wide(keys, key_scales)
    (B, T, H, _), (_, G, S, d) = q.shape, values.shape
    h, scale = H // G, case.options["scale"]
    out, lse = np.zeros((B, T, H, d)), np.full((B, T, H), -np.inf)
    for b, g in np.ndindex(B, G):
        of_g = slice(g * h, (g + 1) * h)
        for t in range(q_lengths[b]):
            end = lengths[b] - (q_lengths[b] - 1 - t) + late
            start = 0 if case.window is None else max(0, end - case.window)
            end = min(max(end, 0), S)
            s = q[b, t, of_g] @ keys[b, g, start:end].T
            if q_rope is not None:
                s = s + q_rope[b, t, of_g] @ rope_keys[b, start:end].T
            s = s * scale
            if case.softcap is not None:
                s = case.softcap * np.tanh(s / case.softcap)
            if sinks is not None:
                s = np.concatenate([s, sinks[of_g, None]], axis=1)
            if s.shape[1]:
                m = s.max(axis=1, keepdims=True)
                p = np.exp(s - m)
                lse[b, t, of_g] = (m + np.log(p.sum(axis=1, keepdims=True)))[:, 0]
                seen = max(end - start, 0)
                out[b, t, of_g] = p[:, :seen] / p.sum(axis=1, keepdims=True) @ values[b, g, start : start + seen]
    return out, lse


def plain_einsum(case: Case, operands: dict, dtype):
    """What one would write for full rows, T = 1, rotary keys: products in `dtype`, softmax in float32."""
    q, v, k_rope, q_rope = (jnp.asarray(operands[n], dtype) for n in ("q", "values", "rope_keys", "q_rope"))
    q, q_rope = (a.reshape(a.shape[0], case.T, case.G, -1, a.shape[-1]) for a in (q, q_rope))
    s = jnp.einsum("BTGhd,BGSd->BTGhS", q, v) + jnp.einsum("BTGhr,BSr->BTGhS", q_rope, k_rope)
    p = jax.nn.softmax(s.astype(F32) * case.options["scale"]).astype(dtype)
    return jnp.einsum("BTGhS,BGSd->BTGhd", p, v).reshape(q.shape[0], case.T, case.H, -1)


def error(found, truth) -> float:
    """Largest difference over the largest entry; the -inf must be the same."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    assert (np.isneginf(found) == np.isneginf(truth)).all()
    live = np.isfinite(truth)
    assert np.isfinite(found[live]).all()
    return float(np.abs(found[live] - truth[live]).max(initial=0) / np.abs(truth[live]).max(initial=1e-300))


def rms_error(found, truth) -> float:
    return float(np.sqrt(np.mean((np.asarray(found, np.float64) - truth) ** 2) / np.mean(truth**2)))


def assert_close(found, truth, dtype):
    for a, b, tolerance in zip(found, truth, TOLERANCE[dtype], strict=True):
        assert error(a, b) < tolerance


def assert_same_bits(found, other):
    for a, b in zip(found, other, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ---- running ---------------------------------------------------------------------------------------------------------


ONE_LAYOUT = {"pallas_tpu": "tokens_minor", "pallas_triton": "tokens_major", "pallas_mosaic_gpu": "tokens_major"}
SMALL = {  # what makes several blocks and splits of the little that is cached here
    "xla": ("gva_jax.kernels.xla", "BLOCK"),
    "pallas_tpu": ("gva_jax.kernels.pallas_tpu", "MAX_BLOCK"),
    "pallas_triton": ("gva_jax.kernels.pallas_triton", "SPLIT"),
    "pallas_mosaic_gpu": ("gva_jax.kernels.pallas_mosaic_gpu.plan", "SPLIT"),
}
COMPUTES_IN = {"pallas_mosaic_gpu": BF16}  # the widest dtype of an implementation, where it is not float32
TOLERANCE = {F64: (1e-12, 1e-12), F32: (2e-6, 2e-6), BF16: (8e-3, 1e-5)}  # of out, of lse


class Run:
    """One implementation on one case, compiled once: operands as `make` gives them to (out, lse) in NumPy."""

    def __init__(self, case: Case, implementation: str, dtype=F32, interpret=False, x64=False):
        self._case, self._dtype, self._x64 = case, jnp.dtype(dtype), x64 or dtype == F64

        @jax.jit
        def run(operands):
            operands = dict(operands)
            return decode_attention(
                operands.pop("q"), operands.pop("values"), **operands, **case.options, implementation=implementation,
                interpret=interpret,
            )  # fmt: skip

        self.jitted = run

    def __call__(self, operands: dict):
        with self._precision():
            out, lse = self.jitted(self.prepare(operands))
        assert (out.dtype, lse.dtype) == (self._dtype, F64 if self._dtype == F64 else F32)
        return jax.device_get((out, lse))

    def prepare(self, operands: dict) -> dict:
        """The arrays that `decode_attention` takes."""
        operands = paged(self._case, operands) if self._case.page else dict(operands)
        if self._case.layout == "tokens_minor":
            for name in CACHED[:3]:
                operands[name] = None if operands[name] is None else operands[name].swapaxes(-1, -2)

        def cast(name, a):
            if a is None or a.dtype != np.float64:
                return None if a is None else jnp.asarray(a)
            scales = name.endswith("scales") and self._dtype != F64  # float32 in a cache of any dtype
            return jnp.asarray(a, F32 if scales else self._dtype)

        with self._precision():
            return {name: cast(name, a) for name, a in operands.items()}

    def _precision(self):
        return jax.enable_x64(True) if self._x64 else contextlib.nullcontext()


def run_for(implementation: str, case: Case, dtype=F32, interpret=None, **options) -> Run:
    """The implementation on the case, in its layout; Pallas kernels interpreted unless told otherwise."""
    case = dataclasses.replace(case, layout=ONE_LAYOUT.get(implementation, case.layout))
    interpret = implementation.startswith("pallas") if interpret is None else interpret
    return Run(case, implementation, dtype, interpret, **options)


def small_blocks(implementation: str, setattr=setattr) -> None:
    """Blocks, or splits, of BLOCK tokens."""
    if implementation in SMALL:
        module, name = SMALL[implementation]
        setattr(importlib.import_module(module), name, BLOCK)
