"""`gva study`: run, stop, go on, report; or say what a study would cost."""

import json
import os
import shlex
import sys
from pathlib import Path

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
        _print(options, figures, display, lambda: cost_table(study, figures))
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


def _print(options: StudyOptions, figures, display: Display, table) -> None:
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        display.show(table())


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
    """By phase and variant: members, updates, parameters, tokens, training FLOPs (see `gva_jax.info`)."""
    from gva_jax import info

    trials = study.search_members()
    found = []
    for name in study.variants:
        config = study.config(name)
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


def cost_table(study: Study, figures: list[dict]) -> Group:
    """With the hours that chips would take at `UTILISATION` of their peak, whole study, one chip."""
    members = Table(title=f"study {study.name}", title_justify="left")
    for column in ("phase", "variant", "members", "updates", "parameters", "tokens", "FLOPs"):
        members.add_column(column, justify="left" if column in ("phase", "variant") else "right")
    for row in figures:
        counts = (f"{row[name]:,}" for name in ("members", "updates", "parameters", "tokens"))
        members.add_row(row["phase"], row["variant"], *counts, f"{row['flops']:.3g}")
    total = {name: sum(row[name] for row in figures) for name in ("members", "updates", "tokens", "flops")}
    members.add_section()
    counts = f"{total['members']:,}", f"{total['updates']:,}", "", f"{total['tokens']:,}", f"{total['flops']:.3g}"
    members.add_row("all", "", *counts)
    hours = Table(title=f"hours of one chip at {UTILISATION:.0%} of its bfloat16 peak", title_justify="left")
    hours.add_column("chip")
    hours.add_column("hours", justify="right")
    for chip in CHIPS:
        hours.add_row(chip.name, f"{total['flops'] / (chip.flops * UTILISATION) / 3600:,.2f}")
    return Group(members, hours)
