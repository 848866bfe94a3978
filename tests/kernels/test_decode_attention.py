"""One suite for all implementations of decode attention, judged against a brute force in NumPy, float64.

By default a pairwise cover of the corners; `--every-shape` runs the full product of sizes instead (thousands of cases).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from cases import (
    BF16,
    BLOCK,
    COMPUTES_IN,
    F32,
    F64,
    LENGTHS,
    NAMED,
    Q_LENGTHS,
    TOLERANCE,
    B,
    Case,
    S,
    assert_close,
    assert_same_bits,
    brute_force,
    error,
    every_shape,
    make,
    pairwise,
    plain_einsum,
    poisoned,
    rms_error,
    run_for,
    small_blocks,
)
from cover import thinned

from gva_jax.kernels import decode_attention, merge, xla
from gva_jax.kernels.api import IMPLEMENTATIONS


def pytest_generate_tests(metafunc):
    if "cover" in metafunc.fixturenames:
        cases = every_shape() if metafunc.config.getoption("--every-shape") else thinned(NAMED + pairwise(), 3)
        metafunc.parametrize("cover", cases, ids=str)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    name = request.param
    if name == "pallas_mosaic_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("needs JAX 0.11 or newer")
    small_blocks(name, monkeypatch.setattr)
    return name


@pytest.fixture
def unchecked():
    """As for users: without the shape checks that the tests install."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_equals_brute_force(cover, implementation):
    """Whatever lies in dead slots and pages, to the bit, and every time."""
    dtype = COMPUTES_IN.get(implementation, F32)
    run, rows = run_for(implementation, cover, dtype), slice(None)
    slow = implementation == "pallas_mosaic_gpu"
    if slow:  # its interpreter takes seconds a row: two of the rows, others in other cases
        rows = (cover.H + cover.d + cover.T + 5 * np.arange(2)) % len(LENGTHS)
    operands = make(cover, dtype, LENGTHS[rows], Q_LENGTHS[rows])
    found = run(poisoned(operands))
    assert_close(found, brute_force(cover, **operands), dtype)
    if not slow:
        assert_same_bits(found, run(operands))
        assert_same_bits(found, run(poisoned(operands)))


@pytest.mark.parametrize("implementation", ["reference", "xla"], indirect=True)
def test_float64_goes_through_in_float64(implementation):
    for case in CORNERS:
        operands = make(case, F64)
        assert_close(run_for(implementation, case, F64)(operands), brute_force(case, **operands), F64)


# A few that meet most options, for what follows.
CORNERS = [
    Case(6, 2, T=2, d=80, r=24),
    Case(5, 1, T=16, window=200, sinks=True, layout="tokens_minor"),
    Case(4, 4, T=5, d=32, keys=64, r=16, window=BLOCK + 2, softcap=3.0, sinks=True),
]

# ---- precision -------------------------------------------------------------------------------------------------------


def test_bf16_is_no_worse_than_a_plain_einsum(implementation):
    case = Case(6, 2, r=16)
    full = {"lengths": np.full(B, S, np.int32), "q_lengths": np.ones(B, np.int32)}
    operands = make(case, BF16) | full
    truth, _ = brute_force(case, **operands)
    found, _ = run_for(implementation, case, BF16)(operands)
    plain = jax.device_get(jax.jit(functools.partial(plain_einsum, case, dtype=BF16))(operands))
    assert rms_error(found, truth) <= 1.5 * rms_error(plain, truth)
    assert rms_error(plain, truth) < 0.02  # and that is a small error


def test_logits_far_below_zero(implementation):
    """Every logit shifted by -1e5: a finite stand-in for -inf, anywhere, would take the weight."""
    case = dataclasses.replace(CORNERS[2], sinks=False, softcap=None)
    dtype, scale = COMPUTES_IN.get(implementation, F32), case.options["scale"]
    operands = make(case, dtype)
    operands["q_rope"][:], operands["rope_keys"][..., 0] = 0, -1
    operands["q_rope"][..., 0] = np.float64(jnp.asarray(1e5 / scale, dtype))
    out, lse = run_for(implementation, case, dtype)(operands)
    truth, lse_truth = brute_force(case, **operands)
    assert lse_truth[np.isfinite(lse_truth)].max() < -9e4
    unit = np.spacing(np.float32(1e5 / scale)) * scale  # what one logit can be rounded by
    assert error(out, truth) < max(unit, TOLERANCE[dtype][0])
    assert error(lse, lse_truth) * 1e5 < 2 * unit
    # Beside it a bfloat16 output, rounded to 8 bits, is off by up to 2^-9 of each entry.
    assert rms_error(out, truth) < 2e-3 + (2**-9 if dtype == BF16 else 0)


def test_nothing_is_widened_where_x64_is_on(implementation):
    """Nor with NumPy's scalars and lengths, which are 64 bits wide."""
    case, dtype = CORNERS[2], COMPUTES_IN.get(implementation, F32)
    operands = make(case, dtype)
    wide = dataclasses.replace(case, softcap=np.float64(case.softcap))
    wide_operands = operands | {name: operands[name].astype(np.int64) for name in ("lengths", "q_lengths")}
    found = run_for(implementation, wide, dtype, x64=True)(wide_operands)  # checks the dtypes
    assert_close(found, brute_force(case, **operands), dtype)


