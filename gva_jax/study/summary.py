"""What the records of a study say, as plain data: rows, pairs, what is missing. A row that lacks a run has no mean."""

from collections.abc import Mapping
from typing import Any

from gva_jax.study.records import Record, Records, best_rate, confirmed, is_complete
from gva_jax.study.spec import CONFIRM, Study, member_name
from gva_jax.study.statistics import compare, mean, sample_sd

SPLITS = ("heldout", "development")


def summarise(study: Study, records: Records) -> dict[str, Any]:
    """Everything that the report tells.

    search: by variant: perplexity by learning rate (None: missing or diverged), those that diverged, the best, whether
      it lies at an edge
    rows: by variant and learning rate: perplexity by seed and split, mean and sample SD, costs
    pairs: by (baseline, variant), learning rate and split: differences by seed, see `statistics.Comparison`
    swaps: held-out perplexity with the variant's swap
    missing, diverged: names of members
    without_rate: variants that are not confirmed because the search diverged at every rate
    strangers: records in the folder that are not the study's
    """
    found = records.of(study)
    rates = records.rates(study)
    tried = [name for name in study.variants if study.seeds_of(name)]
    rates_of = lambda name: rates.get(name) or (None,)
    rows = [_row(study, name, rate, confirmed(found)) for name in tried for rate in rates_of(name)]
    lost = [name for name in tried if rates.get(name) == ()]
    by_name = {(row["variant"], row["learning_rate"]): row for row in rows}
    pairs = []
    for baseline, variant in study.pairs:
        for a, b in zip(rates_of(baseline), rates_of(variant), strict=True):
            seeds = study.paired_seeds(baseline, variant)
            pairs += [_pair(by_name[baseline, a], by_name[variant, b], seeds, split) for split in SPLITS]
    trials = [member for member in study.search_members() if member.name not in found]
    return {
        "study": study.name,
        "about": study.about,
        "complete": is_complete(study, records),
        "steps": study.base.train.steps,
        "batch": [study.base.data.batch_size, study.base.data.context_length],
        "search": _search(study, found),
        "rows": rows,
        "pairs": pairs,
        "swaps": [_swap(study, row, found) for row in rows if study.variants[row["variant"]].swap is not None],
        "missing": [
            *(member.name for member in trials),
            *(name for row in rows if row["variant"] not in lost for name in row["missing"]),
        ],
        "diverged": [name for name, record in found.items() if record.diverged_at is not None],
        "without_rate": lost,
        "strangers": records.strangers(study),
        "corpus": next((record.corpus for record in found.values()), None),
        **{name: _distinct(found, name) for name in ("versions", "revision", "device", "finished", "together")},
    }


def _search(study: Study, found: Mapping[str, Record]) -> dict[str, Any]:
    """Empty where learning rates are fixed."""
    result: dict[str, Any] = {}
    for member in study.search_members():
        nothing = {"steps": member.steps, "seed": member.seed, "perplexity": {}, "diverged": []}
        part, record = result.setdefault(member.variant, nothing), found.get(member.name)
        known = record is not None and record.development is not None
        part["perplexity"][member.learning_rate] = record.development.perplexity if known else None
        if record is not None and not known:
            part["diverged"].append(member.learning_rate)
    for name, part in result.items():
        trials = [found.get(member.name) for member in study.search_members() if member.variant == name]
        best = None if None in trials else best_rate(trials)
        edge = best in (min(part["perplexity"]), max(part["perplexity"])) and len(trials) > 1
        part |= {"best": best, "at_edge": best is not None and edge}
    return result


def _row(study: Study, variant: str, rate: float | None, rows: Mapping) -> dict[str, Any]:
    """`rate` is None while the search for it has not finished."""
    seeds, there = study.seeds_of(variant), rows.get((variant, rate), {})
    values: dict[str, Any] = {
        split: {seed: getattr(there[seed], split).perplexity for seed in seeds
                if seed in there and getattr(there[seed], split) is not None}
        for split in SPLITS
    }  # fmt: skip
    name = lambda seed: f"{CONFIRM}-{variant}-seed{seed}" if rate is None else member_name(CONFIRM, variant, rate, seed)
    records = list(there.values())
    return {
        "variant": variant,
        "learning_rate": rate,
        "seeds": list(seeds),
        "missing": [name(seed) for seed in seeds if seed not in there],
        "perplexity": values,
        **{split: _moments(values[split], seeds) for split in SPLITS},
        "bits_per_byte": _moments({s: r.heldout.bits_per_byte for s, r in there.items() if r.heldout}, seeds),
        "parameters": records[0].parameters if records else None,
        "tokens": records[0].tokens if records else None,
        "seconds": mean([record.seconds / record.together for record in records]) if set(there) == set(seeds) else None,
    }


def _moments(values: Mapping[int, float], seeds) -> dict[str, float | None] | None:
    """None where a seed is missing: a mean over the others would be one of another study."""
    if set(values) != set(seeds):
        return None
    return {"mean": mean(list(values.values())), "sd": sample_sd(list(values.values()))}


def _pair(baseline: dict, variant: dict, seeds, split: str) -> dict[str, Any]:
    """Compared where every one of its seeds has both halves."""
    halves = [{s: row["perplexity"][split][s] for s in seeds if s in row["perplexity"][split]}
              for row in (baseline, variant)]  # fmt: skip
    told = {
        "baseline": baseline["variant"],
        "variant": variant["variant"],
        "learning_rates": [baseline["learning_rate"], variant["learning_rate"]],
        "split": split,
        "seeds": list(seeds),
        "differences": {s: halves[1][s] - halves[0][s] for s in seeds if s in halves[0] and s in halves[1]},
        "comparison": None,
    }
    if len(told["differences"]) == len(seeds):
        found = compare(*halves)
        told["comparison"] = {name: getattr(found, name) for name in ("mean", "sd", "change", "improved", "p")}
        told["comparison"]["baseline"], told["comparison"]["variant"] = (_moments(half, seeds) for half in halves)
    return told


def _swap(study: Study, row: dict, found: Mapping[str, Record]) -> dict[str, Any]:
    variant, there = row["variant"], {}
    for record in found.values():
        same = (record.phase, record.variant, record.learning_rate) == (CONFIRM, variant, row["learning_rate"])
        if same and record.swapped is not None:
            there[record.seed] = record.swapped.perplexity
    return {
        "variant": variant,
        "swap": dict(study.variants[variant].swap),
        "perplexity": there,
        "as_trained": row["heldout"],
        "swapped": _moments(there, row["seeds"]),
    }


def _distinct(found: Mapping[str, Record], name: str) -> list:
    values: list = []
    for record in found.values():
        if getattr(record, name) not in values:
            values.append(getattr(record, name))
    return values
