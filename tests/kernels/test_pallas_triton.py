"""The Triton kernel: interpreted, against a brute force in float64; and compiled for cards that are not there.

Run as a script (`JAX_PLATFORMS=cpu python test_pallas_triton.py h100`) it prints what the assembler reports for a card.
"""

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from importlib.metadata import distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode_attention as suite
from test_decode_attention import BF16, F32, Case, error

from gva_jax.kernels import decode_attention, merge, pallas_triton

S, B = 384, suite.B  # three blocks of 128 tokens, or more blocks where tokens are wide
LENGTHS = np.array([0, 1, 127, 128, 129, 257, S, S + 3, -4, 200, 2, 383], np.int32)

CASES = [
    Case(2, 2, d=32),
    Case(5, 1, T=16, d=64, r=24, window=200),  # five tiles of rows
    Case(14, 2, T=3, d=64, keys=24, softcap=3.0),
    Case(12, 1, T=4, d=80, r=16, sinks=True),
    Case(6, 2, T=2, d=96, r=24, page=128),
    Case(4, 4, T=5, d=16, keys=80, r=24, window=33, softcap=3.0, sinks=True, page=384),
    Case(6, 2, T=2, d=32, keys=24, window=20, quantised=True),
    Case(3, 1, d=32, r=8, softcap=3.0, sinks=True, quantised=True, page=128),
    Case(8, 2, d=128, r=32),
    Case(4, 1, d=256, r=64, window=1),  # blocks of 16 tokens
    Case(3, 1, T=2, d=512, r=64),
]


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """Of the shared helpers; and three splits a row, some of them empty where the row is short."""
    monkeypatch.setattr(pallas_triton, "SPLIT", 128)
    for name, value in {"S": S, "LENGTHS": LENGTHS}.items():
        monkeypatch.setattr(suite, name, value)


def attend(operands, case, **options):
    operands = dict(operands)
    return decode_attention(
        operands.pop("q"), operands.pop("values"), **operands, **case.options | options, scale=case.scale,
        implementation="pallas_triton", interpret=True,
    )  # fmt: skip


@functools.cache
def compiled(case: Case):
    return jax.jit(functools.partial(attend, case=case))


def run(case: Case, operands, dtype=F32, jitted=None):
    """(out, lse) in NumPy of operands as `suite.make` gives them."""
    operands = suite.paged(case, operands) if case.page else operands
    cast = lambda a: jnp.asarray(a, dtype if a.dtype == np.float64 else a.dtype)
    out, lse = (jitted or compiled(case))(jax.tree.map(cast, operands))
    assert out.dtype == dtype and lse.dtype == F32
    return jax.device_get((out, lse))


