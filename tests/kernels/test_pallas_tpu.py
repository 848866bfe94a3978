"""The TPU kernel's own: simulated memory and races, its copies counted, refusals. Simulation, no TPU is needed."""

import contextlib
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BLOCK, F32, Case, Run, S, abstract, assert_same_bits, brute_force, error, make, poisoned
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from gva_jax.kernels import decode_attention, pallas_tpu

MINOR = {"layout": "tokens_minor"}
SIMULATED = functools.partial(
    pltpu.InterpretParams, detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "MAX_BLOCK", BLOCK)


def kernel(case: Case, interpret=True) -> Run:
    return Run(case, "pallas_tpu", interpret=interpret)


@pytest.mark.parametrize(
    "case",
    [
        Case(6, 2, T=2, d=80, r=24, window=130, softcap=3.0, **MINOR),
        Case(8, 2, T=4, d=64, r=16, stored="float8_e4m3fn", page=S, window=33, sinks=True, **MINOR),
    ],
    ids=str,
)
def test_simulated_tpu_memory_shows_no_race_and_no_stray_read(case):
    """Copies complete as late as they may, memory starts as NaN, a read or page outside of its array raises."""
    operands = poisoned(make(case, F32))
    assert_same_bits(kernel(case, SIMULATED())(operands), kernel(case)(operands))
    with contextlib.suppress(ImportError):  # newer versions raise at a race, older ones only note it, here
        from jax._src.pallas.mosaic.interpret.interpret_pallas_call import races

        assert races is None or not races.races_found


def test_large_batches_in_tiles_of_rows(monkeypatch):
    """Several rows a grid step, the last step filled with empty rows; nothing split, nothing lost at the borders."""
    monkeypatch.setattr(pallas_tpu, "ROWS_BYTES", 1 << 18)
    case = Case(4, 2, d=32, r=16, **MINOR)
    lengths = np.random.default_rng(1).integers(0, S + 1, 17).astype(np.int32)
    lengths[:3], lengths[-1] = 0, 0
    operands, run = make(case, F32, lengths, np.ones(17, np.int32)), kernel(case)
    a = run.prepare(operands)
    plan = pallas_tpu._plan(a["q"], a["q_rope"], {"values": a["values"]}, None, 2, 1.0, None, None)
    assert plan.splits == 1 and plan.tiles > 1 and plan.rows > 1 and plan.tiles * plan.rows > 17
    for x, y in zip(run(poisoned(operands)), brute_force(case, **operands), strict=True):
        assert error(x, y) < 2e-6


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch):
    """Counts the copies that the running kernel starts: (shape copied, row or page, first token)."""
    counts = Counter()
    make_async_copy = pltpu.make_async_copy

    class Copy:
        def __init__(self, source, target, arrived):
            self._copy, self._shape = make_async_copy(source, target, arrived), source.shape
            page, *_, tokens = source.transforms[-1].indices
            self._where = page, tokens.start

        def start(self):
            jax.debug.callback(lambda page, token: counts.update([(self._shape, int(page), int(token))]), *self._where)
            self._copy.start()

        def wait(self):
            self._copy.wait()

    monkeypatch.setattr(pltpu, "make_async_copy", Copy)
    return counts


