"""One suite for all implementations of decode attention, judged against a brute force in NumPy, float64."""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from gva_jax.kernels import decode_attention, merge, xla

IMPLEMENTATIONS = ("reference", "xla")  # those that run anywhere
F32, F64, BF16 = (jnp.dtype(t) for t in ("float32", "float64", "bfloat16"))
BLOCK = 32  # of the blocked implementations, in these tests
S = 112  # three blocks and a half

# Every case runs all of these rows at once: lengths around nothing, around blocks, at and past the capacity; and how
# many of the row's queries are real (cut to T).
LENGTHS = np.array([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 1, S, S + 3, -4, 50, 2, 97], np.int32)
Q_LENGTHS = np.array([1, 1, 16, 2, 16, 3, 16, 5, 16, 0, 16, 1], np.int32)
B = len(LENGTHS)


@dataclass(frozen=True)
class Case:
    """Sizes and options.

    `keys` is the width of separate keys, None where the values are the keys. `quantised` values and keys are int8 with
    a scale per token. `page` is the size of a page; PAGES are shuffled, and some belong to no row.
    """

    H: int
    G: int
    T: int = 1
    d: int = 16
    keys: int | None = None
    r: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    quantised: bool = False
    page: int | None = None
    layout: str = "tokens_major"

    def __str__(self):
        shown = [f"{f.name}={v}" for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default]
        return ",".join(shown)

    @property
    def options(self):
        return {"window": self.window, "softcap": self.softcap, "layout": self.layout}

    @property
    def scale(self):
        return (self.keys or self.d + self.r) ** -0.5 * 2  # sharper than usual: attention is far from uniform


CASES = [
    Case(2, 2),
    Case(6, 2, T=2, r=8, layout="tokens_minor"),
    Case(5, 1, T=16, window=20),
    Case(14, 2, T=3, keys=24, softcap=3.0),
    Case(12, 1, T=4, d=80, r=16, sinks=True, layout="tokens_minor"),
    Case(4, 4, T=5, keys=24, r=4, window=33, softcap=3.0, sinks=True, layout="tokens_minor"),
    Case(6, 2, T=16, r=24, window=1, sinks=True),
    Case(6, 2, T=2, r=4, page=16),  # two pages a block, seven a row
    Case(6, 2, T=3, keys=24, window=20, quantised=True, layout="tokens_minor"),
    Case(4, 2, r=8, softcap=3.0, sinks=True, quantised=True, page=56, layout="tokens_minor"),  # pages above a block
]


def make(case: Case, dtype=F64, seed=0):
    """q, values and the other operands, in tokens_major; normal data that `dtype` can hold."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape), F32).astype(dtype), np.float64)
    cached = lambda *shape: rng.integers(-127, 128, shape).astype(np.int8) if case.quantised else draw(*shape)
    scales = lambda: np.float64(np.float32(rng.uniform(0.002, 0.03, (B, case.G, S)))) if case.quantised else None
    k = case.keys or case.d
    return {
        "q": draw(B, case.T, case.H, k),
        "values": cached(B, case.G, S, case.d),
        "keys": cached(B, case.G, S, k) if case.keys else None,
        "value_scales": scales(),
        "key_scales": scales() if case.keys else None,
        "q_rope": draw(B, case.T, case.H, case.r) if case.r else None,
        "rope_keys": draw(B, S, case.r) if case.r else None,
        "sinks": draw(case.H) if case.sinks else None,
        "lengths": LENGTHS,
        "q_lengths": np.minimum(Q_LENGTHS, case.T),
    }


def brute_force(
    case: Case, *, q, values, keys, value_scales, key_scales, q_rope, rope_keys, sinks, lengths, q_lengths, late=0
):
    """The contract, query by query. `late` moves the mask: a broken one."""
    if case.quantised:
        values = values * value_scales[..., None]
        keys = None if keys is None else keys * key_scales[..., None]
    out = np.zeros((B, case.T, case.H, case.d))
    lse = np.full((B, case.T, case.H), -np.inf)
    for b in range(B):
        for t in range(q_lengths[b]):
            end = min(max(lengths[b] - (q_lengths[b] - 1 - t) + late, 0), S)
            start = 0 if case.window is None else max(0, lengths[b] - (q_lengths[b] - 1 - t) + late - case.window)
            for h in range(case.H):
                g = h // (case.H // case.G)
                k = values if keys is None else keys
                s = k[b, g, start:end] @ q[b, t, h]
                if q_rope is not None:
                    s = s + rope_keys[b, start:end] @ q_rope[b, t, h]
                s = s * case.scale
                if case.softcap is not None:
                    s = case.softcap * np.tanh(s / case.softcap)
                if sinks is not None:
                    s = np.append(s, sinks[h])
                if not s.size:
                    continue
                m = s.max()
                p = np.exp(s - m)
                lse[b, t, h] = m + np.log(p.sum())
                out[b, t, h] = p[: end - start] / p.sum() @ values[b, g, start:end] if end > start else 0
    return out, lse


def poisoned(operands):
    """The same with NaN and Inf in every slot at or past its row's length."""
    dead = np.arange(S) >= operands["lengths"][:, None]
    out = dict(operands)
    for name, fill in zip(CACHED, (np.nan, np.inf, -np.inf, np.nan, np.inf), strict=True):
        if (x := operands[name]) is not None and x.dtype == F64:
            where = dead if name == "rope_keys" else dead[:, None]
            out[name] = np.where(where if where.ndim == x.ndim else where[..., None], fill, x)
    return out


