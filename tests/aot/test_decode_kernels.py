"""The decode kernels compiled for accelerators that are not here: no copy of a cache, no spilled registers, and what
the compilers say of them.

`python test_decode_kernels.py` (with tests/kernels on the path) prints the tables of docs/results/compiled_kernels.md,
`python test_decode_kernels.py v5e pallas_tpu` a line of JSON a case.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import jax
import numpy as np
import pytest
import targets
from cases import CACHED, Case, abstract

from gva_jax.kernels import decode_attention

GVA, MLA = {"r": 16}, {"G": 1, "d": 512, "r": 64}
ALL = dict(T=4, window=999, softcap=30.0, sinks=True, page=256)
# Name -> (case, batch, tokens, dtype): all widths, long contexts, large batches, large page tables.
CASES = {
    "GVA": (Case(16, 4, **GVA), 8, 1 << 15, "bfloat16"),
    "GVA, batch 256, 128k, pages": (Case(8, 2, **GVA, page=128), 256, 1 << 17, "bfloat16"),
    "GVA, 16 queries, window, softcap, sinks": (
        Case(16, 4, **GVA, T=16, window=4096, softcap=20.0, sinks=True), 8, 1 << 15, "bfloat16",
    ),
    "GVA, int8": (Case(16, 4, **GVA, stored="int8"), 8, 1 << 15, "bfloat16"),
    "GVA, e4m3": (Case(16, 4, **GVA, stored="float8_e4m3fn"), 8, 1 << 15, "bfloat16"),
    "GQA": (Case(16, 4, keys=64), 8, 1 << 15, "bfloat16"),
    "GQA, d 128": (Case(56, 8, d=128, keys=128), 8, 1 << 15, "bfloat16"),
    "MLA, 16 heads": (Case(16, **MLA), 8, 1 << 15, "bfloat16"),
    "MLA, 128 heads": (Case(128, **MLA), 8, 1 << 15, "bfloat16"),
    "d 80, H/G 3": (Case(12, 4, d=80, r=24), 4, 1 << 15, "bfloat16"),
    "d 96, H/G 12, all options, e5m2": (Case(48, 4, d=96, keys=80, r=32, stored="float8_e5m2", **ALL), 8, 1 << 15,
                                        "bfloat16"),
    "GVA, float32": (Case(16, 4, **GVA), 8, 1 << 15, "float32"),
}  # fmt: skip
RUNS = [(target, "pallas_tpu") for target in targets.TPUS]
RUNS += [(target, "pallas_triton") for target in ("a100", "h100", "b200")]
RUNS += [(target, "pallas_mosaic_gpu") for target in ("h100", "b200", "rtx_pro_6000")]


# All cases are compiled for these; every second one for the others, which differ little from one of them.
EVERY_CASE = {("v5e", "pallas_tpu"), ("a100", "pallas_triton"), ("h100", "pallas_mosaic_gpu")}


def chosen(target: str, kernel: str, every: bool) -> dict:
    """The cases that are compiled of a kernel: of `every` one, or of those that tests take the time for."""
    own = dict(CASES)
    if kernel == "pallas_mosaic_gpu":  # computes in the tensor cores' own dtypes
        case, *rest, _ = own.pop("GVA, float32")
        own["GVA, float16"] = case, *rest, "float16"
    if not every and (target, kernel) not in EVERY_CASE:
        own = dict(list(own.items())[::2])
    return own


def in_layout(case: Case, kernel: str) -> Case:
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return Case(**fields | {"layout": "tokens_minor" if kernel == "pallas_tpu" else "tokens_major"})


def compile_all(target: str, kernel: str, dump: Path, every: bool) -> None:
    here = jax.sharding.SingleDeviceSharding(targets.devices(target)[0])
    mesh = targets.abstract_mesh(target)
    for i, (name, (case, batch, tokens, dtype)) in enumerate(chosen(target, kernel, every).items()):
        case = in_layout(case, kernel)
        operands = abstract(case, dtype, batch, tokens)
        run = jax.jit(
            lambda a, case=case: decode_attention(**a, **case.options, implementation=kernel),
            in_shardings=here, out_shardings=here,
        )  # fmt: skip
        shutil.rmtree(dump, ignore_errors=True)  # of the case before, whose files may have the same names
        dump.mkdir()
        try:
            with jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(i == 0):
                compiled = run.lower(operands).compile()
        except ValueError as refusal:
            print(json.dumps({"case": name, "refused": str(refusal).splitlines()[0]}), flush=True)
            continue
        text = compiled.as_text()
        caches = [operands[n] for n in CACHED if operands.get(n) is not None]
        made = re.findall(r"= \(?\w+\[([\d,]+)\]\S* ([\w-]+)\(", text)
        least = operands["values"].size  # partial results may be as large as rotary keys or scales
        large = {op for dims, op in made if np.prod([int(n) for n in dims.split(",")], dtype=float) >= least}
        print(json.dumps({
            "case": name,
            "calls": re.findall(r'custom_call_target="([^"]+)"', text),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "cache": sum(x.size * x.dtype.itemsize for x in caches),
            "made": sorted(large - {"parameter", "bitcast", "get-tuple-element"}),
            **REPORTS[kernel](dump),
        }), flush=True)  # fmt: skip


def report_triton(dump: Path) -> dict:
    [sequence] = dump.glob("*thunk_sequence.txt")
    [ptx] = [path for path in dump.glob("*.ptx") if "entry gva_decode_triton(" in path.read_text()]
    ptxas = next(file.locate() for file in distribution("nvidia-cuda-nvcc").files if file.name == "ptxas")
    arch = re.search(r"\.target (\w+)", ptx.read_text()).group(1)
    said = subprocess.run([ptxas, "-v", f"-arch={arch}", ptx, "-o", os.devnull], capture_output=True, text=True).stderr
    shared = re.search(r"gva_decode_triton .*shared_memory: (\d+)", sequence.read_text()).group(1)
    return _of_assembler(said, int(shared))


def report_mosaic(dump: Path) -> dict:
    said = "".join(path.read_text(errors="replace") for path in dump.glob("*.ptxas"))
    module = "".join(path.read_text() for path in dump.glob("*.after_layout_inference.txt"))
    return _of_assembler(said, int(re.search(r"dynamic_shared_memory_size %c(\d+)", module).group(1)))


def _of_assembler(said: str, shared: int) -> dict:
    return {
        "registers": int(re.search(r"(\d+) registers", said).group(1)),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "shared": shared,
        "warnings": sorted(set(re.findall(r"C7\d{3}", said))),  # such as: products run one after another
    }


REPORTS = {"pallas_tpu": lambda dump: {}, "pallas_triton": report_triton, "pallas_mosaic_gpu": report_mosaic}


def results(target: str, kernel: str, folder: Path, every: bool) -> dict[str, dict]:
    """By case, compiled in a process of its own."""
    dump = folder / "dump"
    environment = {"PYTHONWARNINGS": "error:The Pallas Triton"}
    if target in targets.CARDS:
        environment |= {
            "MOSAIC_GPU_DUMP_TO": str(dump),
            "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx --xla_gpu_dump_llvmir",
        }
    return {found["case"]: found for found in targets.run(__file__, target, kernel, int(every), dump, **environment)}


def absent(target: str, kernel: str) -> str | None:
    """What compiling needs and is not here."""
    if names := targets.missing(target):
        return f"needs {', '.join(names)}, from the extra `aot`"
    if kernel == "pallas_mosaic_gpu" and jax.__version_info__ < (0, 11):
        return "needs JAX 0.11 or newer"
    return None


@pytest.mark.parametrize(("target", "kernel"), RUNS)
def test_compiles(target, kernel, tmp_path):
    if why := absent(target, kernel):
        pytest.skip(why)
    found = results(target, kernel, tmp_path, every=False)
    assert list(found) == list(chosen(target, kernel, every=False))
    for name, case in found.items():
        if (target, name.split(",")[0]) == ("rtx_pro_6000", "MLA"):
            assert re.search("takes .* bytes of shared memory: must be at most", case["refused"]), case
            continue
        assert case["calls"] and not case["made"], (name, case)
        assert case["temporaries"] < case["cache"] / 8, (name, case)  # partial results, no copy of a cache
        if target in targets.CARDS:
            # Earlier Triton spills a few registers ahead of the loop for Blackwell. The A100 stands for all cards of
            # compute capability 8, of which most have less shared memory than it.
            limit = 99 * 1024 if target == "a100" else targets.CARDS[target].shared
            assert case["spilled"] <= (16 if (target, kernel) == ("b200", "pallas_triton") else 0), (name, case)
            assert case["shared"] <= limit and not case["warnings"], (name, case)


def compiled_here() -> dict[tuple[str, str], dict]:
    """By target and kernel: `results`, of all that can be compiled here."""
    found = {}
    for target, kernel in RUNS:
        if (why := absent(target, kernel)) is None:
            print(target, kernel, file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder:
                found[target, kernel] = results(target, kernel, Path(folder), every=True)
        else:
            print(target, kernel, why, file=sys.stderr)
    return found


def tables(found: dict[tuple[str, str], dict]) -> str:
    """Markdown: what a TPU's program allocates, and what assemblers say of GPUs' kernels."""
    lines = []
    for title, of_gpus in (("TPUs: MB of temporaries", False), ("GPUs: registers, KiB of shared memory", True)):
        runs = [run for run in found if (run[0] in targets.CARDS) == of_gpus]
        names = list(dict.fromkeys(name for run in runs for name in found[run]))
        head = [f"{target} {kernel.removeprefix('pallas_')}" for target, kernel in runs]
        lines += [f"## {title}", "", f"| case | cache, MB | {' | '.join(head)} |", "|---" * (len(runs) + 2) + "|"]
        for name in names:
            row = [found[run].get(name, {}) for run in runs]
            cache = next(case["cache"] for case in row if "cache" in case)
            lines.append(f"| {name} | {cache / 1e6:,.0f} | {' | '.join(_cell(case) for case in row)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(case: dict) -> str:
    if "refused" in case:
        return "refused"
    if "registers" not in case:
        return f"{case['temporaries'] / 1e6:.1f}" if case else ""
    spilled = f", spills {case['spilled']} B" if case["spilled"] else ""
    return f"{case['registers']}, {case['shared'] / 1024:.0f}{spilled}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        target, kernel, *rest = sys.argv[1:]
        every, dump = rest or ("1", tempfile.mkdtemp())
        compile_all(target, kernel, Path(dump), every == "1")
    else:
        print(tables(compiled_here()))
