"""The training step of MaxText 0.2.5's 323,011,584-parameter GQA decoder, here, against that one's compiled figures:

    python scripts/plan_maxtext.py [--fresh] [--out docs/results/maxtext.md]

Five compilations, a minute or more of two cores each. --fresh compiles anew, which is what compile times need.
"""

import argparse
import sys
from pathlib import Path

from gva_jax import plan as package

package.environment()  # before JAX is imported

from gva_jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, RunConfig  # noqa: E402
from gva_jax.plan import program, report, topologies  # noqa: E402

TOPOLOGY = "v5e:4x4"
# XLA replaces a gathered product by a loop of partial products where this many MiB are gathered: above all, never.
UNWINDOWED = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# MaxText 0.2.5 under the same compiler, as found for this project: rematerialisation, windowed einsum -> GB, TFLOP.
THEIRS = {
    ("full", True): (3.165, 38.76),
    ("full", False): (2.112, 38.76),
    ("minimal", True): (11.218, 31.75),
}
THEIR_STATE = 290.3e6
OURS = {"full": ("full", "attention"), "minimal": ("dots",)}  # their names to ours


def config(remat: str) -> RunConfig:
    attention = AttentionConfig("gqa", num_heads=16, num_kv_heads=4, head_dim=64)
    model = ModelConfig(vocab_size=32_768, num_layers=24, model_dim=1024, hidden_dim=3072, attention=attention,
                        dtype="bfloat16", remat=remat)  # fmt: skip
    return RunConfig(name=f"323M, {remat}", model=model, data=DataConfig(context_length=2048, batch_size=128),
                     mesh=MeshConfig(data=1, fsdp=16))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/maxtext.md"))
    parser.add_argument("--fresh", action="store_true", help="compile anew rather than take what was kept")
    arguments, rows = parser.parse_args(), []
    topology = topologies.parse(TOPOLOGY)
    devices = topology.devices()
    for (theirs, windowed), (temporaries, flops) in THEIRS.items():
        for ours in OURS[theirs]:
            run = config(ours)
            options = None if windowed else UNWINDOWED
            compiled, mesh = program.compile_step(run, topology, devices, options, keep=not arguments.fresh)
            one = report.plan(run, topology, mesh, compiled)
            print(f"{one.config}: {compiled.seconds:.0f} s", file=sys.stderr, flush=True)
            assert one.parameters == 323_011_584
            state = one.memory["parameters"] + one.memory["optimizer"]
            rows.append("| " + " | ".join([
                theirs, ours, "on" if windowed else "off",
                f"{state / 1e6:.1f}", f"{THEIR_STATE / 1e6:.1f}",
                f"{compiled.memory['temporaries as summarised'] / 1e9:.3f}", f"{temporaries:.3f}",
                f"{one.memory['temporaries'] / 1e9:.3f}",
                f"{one.flops['matmul'] / 1e12:.2f}", f"{flops:.2f}",
                f"{one.kernel_calls.get('splash_mha_fwd', 0)}", f"{compiled.seconds:.0f}",
            ]) + " |")  # fmt: skip
            arguments.out.write_text(
                "\n".join([*INTRODUCTION, HEAD, "|---|---|---|" + "---:|" * 9, *rows, *NOTES]) + "\n"
            )


HEAD = (
    "| rematerialisation | ours | windowed einsum | state MB | theirs | temporaries GB | theirs | of ours set aside "
    "| matmul TFLOP | theirs | attention forward kernels run | compile s |"
)
INTRODUCTION = [
    "# Against MaxText 0.2.5, compiled for TPU v5e:4x4",
    "",
    "Written by `python scripts/plan_maxtext.py`. One model of 323,011,584 parameters in both: 24 layers, width 1,024,",
    "16 heads and 4 groups of 64, SwiGLU 3,072, vocabulary 32,768, tied; context 2,048, 8 sequences a chip, bfloat16",
    "activations, float32 weights, AdamW, parameters split over 16 chips, flash attention. Figures are one chip's, of",
    "one step, read off what XLA compiled; nothing was run. MaxText's were found in the same way, under the same",
    "compiler, and are quoted; its compilations took 28 to 34 s. `full` and `minimal` are its names for what the",
    "backward pass computes again. Here `full` is the same, layers' inputs alone are kept; `attention` keeps",
    "attention's results as well, so that its forward kernel runs once; `dots` keeps all matrix products' results.",
    "",
]
NOTES = [
    "",
    "- State: parameters and AdamW's moments with the padding of their layouts; 242 MB without any.",
    "- Temporaries are the compiler's own summary (`temp_size_in_bytes`), as theirs; what its buffer assignment sets",
    "  aside is less.",
    "- Matrix products alone, as on MaxText's side: attention kernels are left out of the TFLOP. The 24 layers run 24",
    "  of attention's forward kernels, or 48 where the backward pass runs them again.",
    "- Windowed einsum off: `xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000`, the only XLA option given.",
    "- Compile seconds are the compiler's, with `--fresh` and nothing else on the machine's two cores.",
    "- Not met at equal rematerialisation: temporaries of `full` with windowed einsum off, and compile time. While the",
    "  MLP's backward pass runs, what attention computed again lies ready: queries in 64 of 128 lanes, and the splash",
    "  kernel's log-sum-exp, which it writes 128 times side by side (134 MB). A barrier that takes one of them at once",
    "  was tried and made it worse.",
]


if __name__ == "__main__":
    main()