CACHED = ("values", "keys", "rope_keys", "value_scales", "key_scales")


def paged(case: Case, operands):
    """The cache cut into shuffled pages; entries of the table past the length point nowhere, spare pages hold NaN."""
    N = S // case.page
    place = np.random.default_rng(0).permutation(B * N + 3)
    table = place[: B * N].reshape(B, N)
    operands = dict(operands)
    for name in CACHED:
        if (x := operands[name]) is not None:
            axis = 1 if name == "rope_keys" else 2
            pages = np.full((len(place), *np.delete(x.shape, 0)), np.nan if x.dtype == F64 else 99, x.dtype)
            pages = np.take(pages, range(case.page), axis)
            pages[table] = np.stack(np.split(x, N, axis), axis=1)
            operands[name] = pages
    unused = np.arange(N) * case.page >= operands["lengths"][:, None]
    return operands | {"page_table": np.where(unused, np.resize([10**9, -7], N), table).astype(np.int32)}


@functools.cache
def compiled(case: Case, dtype, implementation):
    """A function of `make`'s operands, given in float64 and tokens_major: (out, lse) in NumPy."""

    @jax.jit
    def run(operands):
        operands = dict(operands)
        if case.layout == "tokens_minor":
            for name in ("values", "keys", "rope_keys"):
                operands[name] = None if operands[name] is None else operands[name].swapaxes(-1, -2)
        return decode_attention(
            operands.pop("q"), operands.pop("values"), **operands, **case.options, scale=np.float64(case.scale),
            implementation=implementation,
        )  # fmt: skip

    def call(operands):
        cast = lambda a: jnp.asarray(a, dtype if np.issubdtype(a.dtype, np.floating) else a.dtype)
        out, lse = run(jax.tree.map(cast, paged(case, operands) if case.page else operands))
        assert out.dtype == dtype and lse.dtype == (F64 if dtype == F64 else F32)
        return jax.device_get((out, lse))

    return call


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", BLOCK)


