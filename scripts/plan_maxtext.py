"""The training step of a 323,011,584-parameter GQA decoder, here and in MaxText 0.2.5, side by side:

    uv pip install 'maxtext[tpu]==0.2.5' && uv pip install -e '.[train]'     (Python 3.12)
    python scripts/plan_maxtext.py [--rounds 2] [--out docs/results/maxtext.md]

Both are compiled for the same TPUs by the same compiler, in turn, each time in a process of its own; the figures of
both are read off the compiled programs in the same way. A minute or more of two cores for each compilation.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from gva_jax import plan as package

package.environment()  # before JAX is imported

import jax  # noqa: E402

from gva_jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, RunConfig  # noqa: E402
from gva_jax.plan import hlo, program, topologies  # noqa: E402
from gva_jax.plan.count import count  # noqa: E402

TOPOLOGY, MESH, ROWS, CONTEXT = "v5e:4x4", {"fsdp": 16}, 8, 2048
# XLA replaces a gathered product by a loop of partial products where this many MiB are gathered: above all, never.
UNWINDOWED = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# What MaxText calls what the backward pass computes again, whether XLA may window products, what we call it.
CASES = [
    ("full", "on", "full"),
    ("full", "off", "full"),
    ("minimal", "on", "dots"),
    ("-", "on", "attention"),
    ("-", "off", "attention"),
]
THEIR_OPTIONS = dict(
    run_name="plan", base_output_directory=os.devnull, dataset_type="synthetic", skip_jax_distributed_system=True,
    compile_topology="v5e-16", compile_topology_num_slices=1, ici_fsdp_parallelism=16, scan_layers=True,
    base_num_decoder_layers=24, base_emb_dim=1024, base_mlp_dim=3072, head_dim=64, vocab_size=32_768,
    base_num_query_heads=16, base_num_kv_heads=4, logits_via_embedding=True, attention="flash", enable_dropout=False,
    max_target_length=CONTEXT, per_device_batch_size=ROWS, dtype="bfloat16", opt_type="adamw",
)  # fmt: skip


def ours(remat: str) -> RunConfig:
    attention = AttentionConfig("gqa", num_heads=16, num_kv_heads=4, head_dim=64)
    model = ModelConfig(vocab_size=32_768, num_layers=24, model_dim=1024, hidden_dim=3072, attention=attention,
                        dtype="bfloat16", remat=remat)  # fmt: skip
    return RunConfig(name=f"323M, {remat}", model=model, data=DataConfig(context_length=CONTEXT, batch_size=16 * ROWS),
                     mesh=MeshConfig(data=1, fsdp=16))  # fmt: skip


def compile_one(side: str, remat: str, windowed: str) -> dict:
    """Figures of one chip and one step, of one compilation in this process."""
    options = {} if windowed == "on" else UNWINDOWED
    lowered_compile, seen = jax.stages.Lowered.compile, {}

    def compile(self, compiler_options=None):
        wall, cpu = time.monotonic(), time.process_time()
        compiled = lowered_compile(self, compiler_options={**(compiler_options or {}), **options} or None)
        seen.update(compiled=compiled, seconds=time.monotonic() - wall, cpu_seconds=time.process_time() - cpu)
        return compiled

    jax.stages.Lowered.compile = compile
    if side == "ours":
        topology = topologies.parse(TOPOLOGY)
        program.compile_step(ours(remat), topology, topology.devices(), keep=False)
    else:
        base = Path(importlib.util.find_spec("maxtext").origin).parent / "configs" / "base.yml"
        options_given = [f"{name}={value}" for name, value in THEIR_OPTIONS.items()]
        sys.argv[1:] = [str(base), f"remat_policy={remat}", *options_given]
        with contextlib.suppress(SystemExit):
            runpy.run_module("maxtext.trainers.pre_train.train_compile", run_name="__main__")
    compiled = seen.pop("compiled")
    parsed, memory = hlo.parse(compiled.as_text()), program.reported_memory(compiled)
    counts = count(parsed, MESH)
    arguments = [array for op in parsed.entry.parameters() for array in op.shape]
    state = sum(array.padded_bytes for array in arguments if array.dims != (ROWS, CONTEXT))  # the rest is the batch
    return seen | {
        "state": state,
        "temporaries": memory["temporaries"],
        "summarised": memory["temporaries as summarised"],
        "matmul_flops": counts.matmul_flops,
        "hbm_bytes": counts.hbm_bytes,
        "forward_kernels": sum(n for kind, n in counts.kernel_calls.items() if "fwd" in kind),
    }


def in_turn(rounds: int) -> dict[tuple[str, str, str], list[dict]]:
    """Every compilation `rounds` times, theirs and ours in turn."""
    found: dict[tuple[str, str, str], list[dict]] = {}
    turns = [(side, remat, windowed) for _ in range(rounds) for theirs, windowed, mine in CASES
             for side, remat in (("theirs", theirs), ("ours", mine)) if remat != "-"]  # fmt: skip
    for i, turn in enumerate(turns):
        print(f"{i + 1}/{len(turns)}: {' '.join(turn)}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--one", *turn]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        one = json.loads(done.stdout.splitlines()[-1])
        print(f"    {one['seconds']:.0f} s", file=sys.stderr, flush=True)
        found.setdefault(turn, []).append(one)
    return found


HEAD = [
    "| rematerialisation | windowed einsum | of | state MB | temporaries GB | set aside GB | matmul TFLOP | HBM GB "
    "| attention forward kernels | compile s | CPU s |",
    "|---|---|---|" + "---:|" * 8,
]


def row(name: str, windowed: str, of: str, runs: list[dict]) -> str:
    one = runs[0]
    times = lambda field: f"{statistics.median(run[field] for run in runs):.0f}"
    cells = [name, windowed, of, f"{one['state'] / 1e6:.1f}", f"{one['summarised'] / 1e9:.3f}",
             f"{one['temporaries'] / 1e9:.3f}", f"{one['matmul_flops'] / 1e12:.2f}", f"{one['hbm_bytes'] / 1e9:.1f}",
             str(one["forward_kernels"]), times("seconds"), times("cpu_seconds")]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def table(found: dict[tuple[str, str, str], list[dict]]) -> list[str]:
    rows = []
    for theirs, windowed, mine in CASES:
        if theirs != "-":
            rows.append(row(theirs, windowed, "MaxText", found["theirs", theirs, windowed]))
        rows.append(row(mine, windowed, "gva_jax", found["ours", mine, windowed]))
    return HEAD + rows


def introduction(rounds: int) -> list[str]:
    versions = ", ".join(f"{name} {version(name)}" for name in ("maxtext", "jax", "libtpu", "flax"))
    return [
        "# Against MaxText 0.2.5, compiled for TPU v5e:4x4",
        "",
        "Written by `python scripts/plan_maxtext.py`, whose head says what to install. One model of 323,011,584",
        "parameters in both: 24 layers, width 1,024, 16 heads and 4 groups of 64, SwiGLU 3,072, vocabulary 32,768,",
        "tied; context 2,048, 8 sequences a chip, bfloat16 activations, float32 weights, AdamW, parameters split",
        "over 16 chips, flash attention. Figures are one chip's, of one step, read off what XLA compiled; nothing",
        f"was run. Both were compiled in turn, each in a process of its own; rounds: {rounds} ({versions}).",
        "",
        "`full` and `minimal` are MaxText's names for what the backward pass computes again. `full` here is the same,",
        "layers' inputs alone are kept; `dots`, as `minimal`, keeps the results of all matrix products; `attention`",
        "keeps layers' inputs and attention's results, so that its forward kernel runs once.",
        "",
    ]


NOTES = [
    "",
    "- State: parameters and AdamW's moments with the padding of their layouts; 242 MB without any.",
    "- Temporaries: the compiler's summary (`temp_size_in_bytes`). Set aside: what its buffer assignment allots. Some",
    "  releases of libtpu, 0.0.50.1 for one, summarise more than they set aside, for both.",
    "- Matrix products alone: attention's kernels are left out of the TFLOP. 24 layers run 24 of attention's forward",
    "  kernels, or 48 where the backward pass runs them again.",
    "- Windowed einsum off: `xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000`, the only XLA option given.",
    "- Compile and CPU seconds are the compiler's, medians, tracing left out.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/maxtext.md"))
    parser.add_argument("--rounds", type=int, default=2, help="how often each is compiled")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("maxtext") is None:
        sys.exit("MaxText is not installed here: pip install 'maxtext[tpu]==0.2.5' (Python 3.12)")
    if arguments.one:
        print("\n" + json.dumps(compile_one(*arguments.one)))
        return
    found = in_turn(arguments.rounds)
    arguments.out.write_text("\n".join([*introduction(arguments.rounds), *table(found), *NOTES]) + "\n")


if __name__ == "__main__":
    main()
