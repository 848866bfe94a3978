"""The TPU kernel, simulated: numbers against float64, its copies counted, races looked for; and compiled for TPUs.

Simulation and compilation, not a measurement on hardware. `python test_pallas_tpu.py v5e` compiles for one TPU here and
prints a line of JSON per case (needs libtpu, from the extra `aot`).
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from gva_jax.kernels import decode_attention, merge, pallas_tpu, reference

F32, BF16 = jnp.float32, jnp.bfloat16
BLOCK = 128  # of the kernel, in these tests
S = 3 * BLOCK
SIMULATED = functools.partial(
    pltpu.InterpretParams, detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)

# Every case runs all of these rows at once: lengths around nothing, around blocks, at and past the capacity; and how
# many of the row's queries are real (cut to T).
LENGTHS = np.array([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5, S, S + 3, -4, 50], np.int32)
Q_LENGTHS = np.array([1, 1, 16, 2, 16, 3, 16, 5, 16, 0], np.int32)


@dataclass(frozen=True)
class Case:
    """Sizes and options; `keys` is the width of separate keys, `page` a page's tokens, `stored` a quantised dtype."""

    H: int
    G: int
    T: int = 1
    d: int = 64
    keys: int | None = None
    r: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    page: int | None = None
    stored: str | None = None

    def __str__(self):
        shown = [f"{f.name}={v}" for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default]
        return ",".join(shown)


CASES = [
    Case(4, 4, d=32, r=16),  # four groups in one product
    Case(6, 2, T=2, d=80, r=24, window=130, softcap=3.0),
    Case(5, 1, T=16, d=96, sinks=True, page=128),
    Case(14, 2, T=3, keys=96, d=64, r=32, stored="int8"),
    Case(8, 2, T=4, d=64, r=16, stored="float8_e4m3fn", page=S, window=33, sinks=True),
    Case(12, 1, d=256, r=64),  # absorbed latent attention
    Case(3, 1, T=5, d=512, keys=128, window=1, page=128),
    Case(12, 4, d=64, keys=64, softcap=2.0, stored="int8"),
    Case(4, 1, d=128, r=24, T=2, sinks=True),
]


