"""`gva study`: run, stop, go on, report; or say what a study would cost."""

import json
import os
import shlex
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table

from gva_jax.chips import CHIPS
from gva_jax.display import Display
from gva_jax.options import StudyOptions
from gva_jax.study import spec
from gva_jax.study.spec import Study

# Share of a chip's peak that training of models of these sizes reaches, for an estimate of hours.
UTILISATION = 0.3


def main(options: StudyOptions) -> int:
    """The process's exit code: 128 + a signal that stopped it, as `gva train`."""
    study = spec.load(options.study)
    if options.data is not None:
        study = spec.with_source(study, options.data)
    folder = Path(options.out or Path("studies") / study.name)
    # Figures as JSON are alone on standard output; lines of a long run come at longer intervals than a short one's.
    console = Console(file=sys.stderr if options.json else sys.stdout, highlight=False, soft_wrap=True)
    display = Display(every=20.0, console=console)
    if options.plan:
        figures = costs(study)
        if options.json:
            print(json.dumps({"members": figures, "hours": hours(figures)}, indent=2))
        else:
            display.show(cost_table(study, figures))
        return 0
    from gva_jax.study import report

    stopped_by, command = None, command_line(options)
    if not options.report:
        from gva_jax import runtime
        from gva_jax.study import run

        runtime.start(display)
        limits = {"limit_seconds": options.limit_seconds, "limit_members": options.members}
        outcome = run.run(study, folder, display, together=options.together, **limits)
        stopped_by = outcome.stopped_by
        if not outcome.complete:
            display.say(f"not complete; to go on: {command}")
        if not any((folder / "members").glob("*.json")):
            return 0 if stopped_by is None else 128 + stopped_by
    summary = report.write(study, folder, command)
    display.say(f"report: {folder / 'report.md'}")
    if options.json:
        print(json.dumps(report.finite(summary), indent=2))
    return 0 if stopped_by is None else 128 + stopped_by


def command_line(options: StudyOptions) -> str:
    """The command that gives the same study, without its limits and without the folders of one machine."""
    local = lambda path: Path(path).name if os.path.isabs(path) else path
    words = ["gva", "study", local(options.study)]
    if options.data is not None:
        kind, _, where = options.data.partition(":")
        words += ["--data", f"{kind}:{local(where)}"]
    if options.out is not None:
        words += ["--out", local(options.out)]
    if options.together is not None:  # a checkpoint is of the members that train together
        words += ["--together", str(options.together)]
    return shlex.join(words)


def costs(study: Study) -> list[dict]:
    """By phase and variant: members, updates, parameters, tokens, training FLOPs (see `gva_jax.info`).

    Raises:
      ConfigError: a model that cannot be, or a swap that a run would refuse.
    """
    from gva_jax import info
    from gva_jax.study import programs

    programs.check_swaps(study)
    trials = study.search_members()
    found = []
    for name in study.variants:
        config = study.config(name)
        with spec.naming(name):
            figures = info.describe(config)
        phases = {
            spec.SEARCH: [member.steps for member in trials if member.variant == name],
            spec.CONFIRM: [config.train.steps] * len(study.seeds_of(name)) * max(len(study.learning_rates), 1),
        }
        for phase, updates in phases.items():
            tokens = sum(updates) * config.data.batch_size * config.data.context_length
            if updates:
                found.append({
                    "phase": phase,
                    "variant": name,
                    "members": len(updates),
                    "updates": sum(updates),
                    "parameters": figures["parameters"],
                    "tokens": tokens,
                    "flops": tokens * figures["flops_per_token"]["training"],
                })  # fmt: skip
    return found


def hours(figures: list[dict]) -> dict[str, float]:
    """By chip: what the whole study would take one of them at `UTILISATION` of its bfloat16 peak."""
    flops = sum(row["flops"] for row in figures)
    return {chip.name: flops / (chip.flops * UTILISATION) / 3600 for chip in CHIPS}


def cost_table(study: Study, figures: list[dict]) -> Group:
    """`costs` and `hours`."""
    members = Table(title=f"study {study.name}", title_justify="left", box=SIMPLE_HEAD, padding=0)
    members.add_column("phase", no_wrap=True)
    members.add_column("variant", overflow="fold")
    for column in ("members", "updates", "parameters", "tokens", "FLOPs"):
        members.add_column(column, justify="right", no_wrap=True)
    for row in figures:
        counts = (f"{row[name]:,}" for name in ("members", "updates", "parameters"))
        members.add_row(row["phase"], row["variant"], *counts, f"{row['tokens']:.3g}", f"{row['flops']:.3g}")
    total = {name: sum(row[name] for row in figures) for name in ("members", "updates", "tokens", "flops")}
    members.add_section()
    counts = f"{total['members']:,}", f"{total['updates']:,}", "", f"{total['tokens']:.3g}", f"{total['flops']:.3g}"
    members.add_row("all", "", *counts)
    chips = Table(
        title=f"hours of one chip at {UTILISATION:.0%} of its bfloat16 peak", title_justify="left", box=SIMPLE_HEAD
    )
    chips.add_column("chip")
    chips.add_column("hours", justify="right")
    for chip, time in hours(figures).items():
        chips.add_row(chip, f"{time:,.1f}" if time >= 10 else f"{time:.2g}")
    small = "Small models and batches reach less than that share: `gva plan` says what a step takes at least."
    return Group(members, chips, small)
