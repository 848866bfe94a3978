"""A study's report: Markdown, CSV, figures.

DIR/report.md    the tables                      DIR/runs.csv      one line a member
DIR/curves.csv   development loss on the way     DIR/*.png         with `gva-jax[plot]`
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gva_jax.config import ConfigError
from gva_jax.study.records import Records
from gva_jax.study.spec import Study
from gva_jax.study.summary import summarise
from gva_jax.train.evaluation import perplexity

_SPLIT_NAMES = {"heldout": "held-out", "development": "development"}


def write(study: Study, folder: Path, command: str) -> dict[str, Any]:
    """Write the report of what there is into `folder`, made by `command`; returns the summary.

    Raises:
      ConfigError: no member has finished, or a record is not the study's.
    """
    records = Records(folder)
    found = records.of(study)
    if not found:
        raise ConfigError(f"{str(folder)!r}: no member of study {study.name} has finished, there is nothing to report")
    summary = summarise(study, records)
    _write_runs(folder / "runs.csv", found.values())
    _write_curves(folder / "curves.csv", found.values())
    try:
        from gva_jax.study import figures

        drawn, told = figures.draw(study, found, summary, folder), ""
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        drawn, told = [], "No figures: matplotlib is not installed; it comes with: pip install 'gva-jax[plot]'"
    summary["figures"] = [path.name for path in drawn]
    (folder / "report.md").write_text(markdown(summary, command, told))
    return summary


# ---- raw numbers -----------------------------------------------------------------------------------------------------


def _write_runs(path: Path, records) -> None:
    columns = ("phase", "variant", "learning_rate", "seed", "parameters", "tokens", "seconds", "together",
               "diverged_at", "device", "revision", "finished")  # fmt: skip
    parts = ("development", "heldout", "swapped")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *(f"{part}_{name}" for part in parts for name in ("loss", "perplexity"))])
        for record in records:
            measured = [getattr(record, part) for part in parts]
            figures = [x for m in measured for x in (("", "") if m is None else (m.loss, m.perplexity))]
            writer.writerow([*(getattr(record, name) for name in columns), *figures])


def _write_curves(path: Path, records) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["phase", "variant", "learning_rate", "seed", "step", "loss", "perplexity"])
        for record in records:
            about = (record.phase, record.variant, record.learning_rate, record.seed)
            writer.writerows([*about, step, loss, perplexity(loss)] for step, loss in record.curve)


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(summary: dict[str, Any], command: str, note: str = "") -> str:
    """The report of `summarise`'s result."""
    B, T = summary["batch"]
    parts = [f"# Study {summary['study']}", summary["about"].strip()]
    if not summary["complete"]:
        absent = "\n".join(f"- {name}" for name in summary["missing"])
        told = "This study is not complete. Rows that lack a run have no mean, and pairs of theirs no comparison."
        parts.append(f"**{told}** Missing:\n\n{absent}")
    if summary["diverged"]:
        absent = "\n".join(f"- {name}" for name in summary["diverged"])
        parts.append(f"Diverged (losses or gradients that are no numbers); their rows have no mean:\n\n{absent}")
    if summary["without_rate"]:
        names = ", ".join(summary["without_rate"])
        parts.append(f"Diverged at every learning rate of the search, and so not confirmed: {names}.")
    told = f"Every confirmation: {summary['steps']:,} updates of {B} x {T} tokens, {summary['steps'] * B * T:,} in all."
    if corpus := summary["corpus"]:
        sizes = ", ".join(f"{_SPLIT_NAMES.get(name, name)} {corpus[name]['tokens']:,} tokens in "
                          f"{corpus[name]['documents']:,} documents" for name in corpus if name != "hash")  # fmt: skip
        told += f" Text (hash {corpus['hash'][:12]}): {sizes}."
    parts.append(told)
    parts += [_search_table(summary), _row_table(summary), *_pair_tables(summary), _swap_table(summary)]
    parts += [_cost_table(summary), _figures(summary, note), _made_by(summary, command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _moments(moments: dict | None, digits: int = 3) -> str:
    if moments is None:
        return "incomplete"
    deviation = "" if moments["sd"] is None else f" ± {moments['sd']:.{digits}f}"
    return f"{moments['mean']:.{digits}f}{deviation}"


def _rate(rate: float | None) -> str:
    return "?" if rate is None else f"{rate:g}"


def _search_table(summary: dict) -> str:
    search = summary["search"]
    if not search:
        return ""
    rates = sorted({rate for part in search.values() for rate in part["perplexity"]})
    rows = []
    for name, part in search.items():
        cell = lambda rate, part=part: _trial(part, rate)
        rows.append([name, *map(cell, rates)])
    first = next(iter(search.values()))
    told = f"Development perplexity after {first['steps']:,} updates, seed {first['seed']}; the best in bold."
    edges = [name for name, part in search.items() if part["at_edge"]]
    if edges:
        told += f" The best lies at the edge of what was tried for {', '.join(edges)}."
    return f"## Learning rates\n\n{told}\n\n{_table(['variant', *(f'{rate:g}' for rate in rates)], rows)}"


def _trial(part: dict, rate: float) -> str:
    value = part["perplexity"].get(rate)
    if value is None:
        return "diverged" if rate in part["diverged"] else "missing"
    return f"**{value:.3f}**" if rate == part["best"] else f"{value:.3f}"


def _row_table(summary: dict) -> str:
    rows = []
    for row in summary["rows"]:
        runs = len(row["seeds"]) - len(row["missing"])
        count = f"{runs}" if not row["missing"] else f"{runs} of {len(row['seeds'])}"
        splits = [_moments(row[split]) for split in ("heldout", "development")]
        rows.append([row["variant"], _rate(row["learning_rate"]), count, *splits, _moments(row["bits_per_byte"], 4)])
    head = ["variant", "learning rate", "seeds", "held-out", "development", "held-out bits per byte"]
    told = "Perplexity at the end, mean ± sample SD over seeds (n - 1)."
    return f"## Perplexity\n\n{told}\n\n{_table(head, rows)}"


def _pair_tables(summary: dict) -> list[str]:
    tables = []
    for split, name in _SPLIT_NAMES.items():
        rows = [_pair_row(pair) for pair in summary["pairs"] if pair["split"] == split]
        if rows:
            head = [
                "baseline",
                "variant",
                "baseline's",
                "variant's",
                "difference",
                "change",
                "improved",
                "p",
                "by seed",
            ]
            tables.append(f"## Pairs, {name} perplexity\n\n{_PAIRS}\n\n{_table(head, rows)}")
    return tables


_PAIRS = """Variant minus baseline, from the same weights (where shapes agree) and the same batches; below 0 is better.
p is that of the exact two-sided sign-flip test; with n pairs it cannot be below 2^(1 - n)."""


def _pair_row(pair: dict) -> list[str]:
    names = [f"{pair[name]} ({_rate(rate)})"
             for name, rate in zip(("baseline", "variant"), pair["learning_rates"], strict=True)]  # fmt: skip
    seeds = ", ".join(f"{seed}: {d:+.3f}" for seed, d in pair["differences"].items())
    found = pair["comparison"]
    if found is None:
        done = f"{len(pair['differences'])} of {len(pair['seeds'])}"
        return [*names, *["incomplete"] * 3, "", f"{done} pairs", "", seeds]
    moments = [_moments(found[name]) for name in ("baseline", "variant")]
    return [*names, *moments, _moments(found), f"{found['change']:+.2%}", f"{found['improved']}/{len(pair['seeds'])}",
            f"{found['p']:.4g}", seeds]  # fmt: skip


def _swap_table(summary: dict) -> str:
    if not summary["swaps"]:
        return ""
    rows = []
    for swap in summary["swaps"]:
        changes = ", ".join(f"{name} = {value}" for name, value in swap["swap"].items())
        rows.append([swap["variant"], changes, _moments(swap["as_trained"]), _moments(swap["swapped"])])
    head = ["trained as", "evaluated with", "held-out, as trained", "held-out, swapped"]
    return f"## Swapped at inference\n\n{_table(head, rows)}"


def _cost_table(summary: dict) -> str:
    text = lambda value: "" if value is None else f"{value:,}"
    minutes = lambda row: "" if row["seconds"] is None else f"{row['seconds'] / 60:,.1f} min"
    about = lambda row: [row["variant"], _rate(row["learning_rate"]), text(row["parameters"]), text(row["tokens"])]
    rows = [[*about(row), minutes(row)] for row in summary["rows"]]
    told = "Wall time of a member, measuring on the way included; others may have used the machine."
    head = ["variant", "learning rate", "parameters", "tokens", "wall time"]
    return f"## Costs\n\n{told}\n\n{_table(head, rows)}"


def _figures(summary: dict, note: str) -> str:
    return "\n\n".join([note, *(f"![{Path(name).stem}]({name})" for name in summary["figures"])]).strip()


def _made_by(summary: dict, command: str) -> str:
    versions = "; ".join(", ".join(f"{k} {v}" for k, v in told.items()) for told in summary["versions"])
    dates = sorted(summary["finished"])
    lines = [
        f"    {command}",
        "",
        f"Devices: {'; '.join(summary['device'])}; revision {', '.join(summary['revision'])};",
    ]
    lines += [f"finished {dates[0]} to {dates[-1]}; {versions}."]
    if max(summary["together"]) > 1:
        lines.append(f"Members in one program: {', '.join(map(str, summary['together']))}.")
    if summary["strangers"]:
        lines.append(f"Records in the folder that are not of this study: {', '.join(summary['strangers'])}.")
    lines.append("The numbers themselves: runs.csv, curves.csv, and a JSON file a member.")
    return "## Made by\n\n" + "\n".join(lines)


def finite(summary: Any) -> Any:
    """`summary` as JSON can hold it: numbers that are none become None, keys text."""
    if isinstance(summary, dict):
        return {str(key): finite(value) for key, value in summary.items()}
    if isinstance(summary, list | tuple):
        return [finite(value) for value in summary]
    return None if isinstance(summary, float) and not math.isfinite(summary) else summary