@pytest.mark.parametrize(("page", "window"), [(None, None), (None, 700), (1024, None)])
def test_live_tokens_are_copied_once_and_dead_ones_not_at_all(copied, monkeypatch, page, window):
    """Little is live in a long cache: a row of 300 tokens reads two pieces of 256, not 64k slots; no value twice."""
    monkeypatch.setattr(pallas_tpu, "MAX_BLOCK", 2048)
    tokens, piece, lengths = 1 << 16, pallas_tpu.PIECE, np.array([300, 0, 5000, 1], np.int32)
    case = Case(2, 1, d=8, r=8, window=window, page=page, **MINOR)
    operands, run = make(case, F32, lengths, np.ones(4, np.int32), tokens), kernel(case)
    found, table = run(operands), run.prepare(operands).get("page_table")
    jax.effects_barrier()
    for x, y in zip(found, brute_force(case, **operands), strict=True):
        assert error(x, y) < 2e-6

    expected = Counter()
    for row, length in enumerate(lengths):
        begin = 0 if window is None else max(0, length - window) // piece * piece
        for token in range(begin, length, piece):
            where = (int(table[row, token // page]), token % page) if page else (row, token)
            expected[where] += 1
    assert len(expected) == (7 if window else 23)
    values, rope_keys = ((1, 8, piece), (8, piece))  # each with the other's width, told apart by the group axis
    assert copied == {(shape, *where): 1 for shape in (values, rope_keys) for where in expected}


# ---- refusals and the default ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interpret": False}, "pallas_tpu runs on TPUs, the target is cpu: pass interpret=True there"),
        (
            {"layout": "tokens_major", "values": (2, 1, 128, 64)},
            "pallas_tpu: layout = 'tokens_major': must be tokens_minor",
        ),
        ({"values": (2, 1, 64, 100)}, "pallas_tpu: values have 100 tokens .* multiple of 128"),
        ({"q": jnp.ones((2, 1, 4, 64), jnp.float16)}, "pallas_tpu: q is float16: must be one of bfloat16, float32"),
        ({"values": jnp.ones((2, 1, 64, 128), jnp.int16)}, "pallas_tpu: values are int16: must be one of bfloat16, "),
        (
            {"q": (2, 16, 64, 512), "values": (2, 64, 512, 128), "keys": (2, 64, 512, 128)},
            "pallas_tpu: would hold .* MiB in VMEM at T = 16, H = 64, G = 64: use fewer queries at a time",
        ),
    ],
)
def test_what_cannot_run_is_refused(change, message):
    args = {"q": (2, 1, 4, 64), "values": (2, 1, 64, 128), "lengths": jnp.array([3, 4]), "scale": 1.0,
            "layout": "tokens_minor", "implementation": "pallas_tpu", "interpret": True} | change  # fmt: skip
    array = lambda x: jax.ShapeDtypeStruct(x, F32) if isinstance(x, tuple) else x
    static = {n: args.pop(n) for n in ("scale", "layout", "implementation", "interpret")}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda a: decode_attention(**a, **static), {n: array(x) for n, x in args.items()})


def test_what_a_chip_of_little_memory_cannot_hold_is_refused():
    case = Case(128, 1, T=16, d=512, r=64, **MINOR)
    a, run = abstract(case, "bfloat16", 4, 1 << 15), lambda a: decode_attention(**a, **case.options)
    for kind, fits in (("TPU v4", False), ("TPU v5p", True)):
        mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, 1, "tpu"))
        refused = pytest.raises(ValueError, match="pallas_tpu: would hold 20 MiB in VMEM at T = 16, H = 128, G = 1")
        with jax.sharding.use_abstract_mesh(mesh), contextlib.nullcontext() if fits else refused:
            jax.eval_shape(run, a)


def test_pages_of_other_sizes_are_refused():
    case = Case(4, 4, d=32, page=96, **MINOR)
    with pytest.raises(ValueError, match=r"pallas_tpu: values have 96 tokens .* multiple of 128"):
        kernel(case)(make(case, F32))


@pytest.mark.parametrize(
    ("layout", "tokens", "chosen"),
    [("tokens_minor", 256, True), ("tokens_major", 256, False), ("tokens_minor", 40, False)],
)
def test_it_is_the_default_on_tpus_in_the_layout_of_tpus(layout, tokens, chosen):
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
    shape = (64, tokens) if layout == "tokens_minor" else (tokens, 64)
    q, values, lengths = jnp.ones((2, 1, 4, 64)), jnp.ones((2, 1, *shape)), jnp.array([3, 4])

    def run(q, values, lengths):
        return decode_attention(q, values, lengths=lengths, scale=1.0, layout=layout)

    with jax.sharding.use_abstract_mesh(mesh):
        assert ("pallas_call" in str(jax.make_jaxpr(run)(q, values, lengths))) == chosen
