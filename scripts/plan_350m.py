"""`gva plan` over the 350M family, as the Markdown table docs/results/plan_350m.md:

    python scripts/plan_350m.py [--out docs/results/plan_350m.md]

Compiles thirty-odd training steps, a minute or more of two cores each. What was compiled before is kept (GVA_JAX_CACHE
says where), so that a run that was interrupted goes on. The file is written anew after every step.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from gva_jax import plan as package

package.environment()  # before JAX is imported

from gva_jax.config import MeshConfig, load  # noqa: E402
from gva_jax.plan import program, report, topologies  # noqa: E402

CONFIGS = ("gqa_350m", "gva_350m", "mla_350m", "gva_350m_r24", "gva_350m_baseline", "gva_350m_scale_matched")
TOPOLOGIES = ("v5e:4x4", "h100:1x8", "v5p:4x4x4", "v5e:16x16", "h100:8x8")
BOTH_FORMS = ("gva_350m", "gva_350m_r24")  # materialised against absorbed


def runs():
    """(config, topology): what tells most first."""
    for topology in TOPOLOGIES:
        for name in CONFIGS:
            config = load(name)
            yield config, topology
            if name in BOTH_FORMS:
                other = "materialised" if config.model.attention.form == "absorbed" else "absorbed"
                model = replace(config.model, attention=replace(config.model.attention, form=other))
                yield replace(config, name=f"{name}, {other}", model=model), topology


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/plan_350m.md"))
    out, plans, devices = parser.parse_args().out, [], {}
    todo = list(runs())
    for at, (config, name) in enumerate(todo, 1):
        topology = topologies.parse(name)
        if name not in devices:
            devices[name] = topology.devices()
        config = program.fitted(config, MeshConfig(data=1, fsdp=topology.size), topology.size)
        compiled, mesh = program.compile_step(config, topology, devices[name])
        plans.append((report.plan(config, topology, mesh, compiled), config, topology))
        print(f"{at}/{len(todo)} {config.name} {name} {compiled.seconds:.0f} s", file=sys.stderr, flush=True)
        out.write_text(page(plans, len(todo)))


def page(plans, total: int) -> str:
    """All of it as Markdown."""
    lines = ["# The 350M family on pods that are not here", "", *INTRODUCTION, ""]
    if len(plans) < total:
        lines += [f"Unfinished: {len(plans)} of {total} rows.", ""]
    lines += ["| " + " | ".join(report.COLUMNS) + " |", "|" + "---|" * 3 + "---:|" * (len(report.COLUMNS) - 3)]
    for one, _, topology in plans:
        lines += report.markdown([one], topology.chip.memory)
    lines += ["", "## GVA against GQA", "", *against_gqa(plans)]
    lines += ["", "## Absorbed against materialised", "", *forms(plans)]
    about = {line: None for one, config, _ in plans for line in report.notes(config, [one])}
    lines += ["", "## Training attention", ""]
    lines += [f"- {line.strip()}" for line in about if line.startswith(("training attention", "  "))]
    return "\n".join(lines) + "\n"


INTRODUCTION = [
    "Written by `python scripts/plan_350m.py`: the real training step (batch 256, context 2,048, bfloat16 activations,",
    "float32 weights and AdamW, rematerialisation `dots`), parameters split over all devices, compiled by XLA's own",
    "compilers for the devices named, none of which was here. Nothing is measured. Every figure is one device's:",
    "memory and HBM traffic in GB (1e9 bytes), bytes received over a mesh axis in GB, of a whole step with all its",
    "micro-batches. Times are lower bounds and the MFU is the most that they allow; `docs/plan.md` says how each is",
    "made. On GPUs no attention kernel compiles without a GPU, so plain XLA stands in for it, which moves scores",
    "through HBM: there temporaries, HBM and the MFU say little of an H100 with cuDNN or tokamax.",
]


FORMS = [
    "Absorbed, GVA moves fewer bytes everywhere, materialised it multiplies less. The bound is the longer of the two",
    "times: by it the materialised form is 3 to 4 % better where FLOPs decide, on the v5e:4x4, and the absorbed form",
    "where memory traffic does, everywhere else: it is the configs' default. FLOPs are counted as they are; a matrix",
    "unit 128 wide makes as many passes for keys of 64 as for 80 or 88. Neither form has been timed.",
]


def against_gqa(plans) -> list[str]:
    """State, FLOPs and temporaries of every pair on one topology, and where a step's FLOPs are equal."""
    lines = ["| config | topology | state / GQA | FLOPs / GQA | temporaries / GQA |", "|---|---|---:|---:|---:|"]
    base = {one.topology: one for one, *_ in plans if one.config == "gqa_350m" and not one.refused}
    state = lambda one: one.memory["parameters"] + one.memory["optimizer"]
    for one, *_ in plans:
        gqa = base.get(one.topology)
        if one.refused or gqa is None or one is gqa or not one.config.startswith("gva"):
            continue
        ratios = (state(one) / state(gqa), one.flops["total"] / gqa.flops["total"],
                  one.memory["temporaries"] / gqa.memory["temporaries"])  # fmt: skip
        lines.append(f"| {one.config} | {one.topology} | " + " | ".join(f"{ratio:.4f}" for ratio in ratios) + " |")
    found = sorted(
        {
            line
            for _, config, _ in plans
            if "," not in config.name
            for line in (f"{config.name}: {note}" for note in report.notes(config, [plans[0][0]]) if "absorbed" in note)
        }
    )
    found += [f"{one.config} on {one.topology}: {told}" for one, *_ in plans for told in one.whole]
    return [*lines, "", *(f"- {line}" for line in found)]


def forms(plans) -> list[str]:
    """Each config's own form and the other one, side by side."""
    by_name = {(one.config, one.topology): (one, config) for one, config, _ in plans}
    lines = ["| config | topology | form | TFLOP | HBM GB | temporaries GB | bound ms |", "|---|---|---|" + "---:|" * 4]
    for (name, topology), (one, config) in by_name.items():
        base = name.partition(",")[0]
        if base not in BOTH_FORMS or one.refused:
            continue
        figures = (one.flops["total"] / 1e12, one.hbm_bytes / 1e9, one.memory["temporaries"] / 1e9, one.bound * 1e3)
        lines.append(f"| {base} | {topology} | {config.model.attention.form} | "
                     + " | ".join(f"{x:.2f}" for x in figures) + " |")  # fmt: skip
    return [*lines, "", *FORMS]


if __name__ == "__main__":
    main()