@pytest.fixture
def unchecked():
    """As for users: without the shape checks that the tests install."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def error(found, truth) -> float:
    """Largest difference over the largest entry; the -inf must be the same."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    assert (np.isneginf(found) == np.isneginf(truth)).all()
    live = np.isfinite(truth)
    assert np.isfinite(found[live]).all()
    return float(np.abs(found[live] - truth[live]).max(initial=0) / np.abs(truth[live]).max(initial=1e-300))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_equals_brute_force(case, implementation, dtype):
    with jax.enable_x64(True) if dtype == F64 else contextlib.nullcontext():
        operands = make(case, dtype)
        run = compiled(case, dtype, implementation)
        found = run(operands)
        again, dead = run(operands), run(poisoned(operands))
    truth = brute_force(case, **operands)
    for a, b in zip(found, truth, strict=True):
        assert error(a, b) < (1e-12 if dtype == F64 else 2e-6)
    for other in (again, dead):  # repeated runs, and whatever lies in dead slots: the same bits
        for a, b in zip(found, other, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- precision -------------------------------------------------------------------------------------------------------


def plain_bf16(case, operands):
    """What one would write: products in bfloat16, softmax in float32."""
    q, v, k_rope, q_rope = (jnp.asarray(operands[n], BF16) for n in ("q", "values", "rope_keys", "q_rope"))
    q, q_rope = (a.reshape(B, case.T, case.G, -1, a.shape[-1]) for a in (q, q_rope))
    s = jnp.einsum("BTGhd,BGSd->BTGhS", q, v) + jnp.einsum("BTGhr,BSr->BTGhS", q_rope, k_rope)
    p = jax.nn.softmax(s.astype(F32) * case.scale).astype(BF16)
    return jnp.einsum("BTGhS,BGSd->BTGhd", p, v).reshape(B, case.T, case.H, -1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["tokens_major", "tokens_minor"])
def test_bf16_is_no_worse_than_a_plain_einsum(implementation, layout):
    case = Case(6, 2, d=64, r=16, layout=layout)
    operands = make(case, BF16) | {"lengths": np.full(B, S, np.int32), "q_lengths": np.full(B, case.T, np.int32)}
    truth, _ = brute_force(case, **operands)
    found, _ = compiled(case, BF16, implementation)(operands)
    plain = jax.device_get(jax.jit(functools.partial(plain_bf16, case))(operands))
    rms = lambda a: float(np.sqrt(np.mean((np.asarray(a, np.float64) - truth) ** 2)))
    assert rms(found) <= 1.5 * rms(plain)
    assert rms(plain) < 0.02 * float(np.sqrt(np.mean(truth**2)))  # and that is a small error


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=str)
def test_logits_far_below_zero(case, implementation):
    """Every logit shifted by -1e5: a finite stand-in for -inf, anywhere, would take the weight."""
    case = dataclasses.replace(case, sinks=False, softcap=None)
    operands = make(case, F32)
    operands["q_rope"][:], operands["rope_keys"][..., 0] = 0, -1
    operands["q_rope"][..., 0] = np.float32(1e5 / case.scale)
    out, lse = compiled(case, F32, implementation)(operands)
    truth, lse_truth = brute_force(case, **operands)
    assert lse_truth[np.isfinite(lse_truth)].max() < -9e4
    unit = np.spacing(np.float32(1e5 / case.scale)) * case.scale  # what one logit can be rounded by
    assert error(out, truth) < unit
    assert error(lse, lse_truth) * 1e5 < 2 * unit
    assert np.sqrt(np.mean((out - truth) ** 2) / np.mean(truth**2)) < 2e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_stays_float32_where_x64_is_on(implementation):
    case = CASES[5]
    operands = make(case, F32)
    with jax.enable_x64(True):  # and with NumPy's scalars and lengths, which are 64 bits wide
        wide = dataclasses.replace(case, softcap=np.float64(case.softcap))
        wide_operands = operands | {name: operands[name].astype(np.int64) for name in ("lengths", "q_lengths")}
        found = compiled(wide, F32, implementation)(wide_operands)  # checks the dtypes
    for a, b in zip(found, brute_force(case, **operands), strict=True):
        assert error(a, b) < 2e-6


# ---- partial results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [CASES[0], dataclasses.replace(CASES[5], sinks=False, window=None)], ids=str)
def test_merged_halves_equal_the_whole(case, implementation):
    """The second half is handed `lengths - offset` unclipped; halves are empty where a row is short."""
    half = S // 2
    operands = make(case, F32)
    major = case.layout == "tokens_major"

    @jax.jit
    def run(operands):
        operands = jax.tree.map(lambda a: a.astype(F32) if a.dtype == F64 else a, operands)
        for name in CACHED[:3]:
            if operands[name] is not None and not major:
                operands[name] = operands[name].swapaxes(-1, -2)

        def part(start):
            def cut(a):
                return jax.lax.slice_in_dim(a, start, start + half, axis=a.ndim - (2 if major else 1))

            own = {n: None if operands[n] is None else cut(operands[n]) for n in CACHED[:3]}
            rest = {"q_rope": operands["q_rope"], "q_lengths": operands["q_lengths"]}
            return decode_attention(
                operands["q"], own.pop("values"), **own, **rest, lengths=operands["lengths"] - start, **case.options,
                scale=case.scale, implementation=implementation,
            )  # fmt: skip

        first, second = part(0), part(half)
        nothing = jnp.zeros_like(first[0]), jnp.full_like(first[1], -jnp.inf)
        return merge(first, second), merge(second, first), merge(merge(nothing, first), merge(second, nothing))

    found = jax.device_get(run(operands))
    for merged in found:
        for a, b in zip(merged, brute_force(case, **operands), strict=True):
            assert error(a, b) < 2e-6