def make(case: Case, dtype=F32, lengths=LENGTHS, q_lengths=Q_LENGTHS, tokens=S, seed=0):
    """Operands as (contents, options): normal data; dead slots, dead pages and dead scales hold zeros."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), F32).astype(dtype)
    B, k = len(lengths), case.keys or case.d
    live = np.arange(tokens) < lengths[:, None]  # (B, S)

    def cached(*front, quantise=False):
        x = rng.normal(size=(B, *front, tokens))
        x = np.where(live.reshape(B, *[1] * len(front), tokens), x, 0)
        if quantise and case.stored:
            return jnp.asarray(np.round(x * 20) if case.stored == "int8" else x, F32).astype(case.stored)
        return jnp.asarray(x, F32).astype(dtype)

    a = {
        "q": draw(B, case.T, case.H, k),
        "values": cached(case.G, case.d, quantise=True),
        "keys": cached(case.G, k, quantise=True) if case.keys else None,
        "q_rope": draw(B, case.T, case.H, case.r) if case.r else None,
        "rope_keys": cached(case.r) if case.r else None,
        "sinks": draw(case.H) if case.sinks else None,
        "lengths": jnp.asarray(lengths),
        "q_lengths": jnp.asarray(np.minimum(q_lengths, case.T)),
    }
    if case.stored:  # the product of code and scale is of order one
        unit = 20 if case.stored == "int8" else 1
        scales = lambda: jnp.asarray(np.where(live[:, None], rng.uniform(0.5, 2, (B, case.G, tokens)), 0) / unit, F32)
        a |= {"value_scales": scales(), "key_scales": scales() if case.keys else None}
    if case.page:
        pages = tokens // case.page
        a["page_table"] = jnp.asarray(rng.permutation(B * pages).reshape(B, pages), jnp.int32)
        where = np.argsort(np.asarray(a["page_table"]).reshape(-1))
        for name in CACHED:
            if a.get(name) is not None:
                x = np.asarray(a[name]).reshape(*a[name].shape[:-1], pages, case.page)
                a[name] = jnp.asarray(np.moveaxis(x, -2, 1).reshape(-1, *x.shape[1:-2], case.page)[where])
        dead = np.arange(pages) * case.page >= lengths[:, None]
        a["page_table"] = jnp.where(dead, 2_147_480_000, a["page_table"])
    return a


CACHED = ("values", "keys", "rope_keys", "value_scales", "key_scales")


def poison(case: Case, a, tokens=S):
    """The same with NaN or infinity in all that is dead: slots, pages and scales."""
    lengths = np.asarray(a["lengths"])
    live = np.arange(tokens) < lengths[:, None]
    if case.page:
        table = np.asarray(a["page_table"])
        live_pages = np.zeros((len(lengths) * tokens // case.page, case.page), bool)
        for row, slots in zip(table, live.reshape(*table.shape, case.page), strict=True):
            for page, live_slots in zip(row, slots, strict=True):
                if page < len(live_pages):
                    live_pages[page] = live_slots
        live = live_pages
    a = dict(a)
    for name, fill in zip(CACHED, (np.nan, np.inf, np.nan, np.inf, np.nan), strict=True):
        if a.get(name) is not None and a[name].dtype != jnp.int8:
            fill = np.nan if "float8" in str(a[name].dtype) else fill
            mask = live.reshape(live.shape[0], *[1] * (a[name].ndim - 2), live.shape[1])
            a[name] = jnp.where(mask, a[name].astype(F32), fill).astype(a[name].dtype)
    return a


def options(case: Case):
    width = case.keys or case.d + case.r
    return {"scale": 2 * width**-0.5, "window": case.window, "softcap": case.softcap, "layout": "tokens_minor"}


def kernel(case: Case, interpret=True):
    return jax.jit(lambda a: decode_attention(**a, **options(case), implementation="pallas_tpu", interpret=interpret))


def truth(case: Case, a):
    with jax.enable_x64(True):
        wide = lambda x: x if x is None or jnp.issubdtype(x.dtype, jnp.integer) else x.astype(jnp.float64)
        a = {name: wide(x) for name, x in a.items()}
        return jax.device_get(jax.jit(lambda a: reference.decode_attention(**a, **options(case)))(a))


def error(found, truth) -> float:
    """Largest difference over the largest entry; the -inf must be the same."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    assert (np.isneginf(found) == np.isneginf(truth)).all()
    live = np.isfinite(truth)
    assert np.isfinite(found[live]).all()
    return float(np.abs(found[live] - truth[live]).max(initial=0) / np.abs(truth[live]).max(initial=1e-300))


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "MAX_BLOCK", BLOCK)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_float64(case):
    a, run = make(case), kernel(case)
    found = run(a)
    for x, y in zip(found, truth(case, a), strict=True):
        assert error(x, y) < 2e-6
    assert_same_bits(found, run(a))
    assert_same_bits(found, run(poison(case, a)))


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
def test_simulated_tpu_memory_shows_no_race_and_no_stray_read(case):
    """Copies complete as late as they may, memory starts as NaN, a read or page outside of its array raises."""
    a = poison(case, make(case))
    assert_same_bits(kernel(case, SIMULATED())(a), kernel(case)(a))
    with contextlib.suppress(ImportError):  # newer versions raise at a race, older ones only note it, here
        from jax._src.pallas.mosaic.interpret.interpret_pallas_call import races

        assert races is None or not races.races_found


def test_large_batches_in_tiles_of_rows(monkeypatch):
    """Several rows a grid step, the last step filled with empty rows; nothing split, nothing lost at the borders."""
    monkeypatch.setattr(pallas_tpu, "ROWS_BYTES", 1 << 18)
    case = Case(4, 2, d=32, r=16)
    lengths = np.random.default_rng(1).integers(0, S + 1, 17).astype(np.int32)
    lengths[:3], lengths[-1] = 0, 0
    a = make(case, lengths=lengths, q_lengths=np.ones(17, np.int32))
    plan = pallas_tpu._plan(a["q"], a["q_rope"], {"values": a["values"]}, None, 2, 1.0, None, None)
    assert plan.splits == 1 and plan.tiles > 1 and plan.rows > 1 and plan.tiles * plan.rows > 17
    for x, y in zip(kernel(case)(poison(case, a)), truth(case, a), strict=True):
        assert error(x, y) < 2e-6