def same_bits(found, other):
    for a, b in zip(found, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_brute_force(case):
    operands = suite.make(case, F32)
    found = run(case, operands)
    for a, b in zip(found, suite.brute_force(case, **operands), strict=True):
        assert error(a, b) < 2e-6
    same_bits(found, run(case, operands))
    same_bits(found, run(case, suite.poisoned(operands)))  # whatever lies in dead slots and pages


@pytest.mark.parametrize("late", [-1, 1])
def test_a_mask_off_by_one_exceeds_the_tolerance(late):
    operands = suite.make(CASES[0], F32) | {"lengths": np.full(B, 60, np.int32)}
    out, lse = run(CASES[0], operands)
    broken, lse_broken = suite.brute_force(CASES[0], **operands, late=late)
    assert error(out, broken) > 1e-2 and error(lse, lse_broken) > 1e-3


@pytest.mark.parametrize("x64", [False, True])
def test_one_split_needs_no_merge(x64, monkeypatch):
    """And with x64 on, 64-bit lengths and no `q_lengths`, float32 stays what it is."""
    monkeypatch.setattr(pallas_triton, "PROGRAMS", 0)
    case = Case(6, 2, T=2, d=16, keys=24, r=16, window=130)
    operands = suite.make(case, F32) | {"q_lengths": np.full(B, 2)}
    given = operands | {"q_lengths": None, "lengths": LENGTHS.astype(np.int64 if x64 else np.int32)}
    with jax.enable_x64(x64):
        found = run(case, given, jitted=jax.jit(functools.partial(attend, case=case)))
    for a, b in zip(found, suite.brute_force(case, **operands), strict=True):
        assert error(a, b) < 2e-6


@pytest.mark.parametrize("dtype", [BF16, jnp.dtype("float16")], ids=str)
def test_half_precision_is_no_worse_than_a_plain_einsum(dtype):
    case = Case(6, 2, d=64, r=16)
    operands = suite.make(case, dtype) | {"lengths": np.full(B, S, np.int32)}
    truth, _ = suite.brute_force(case, **operands)
    found, _ = run(case, operands, dtype)
    plain = jax.device_get(jax.jit(functools.partial(suite.plain_bf16, case))(operands))
    rms = lambda a: float(np.sqrt(np.mean((np.asarray(a, np.float64) - truth) ** 2)))
    assert rms(found) <= 1.5 * rms(plain)


def test_logits_far_below_zero():
    """Every logit shifted by -1e5: a finite stand-in for -inf, anywhere, would take the weight."""
    case = Case(6, 2, T=2, d=16, r=8, window=33)
    operands = suite.make(case, F32)
    operands["q_rope"][:], operands["rope_keys"][..., 0] = 0, -1
    operands["q_rope"][..., 0] = np.float32(1e5 / case.scale)
    out, lse = run(case, operands)
    truth, lse_truth = suite.brute_force(case, **operands)
    assert lse_truth[np.isfinite(lse_truth)].max() < -9e4
    assert np.sqrt(np.mean((out - truth) ** 2) / np.mean(truth**2)) < 2e-3
    assert error(lse, lse_truth) < 1e-6


def test_merged_halves_equal_the_whole():
    """The second half is handed `lengths - offset` unclipped; halves are empty where a row is short."""
    case, half = Case(6, 2, T=3, d=32, r=8, softcap=3.0), 256
    operands = suite.make(case, F32)

    def part(start, stop):
        cut = {name: operands[name][..., start:stop, :] for name in ("values", "rope_keys")}
        return jax.tree.map(jnp.asarray, run(case, operands | cut | {"lengths": LENGTHS - start}))

    found = merge(part(0, half), part(half, S))
    for a, b in zip(found, suite.brute_force(case, **operands), strict=True):
        assert error(a, b) < 2e-6


# ---- one-byte caches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_of_float8(dtype):
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.dtype(dtype))
    same_bits([pallas_triton._widen(every, F32)], [np.asarray(every).astype(np.float32)])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_values(dtype):
    case = Case(4, 2, d=32, keys=24, r=8)
    operands = suite.make(dataclasses.replace(case, quantised=True), F32)
    for name in ("values", "keys"):
        operands[name] = np.asarray(jnp.asarray(operands[name], jnp.dtype(dtype)))
    found = run(case, operands)
    plain = {n: operands[n].astype(np.float64) * operands[s][..., None]
             for n, s in (("values", "value_scales"), ("keys", "key_scales"))}  # fmt: skip
    for a, b in zip(found, suite.brute_force(case, **operands | plain), strict=True):
        assert error(a, b) < 2e-6


# ---- work ------------------------------------------------------------------------------------------------------------