# ---- the suite notices faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [-1, 1])
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5]], ids=str)
def test_a_mask_off_by_one_exceeds_every_tolerance(case, late):
    operands = make(case, F32) | {"lengths": np.full(B, 60, np.int32)}  # long rows: one token more hardly shows
    out, lse = compiled(case, F32, "xla")(operands)
    broken, lse_broken = brute_force(case, **operands, late=late)
    assert error(out, broken) > 1e-2 and error(lse, lse_broken) > 1e-3


# ---- the default -----------------------------------------------------------------------------------------------------


def test_the_default_implementation_in_blocks_of_its_own(monkeypatch):
    """Unpatched, not compiled by the caller, in a long cache of which little is live."""
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    q, values = (jnp.asarray(rng.normal(size=shape), F32) for shape in ((3, 2, 4, 8), (3, 2, xla.BLOCK + 200, 8)))
    lengths = jnp.array([xla.BLOCK + 150, 5, 0])
    found = decode_attention(q, values, lengths=lengths, scale=0.7)
    truth = decode_attention(q, values, lengths=lengths, scale=0.7, implementation="reference")
    for a, b in zip(found, truth, strict=True):
        assert error(a, b) < 2e-6


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "implementation = 'cuda': must be one of reference, xla, "),
        ({"layout": "rows"}, "layout = 'rows': must be one of tokens_major, tokens_minor"),
        ({"rope_keys": None}, "q_rope is given without rope_keys: give both or neither"),
        ({"q_rope": None}, "rope_keys is given without q_rope: give both"),
        ({"key_scales": (2, 2, 40)}, "key_scales is given without keys: give both"),
        ({"value_scales": (2, 1, 40)}, r"value_scales has shape \(2, 1, 40\), must be \(2, 2, 40\)"),
        ({"page_table": jnp.zeros((3, 1), jnp.int32)}, r"page_table has shape \(3, 1\), must be \(2, N\)"),
        ({"q": (2, 3, 4, 6)}, "q has width 6, its keys 8: an absorbed query has the values' width"),
        ({"keys": (2, 2, 40, 12)}, "q has width 8, its keys 12"),
        ({"q": (2, 3, 5, 8), "q_rope": (2, 3, 5, 4)}, "q has 5 heads, values have 2 groups: groups must divide heads"),
        ({"values": (1, 2, 40, 8)}, r"values has shape \(1, 2, 40, 8\), must be \(2, 2, 40, 8\)"),
        ({"keys": (2, 1, 40, 8)}, r"keys has shape \(2, 1, 40, 8\), must be \(2, 2, 40, 8\)"),
        ({"keys": (2, 2, 39, 8)}, r"keys has shape \(2, 2, 39, 8\), must be \(2, 2, 40, 8\)"),
        ({"rope_keys": (2, 39, 4)}, r"rope_keys has shape \(2, 39, 4\), must be \(2, 40, 4\)"),
        ({"rope_keys": (2, 40, 2)}, r"rope_keys has shape \(2, 40, 2\), must be \(2, 40, 4\)"),
        ({"q_rope": (2, 1, 4, 4)}, r"q_rope has shape \(2, 1, 4, 4\), must be \(2, 3, 4, 4\)"),
        ({"lengths": jnp.array([3])}, r"lengths has shape \(1,\), must be \(2,\)"),
        ({"q_lengths": jnp.array([3])}, r"q_lengths has shape \(1,\), must be \(2,\)"),
        ({"sinks": (2,)}, r"sinks has shape \(2,\), must be \(4,\)"),
        ({"window": 0}, "window = 0: must be above 0, or None"),
        ({"softcap": 0.0}, "softcap = 0.0: must be above 0, or None"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused(change, message):
    args = {
        "q": (2, 3, 4, 8), "values": (2, 2, 40, 8), "q_rope": (2, 3, 4, 4), "rope_keys": (2, 40, 4),
        "lengths": jnp.array([3, 4]), "scale": 1.0,
    } | change  # fmt: skip
    args = {name: jnp.ones(value) if isinstance(value, tuple) else value for name, value in args.items()}
    with pytest.raises(ValueError, match=message):
        decode_attention(args.pop("q"), args.pop("values"), **args)