def test_bf16_is_no_worse_than_a_plain_einsum():
    case = Case(6, 2, d=64, r=16)
    a = make(case, BF16, lengths=np.full(8, S, np.int32), q_lengths=np.ones(8, np.int32))

    @jax.jit
    def plain(q, values, q_rope, rope_keys):
        """What one would write: products of bfloat16, scores and softmax in float32."""
        einsum = lambda eq, a, b: jnp.einsum(eq, a.reshape(8, 1, 2, 3, -1).astype(F32), b.astype(F32))
        s = einsum("BTGhd,BGdS->BTGhS", q, values) + einsum("BTGhr,BrS->BTGhS", q_rope, rope_keys)
        p = jax.nn.softmax(s * options(case)["scale"]).astype(BF16)
        return jnp.einsum("BTGhS,BGdS->BTGhd", p, values).reshape(8, 1, 6, -1)

    out, _ = truth(case, a)
    rms = lambda x: float(np.sqrt(np.mean((np.asarray(x, np.float64) - out) ** 2)))
    baseline = plain(a["q"], a["values"], a["q_rope"], a["rope_keys"])
    assert rms(kernel(case)(a)[0]) <= 1.5 * rms(baseline)
    assert rms(baseline) < 0.02 * float(np.sqrt(np.mean(out**2)))  # and that is a small error


def test_logits_far_below_zero():
    """Every logit shifted by -1e5: a finite stand-in for -inf, anywhere, would take the weight."""
    case = dataclasses.replace(CASES[1], softcap=None)
    a, scale = make(case), options(case)["scale"]
    a["rope_keys"] = jnp.zeros_like(a["rope_keys"]).at[:, 0].set(-1)
    a["q_rope"] = jnp.zeros_like(a["q_rope"]).at[..., 0].set(1e5 / scale)
    (out, lse), (true_out, true_lse) = kernel(case)(a), truth(case, a)
    assert true_lse[np.isfinite(true_lse)].max() < -9e4
    unit = np.spacing(np.float32(1e5 / scale)) * scale  # what one logit can be rounded by
    assert error(out, true_out) < unit and error(lse, true_lse) * 1e5 < 2 * unit
    assert np.sqrt(np.mean((out - true_out) ** 2) / np.mean(true_out**2)) < 2e-3


def test_float32_stays_float32_where_x64_is_on():
    case = CASES[1]
    a = make(case)
    truth_ = truth(case, a)
    with jax.enable_x64(True):
        a |= {name: jnp.asarray(np.asarray(a[name]), jnp.int64) for name in ("lengths", "q_lengths")}
        found = kernel(case)(a)
    assert [x.dtype for x in found] == [F32, F32]
    for x, y in zip(found, truth_, strict=True):
        assert error(x, y) < 2e-6


def test_merged_halves_equal_the_whole():
    """The second half is handed `lengths - offset` unclipped; halves are empty where a row is short."""
    case = dataclasses.replace(CASES[0], T=2)
    half = 2 * BLOCK
    a = make(case, tokens=2 * half, lengths=LENGTHS + 100)
    cut = lambda start: (
        {n: a[n][..., start : start + half] for n in ("values", "rope_keys")} | {"lengths": a["lengths"] - start}
    )
    run = kernel(case)
    for x, y in zip(merge(run(a | cut(0)), run(a | cut(half))), truth(case, a), strict=True):
        assert error(x, y) < 2e-6