def test_dead_blocks_are_not_read(monkeypatch):
    """With the masks of the cache's loads taken away, NaN shows in every block that is read, and in no other."""
    case, block, triton = Case(16, 1, d=16, window=100), 128, pallas_triton.plt

    def load(ref, *, mask, other):
        return triton.load(ref) if ref.shape == (block, 16) else triton.load(ref, mask=mask, other=other)

    unmasked = types.SimpleNamespace(load=load, store=triton.store, CompilerParams=triton.CompilerParams)
    monkeypatch.setattr(pallas_triton, "plt", unmasked)
    operands = suite.make(case, F32) | {"q_lengths": np.ones(B, np.int32)}
    jitted = jax.jit(functools.partial(attend, case=case))
    clean = run(case, operands, jitted=jitted)
    length, token = np.clip(LENGTHS, 0, S)[:, None], np.arange(S)
    read = (token < -(-length // block) * block) & (token >= np.maximum(LENGTHS[:, None] - 100, 0) // block * block)
    nan = lambda where: operands | {"values": np.where(where[:, None, :, None], np.nan, operands["values"])}
    same_bits(clean, run(case, nan(~read), jitted=jitted))
    out, _ = run(case, nan(read & (token >= length)), jitted=jitted)
    np.testing.assert_array_equal(np.isnan(out).any((1, 2, 3)), (read & (token >= length)).any(1))


def traced(B, S, *, H=16, G=4, d=64, dtype="bfloat16", cache=None, layout="tokens_major", **options):
    """The kernel's equation in the program for an H100, or None where another implementation is the default."""
    shape = jax.ShapeDtypeStruct
    values = shape((B, G, *((S, d) if layout == "tokens_major" else (d, S))), cache or dtype)
    call = functools.partial(decode_attention, scale=1.0, layout=layout, **options)
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        jaxpr = jax.make_jaxpr(lambda q, v, lengths: call(q, v, lengths=lengths))(
            shape((B, 1, H, d), dtype), values, shape((B,), "int32")
        )
    return next((e for e in jaxpr.eqns if e.primitive.name == "pallas_call"), None)


@pytest.mark.parametrize(("B", "S", "splits"), [(1, 131072, 132), (1, 8192, 32), (16, 32768, 8), (256, 131072, 1)])
def test_small_batches_fill_the_card(B, S, splits, monkeypatch):
    monkeypatch.undo()
    assert traced(B, S).outvars[0].aval.shape[0] == splits


# ---- the default, and refusals ---------------------------------------------------------------------------------------


def test_the_default_on_gpus_where_it_can_run():
    assert traced(2, 384)
    assert not traced(2, 380)
    assert not traced(2, 384, layout="tokens_minor")
    with jax.enable_x64(True):
        assert not traced(2, 384, dtype="float64")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"S": 380}, "values have 380 tokens: must be a multiple of 128"),
        ({"layout": "tokens_minor"}, "layout = 'tokens_minor': must be tokens_major"),
        ({"dtype": "float8_e5m2"}, "q is float8_e5m2: must be one of float32, bfloat16, float16"),
        ({"cache": "int16"}, "values are int16: must be one of float32"),
        ({"B": 64, "S": 2**17 + 128, "cache": "int8"}, "elements of one byte: must be at most 2\\^31, or more than"),
        ({"interpret": "races"}, "interpret = 'races': must be True or False"),
    ],
)
def test_what_it_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        traced(**{"B": 2, "S": 384, "implementation": "pallas_triton"} | change)


def test_one_byte_caches_beside_the_refused_sizes():
    assert traced(64, 2**17, cache="int8") and traced(128, 2**17 + 128, cache="int8")


def test_another_platform_is_refused():
    q, values = jnp.ones((1, 1, 4, 16)), jnp.ones((1, 2, 128, 16))
    call = functools.partial(decode_attention, q, values, lengths=jnp.array([3]), scale=1.0)
    with pytest.raises(ValueError, match="pallas_triton runs on GPUs, the target is cpu: pass interpret=True"):
        call(implementation="pallas_triton")


def test_a_jax_without_the_backend_is_refused(monkeypatch):
    monkeypatch.setattr(pallas_triton, "plt", None)
    with pytest.raises(ValueError, match="no longer has the Pallas Triton backend; use pallas_mosaic_gpu or xla"):
        traced(2, 384, implementation="pallas_triton")
    assert not traced(2, 384)


# ---- compiled for cards that are not there ---------------------------------------------------------------------------

CARDS = {  # compute capability, name, multiprocessors, shared memory a block
    "a100": ((8, 0), "NVIDIA A100-SXM4-80GB", 108, 166912),
    "h100": ((9, 0), "NVIDIA H100 80GB HBM3", 132, 232448),
    "b200": ((10, 0), "NVIDIA B200", 148, 232448),
}
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 84942979072  shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""
COMPILED = {
    "GVA": {},
    "GVA, batch 256, 128k": {"B": 256, "S": 2**17},
    "GVA, batch 256, 128k, pages": {"B": 256, "S": 2**17, "page": 128},
    "GVA, 16 queries": {"T": 16},
    "GQA": {"keys": 64, "r": 0},
    "GQA, d 128": {"keys": 128, "d": 128, "r": 0},
    "MLA": {"H": 16, "G": 1, "d": 512, "r": 64},
    "MLA, 128 heads, d 256": {"H": 128, "G": 1, "d": 256, "r": 64},
    "d 32, H/G 7": {"H": 28, "d": 32, "r": 0},
    "d 80, H/G 3": {"H": 12, "d": 80, "r": 24},
    "d 96, H/G 12, all options": {
        "H": 48, "d": 96, "keys": 80, "r": 32, "T": 4, "window": 999, "softcap": 30.0, "sinks": True, "page": 256,
        "cache": "int8",
    },
    "GVA, e4m3": {"cache": "float8_e4m3fn"},
    "GVA, e5m2": {"cache": "float8_e5m2"},
    "GVA, float32": {"dtype": "float32"},
    "GVA, float32, 16 queries": {"dtype": "float32", "T": 16},
}  # fmt: skip