# ---- partial results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CORNERS[0], dataclasses.replace(CORNERS[2], window=None)], ids=str)
def test_merged_halves_equal_the_whole(case, implementation):
    """The second half is handed `lengths - offset` unclipped; halves are empty where a row is short.

    Sinks take weight once: as one more part, that gives no value.
    """
    half, dtype = 2 * BLOCK, COMPUTES_IN.get(implementation, F32)
    operands = make(case, dtype, tokens=2 * half, lengths=LENGTHS + 100)
    run = run_for(implementation, dataclasses.replace(case, sinks=False), dtype)

    def part(start):
        stretch = slice(start, start + half)
        own = {n: operands[n][..., stretch, :] for n in ("values", "keys", "rope_keys") if operands[n] is not None}
        out, lse = run(operands | own | {"lengths": operands["lengths"] - start, "sinks": None})
        return jnp.asarray(out, F32), jnp.asarray(lse)

    first, second = part(0), part(half)
    nothing = jnp.zeros_like(first[0]), jnp.full_like(first[1], -jnp.inf)
    sinks = nothing
    if case.sinks:
        real = np.arange(case.T)[:, None] < operands["q_lengths"][:, None, None]
        sinks = nothing[0], jnp.asarray(np.where(real, operands["sinks"], -np.inf), F32)
    truth = brute_force(case, **operands)
    for parts in ((first, second, sinks), (sinks, second, first), (nothing, first, sinks, second)):
        assert_close(functools.reduce(merge, parts), truth, dtype)


# ---- the suite notices faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [-1, 1])
@pytest.mark.parametrize("case", [NAMED[0], CORNERS[0], CORNERS[2]], ids=str)
def test_a_mask_off_by_one_exceeds_every_tolerance(case, late):
    operands = make(case, F32) | {"lengths": np.full(B, 60, np.int32)}  # long rows: one token more hardly shows
    truth, broken = brute_force(case, **operands), brute_force(case, **operands, late=late)
    found = run_for("xla", case)(operands)
    assert_close(found, truth, F32)
    assert error(found[0], broken[0]) > 1e-2 and error(found[1], broken[1]) > 1e-3


def test_a_constant_output_or_a_missing_mask_exceeds_every_tolerance(cover):
    operands = make(cover, F32)
    out, lse = brute_force(cover, **operands)
    assert error(np.full_like(out, out.mean()), out) > 0.1
    assert error(np.where(np.isfinite(lse), lse[np.isfinite(lse)].mean(), lse), lse) > 0.05
    unmasked, lse_unmasked = brute_force(cover, **(operands | {"lengths": np.maximum(LENGTHS, 1) + 7}))
    seen = np.isfinite(lse)
    assert np.abs(unmasked[seen] - out[seen]).max() > 1e-2 * np.abs(out).max()
    assert np.abs(lse_unmasked[seen] - lse[seen]).max() > 1e-3


@pytest.mark.parametrize("keys", [None, 96])
@pytest.mark.parametrize("layout", ["tokens_major", "tokens_minor"])
def test_xla_reads_each_block_of_the_cache_once(keys, layout):
    """One slice of each operand, in the loop's body: of the values too, which are keys at the same time."""
    case = Case(6, 2, r=16, keys=keys, layout=layout)
    run = run_for("xla", case)
    operands = run.prepare(make(case, F32))
    names = [name for name in ("values", "keys", "rope_keys") if operands[name] is not None]
    operands = {name: x for name, x in operands.items() if x is not None}
    text = run.jitted.lower(operands).as_text()
    for name in names:
        type_ = "x".join(map(str, operands[name].shape)) + "xf32"
        assert len(re.findall(rf"stablehlo.dynamic_slice .*tensor<{type_}>", text)) == 1, name


# ---- the default -----------------------------------------------------------------------------------------------------


def test_the_default_implementation_in_blocks_of_its_own():
    """Not compiled by the caller, in a long cache of which little is live."""
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
        ({"q": (2, 0, 4, 8), "q_rope": (2, 0, 4, 4)}, r"query tokens = 0 in q \(2, 0, 4, 8\), values .*: must be 1 or"),
        ({"values": (2, 2, 0, 8), "rope_keys": (2, 0, 4)}, "cached tokens = 0 in q"),
        ({"values": (2, 0, 40, 8)}, "groups = 0 in q"),
        ({"q": (3, 4, 8), "q_rope": None, "rope_keys": None}, r"q has shape \(3, 4, 8\): must have 4 axes"),
        ({"q": jnp.ones((2, 3, 4, 8), jnp.int32)}, "q is int32: must be floating"),
        ({"lengths": jnp.array([3.0, 4.0])}, "lengths is float32: must be an integer dtype"),
        ({"page_table": jnp.zeros((2, 0), jnp.int32)}, r"page_table has shape \(2, 0\), must be \(2, N\)"),
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


@pytest.mark.parametrize("name", ["q", "values", "keys", "q_rope", "rope_keys", "sinks", "value_scales", "key_scales"])
def test_no_operand_has_a_gradient(name):
    case = Case(4, 2, d=32, r=16, keys=64, sinks=True, stored="int8")
    operands = run_for("xla", case).prepare(make(case, F32))
    operands |= {n: operands[n].astype(F32) for n in ("values", "keys")}
    loss = lambda x: decode_attention(**operands | {name: x}, **case.options)[0].sum()
    with pytest.raises(TypeError, match="decode_attention has no gradient: it reads a cache"):
        jax.eval_shape(jax.grad(loss), operands[name])