def test_a_mask_off_by_one_exceeds_every_tolerance():
    case = CASES[0]
    a = make(case, lengths=np.full(4, 200, np.int32), q_lengths=np.ones(4, np.int32))
    run, (true_out, true_lse) = kernel(case), truth(case, a)
    for late in (-1, 1):
        out, lse = run(a | {"lengths": a["lengths"] + late})
        assert error(out, true_out) > 2e-4 and error(lse, true_lse) > 1e-4


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
    case = Case(2, 1, d=8, r=8, window=window, page=page)
    a = make(case, lengths=lengths, q_lengths=np.ones(4, np.int32), tokens=tokens)
    found = kernel(case)(a)
    jax.effects_barrier()
    for x, y in zip(found, truth(case, a), strict=True):
        assert error(x, y) < 2e-6

    expected = Counter()
    for row, length in enumerate(lengths):
        begin = 0 if window is None else max(0, length - window) // piece * piece
        for token in range(begin, length, piece):
            where = (int(a["page_table"][row, token // page]), token % page) if page else (row, token)
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


def test_pages_of_other_sizes_are_refused():
    a = make(dataclasses.replace(CASES[0], page=96), lengths=LENGTHS)
    with pytest.raises(ValueError, match=r"pallas_tpu: values have 96 tokens .* multiple of 128"):
        kernel(CASES[0])(a)


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


# ---- compiled for TPUs -----------------------------------------------------------------------------------------------

TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
INT8, FP8 = {"stored": "int8"}, {"stored": "float8_e4m3fn"}
# (case, batch, tokens, dtype): all widths; long contexts, large batches, large page tables.
COMPILED = [
    (Case(16, 4, r=16), 32, 1 << 17, "bfloat16"),
    (Case(16, 4, r=16, window=4096, softcap=20.0, sinks=True), 256, 1 << 13, "bfloat16"),
    (Case(16, 4, d=32, r=24, page=128), 64, 1 << 17, "bfloat16"),
    (Case(16, 4, keys=64, T=4), 4, 1 << 17, "bfloat16"),
    (Case(12, 4, d=80, r=32, T=16), 4, 1 << 13, "bfloat16"),
    (Case(20, 4, d=96, r=16), 4, 1 << 13, "float32"),
    (Case(56, 8, d=128, keys=128, **INT8), 8, 1 << 15, "bfloat16"),
    (Case(12, 4, d=80, r=24, page=256, **INT8), 8, 1 << 13, "bfloat16"),
    (Case(6, 2, d=64, r=16, T=2, **FP8), 8, 1 << 13, "bfloat16"),
    (Case(16, 1, d=256, r=64, T=4), 4, 1 << 15, "bfloat16"),
    (Case(128, 1, d=512, r=64), 4, 1 << 15, "bfloat16"),
]


def compile_for(topology: str) -> None:
    """Prints, per case, what the compiled program allocates and which large arrays it makes."""
    from jax.experimental import topologies

    device = topologies.get_topology_desc(TPUS[topology], "tpu").devices[0]
    on_device = jax.sharding.SingleDeviceSharding(device)
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device.device_kind, device.num_cores, "tpu"))
    for i, (case, batch, tokens, dtype) in enumerate(COMPILED):
        small = jax.eval_shape(functools.partial(shapes, case, dtype, batch, tokens))
        run = jax.jit(
            lambda a, case=case: decode_attention(**a, **options(case)),
            in_shardings=on_device, out_shardings=on_device,
        )  # fmt: skip
        with jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(i == 0):
            compiled = run.lower(small).compile()
        least = min(small[name].size for name in ("values", "keys", "rope_keys") if small.get(name) is not None)
        made = re.findall(r"= \(?\w+\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text())
        large = [op for dims, op in made if np.prod([int(n) for n in dims.split(",")], dtype=float) >= least]
        print(json.dumps({
            "case": str(case), "kernel": "tpu_custom_call" in compiled.as_text(),
            "temporary": compiled.memory_analysis().temp_size_in_bytes,
            "cache": sum(small[n].size * small[n].dtype.itemsize for n in CACHED if small.get(n) is not None),
            "made": sorted({op for op in large if op not in ("parameter", "bitcast")}),
        }), flush=True)  # fmt: skip


def shapes(case: Case, dtype, batch: int, tokens: int):
    """Operands like `make`'s, uninitialised."""
    k, (P, page) = case.keys or case.d, (batch, tokens)
    if case.page:
        P, page = batch * tokens // case.page, case.page
    stored = case.stored or dtype
    a = {
        "q": jnp.zeros((batch, case.T, case.H, k), dtype),
        "values": jnp.zeros((P, case.G, case.d, page), stored),
        "keys": jnp.zeros((P, case.G, k, page), stored) if case.keys else None,
        "q_rope": jnp.zeros((batch, case.T, case.H, case.r), dtype) if case.r else None,
        "rope_keys": jnp.zeros((P, case.r, page), dtype) if case.r else None,
        "sinks": jnp.zeros(case.H) if case.sinks else None,
        "lengths": jnp.zeros(batch, jnp.int32),
        "q_lengths": jnp.zeros(batch, jnp.int32),
        "page_table": jnp.zeros((batch, tokens // page), jnp.int32) if case.page else None,
    }
    if case.stored:
        a["value_scales"] = jnp.zeros((P, case.G, page))
        a["key_scales"] = a["value_scales"] if case.keys else None
    return a


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, from the extra `aot`")
@pytest.mark.parametrize("topology", TPUS)
def test_compiles_for_tpus_without_a_copy_of_the_cache(topology):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, __file__, topology], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(COMPILED)
    for result in results:
        assert result["kernel"] and not result["made"], result
        assert result["temporary"] < max(0.02 * result["cache"], 4 << 20), result


if __name__ == "__main__":
    compile_for(sys.argv[1])