def arguments(B=8, T=1, H=16, G=4, d=64, r=16, S=8192, dtype="bfloat16", keys=None, cache=None, page=None, sinks=False):
    shape = jax.ShapeDtypeStruct
    pages, tokens = (B, S) if page is None else (B * S // page, page)
    scales = shape((pages, G, tokens), "float32") if cache else None
    return {
        "q": shape((B, T, H, keys or d), dtype),
        "values": shape((pages, G, tokens, d), cache or dtype),
        "keys": shape((pages, G, tokens, keys), cache or dtype) if keys else None,
        "q_rope": shape((B, T, H, r), dtype) if r else None,
        "rope_keys": shape((pages, tokens, r), dtype) if r else None,
        "lengths": shape((B,), "int32"),
        "q_lengths": shape((B,), "int32"),
        "sinks": shape((H,), "float32") if sinks else None,
        "value_scales": scales,
        "key_scales": scales if keys else None,
        "page_table": shape((B, S // page), "int32") if page else None,
    }


def compile_all(card: str, dump: Path) -> dict:
    """Per case: the kernel's registers, spilled bytes, shared memory, and the program's temporaries."""
    from jax.experimental import topologies

    (major, minor), name, cores, shared = CARDS[card]
    target = TARGET.format(major=major, minor=minor, name=name, cores=cores, shared=shared)
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=target
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    device = jax.sharding.AbstractDevice(name, cores, "cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    ptxas = next(file.locate() for file in distribution("nvidia-cuda-nvcc").files if file.name == "ptxas")
    report = {}
    for case, sizes in COMPILED.items():
        options = {name: sizes[name] for name in ("window", "softcap") if name in sizes}
        operands = arguments(**{k: v for k, v in sizes.items() if k not in options})

        def f(operands, options=options):
            operands = dict(operands)
            return decode_attention(operands.pop("q"), operands.pop("values"), **operands, **options, scale=0.1)

        shutil.rmtree(dump)  # of the case before, whose files may have the same names
        dump.mkdir()
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(f, in_shardings=sharding, out_shardings=sharding).lower(operands)
        temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
        [sequence] = dump.glob("*thunk_sequence.txt")
        [ptx] = [path for path in dump.glob("*.ptx") if "entry gva_decode_triton(" in path.read_text()]
        arch = re.search(r"\.target (\w+)", ptx.read_text()).group(1)
        said = subprocess.run([ptxas, "-v", f"-arch={arch}", ptx, "-o", os.devnull], capture_output=True, text=True)
        report[case] = {
            "registers": int(re.search(r"(\d+) registers", said.stderr).group(1)),
            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said.stderr))),
            "shared": int(re.search(r"gva_decode_triton .*shared_memory: (\d+)", sequence.read_text()).group(1)),
            "temporaries": temporaries,
        }
    return report


def needed() -> list[str]:
    """Distributions that compiling needs and that are not installed."""
    plugin = {"jax_cuda13_plugin": "jax-cuda13-plugin", "jax_plugins.xla_cuda13": "jax-cuda13-pjrt"}
    missing = [name for module, name in plugin.items() if not _installed(module)]
    there = {name for names in packages_distributions().values() for name in names}
    return missing + [name for name in ("nvidia-cuda-nvcc", "nvidia-nvvm") if name not in there]


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def ahead_of_time(card: str, folder) -> dict:
    """`compile_all` in a process of its own: what it needs is read when JAX and the compiler are loaded."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",  # or JAX asks for a device
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx --xla_gpu_dump_llvmir",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONWARNINGS": "error:The Pallas Triton",
    }
    command = [sys.executable, __file__, card, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("card", CARDS)
def test_compiles_ahead_of_time(card, tmp_path):
    if missing := needed():
        pytest.skip(f"needs {', '.join(missing)}, the first two of JAX's own version")
    report = ahead_of_time(card, tmp_path)
    assert report.keys() == COMPILED.keys()
    for case, found in report.items():
        # Earlier compilers spill a few registers ahead of the loop for Blackwell; the first card stands for all those
        # of compute capability 8, of which most have less shared memory than it.
        assert found["spilled"] <= (16 if card == "b200" else 0), (case, found)
        assert found["shared"] <= (99 * 1024 if card == "a100" else CARDS[card][3]), (case, found)
        assert found["temporaries"] < 20e6, (case, found)  # partial results, no copy of a cache


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(compile_all(sys.argv[1], Path(sys.argv[2]))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            for case, figures in ahead_of_time(sys.argv[1], folder).items():
                print(f"{case:30}", ", ".join(f"{name} {value}" for name, value in figures.items()))
