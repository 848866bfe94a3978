"""Two figures of a study's pairs: development perplexity relative to the baseline's, over training and at its end."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from gva_jax.study.records import Record, confirmed
from gva_jax.study.spec import Study
from gva_jax.study.statistics import mean
from gva_jax.train.evaluation import perplexity


def relative(baseline: Record, variant: Record) -> dict[int, float]:
    """By step: the variant's development perplexity over the baseline's, minus 1, in percent."""
    a, b = dict(baseline.curve), dict(variant.curve)
    return {step: 100 * (perplexity(b[step]) / perplexity(a[step]) - 1) for step in a if step in b}


def curves(study: Study, found: Mapping[str, Record], summary: dict) -> dict[str, list[dict[int, float]]]:
    """By label: the relative curve of each finished pair; where all seeds are there, the mean goes with them, last."""
    rows, result = confirmed(dict(found)), {}
    for pair in summary["pairs"]:
        if pair["split"] != "development":
            continue
        a, b = ((pair[name], rate) for name, rate in zip(("baseline", "variant"), pair["learning_rates"], strict=True))
        seeds = list(pair["differences"])
        lines = [relative(rows[a][seed], rows[b][seed]) for seed in seeds]
        if not lines:
            continue
        label = f"{pair['variant']} / {pair['baseline']}"
        if len(study.learning_rates) > 1:
            label += f", {pair['learning_rates'][1]:g}"
        if len(seeds) == len(pair["seeds"]):
            steps = [step for step in lines[0] if all(step in line for line in lines)]
            lines.append({step: mean([line[step] for line in lines]) for step in steps})
        else:
            label += f" ({len(seeds)} of {len(pair['seeds'])} pairs, no mean)"
            lines.append({})
        result[label] = lines
    return result


def draw(study: Study, found: Mapping[str, Record], summary: dict, folder: Path) -> list[Path]:
    """Write the figures; none where no pair has finished."""
    lines = curves(study, found, summary)
    if not lines:
        return []
    last = study.base.train.steps
    return [
        _figure(lines, 0, "Development perplexity against the baseline's", folder / "training.png"),
        _figure(lines, 0.75 * last, "The last quarter of training", folder / "last_quarter.png"),
    ]


def style(i: int) -> dict[str, str]:
    """Colour and dashes of pair i: ten colours, again with other dashes."""
    colours, dashes = matplotlib.color_sequences["tab10"], ("-", "--", ":", "-.")
    return {"color": colours[i % 10], "linestyle": dashes[i // 10 % 4]}


def _figure(lines: Mapping[str, list[dict[int, float]]], start: float, title: str, path: Path) -> Path:
    rows = (len(lines) + 1) // 2
    figure = Figure(figsize=(7, 4.2 + 0.2 * rows), layout="constrained")
    axes = figure.subplots()
    for i, (label, (*pairs, average)) in enumerate(lines.items()):
        for line in pairs:
            steps = [step for step in line if step >= start]
            axes.plot(steps, [line[step] for step in steps], **style(i), linewidth=0.7, alpha=0.6)
        steps = [step for step in average if step >= start]
        axes.plot(steps, [average[step] for step in steps], **style(i), linewidth=2.4, label=label)
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set(title=title, xlabel="updates", ylabel="change in perplexity, %")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path
