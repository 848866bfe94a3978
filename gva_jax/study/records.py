"""What is known of finished members: one small JSON file each, DIR/members/NAME.json. They alone continue a study."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gva_jax import config as configs
from gva_jax.config import ConfigError, RunConfig
from gva_jax.study.spec import CONFIRM, Member, Study, every
from gva_jax.train.evaluation import Evaluation

FORMAT = 1

# Not part of what a member is: where things lie, what computes, what is looked at. The text is known by its hash.
_FREE = ("name", "runs", "sample.", "mesh.", "model.attention.training_implementation", "data.source", "data.directory",
         "data.text_field", "data.tokenizer", "data.max_bytes", "data.holdout", "train.log_every", "train.eval_",
         "train.checkpoint_every", "train.keep", "train.stall_seconds")  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A finished member.

    Attributes:
      curve: (step, loss on the first `train.eval_batches` batches of the development split), the last step included.
      development, heldout: over the whole split at the end; held-out of confirmations only.
      swapped: held-out, with the variant's `swap`.
      tokens: that it was trained on.
      diverged_at: the step at which too many in a row had been skipped (not finite), where training ended, or the last
        one, if its perplexity is not finite then; nothing was measured.
      seconds: of training and of measuring on the way, all `together` members of its program.
    """

    phase: str
    variant: str
    learning_rate: float
    seed: int
    config: dict[str, Any]
    corpus: dict[str, Any]
    parameters: int
    tokens: int
    curve: list[tuple[int, float]]
    development: Evaluation | None
    heldout: Evaluation | None
    swapped: Evaluation | None
    diverged_at: int | None
    seconds: float
    together: int
    device: str
    versions: dict[str, str]
    revision: str
    finished: str


def kept(config: RunConfig) -> dict:
    """The config without what does not belong in a record: names and folders of one machine."""
    values = configs.to_dict(config)
    for name in ("name", "runs", "sample", "mesh"):
        del values[name]
    for name in ("source", "directory", "tokenizer"):
        del values["data"][name]
    return values


class Records:
    """The records of one folder.

    Raises:
      ConfigError: a file that is none of ours, or a member of this study's name that is not the study's any more.
    """

    def __init__(self, folder: Path):
        self.folder = folder / "members"
        self._found: dict[str, Record] = {}
        for path in sorted(self.folder.glob("*.json")):
            self._found[path.stem] = _read(path)

    def __len__(self) -> int:
        return len(self._found)

    def get(self, member: Member, corpus_hash: str | None = None) -> Record | None:
        """The record of a member, if it has finished.

        Raises:
          ConfigError: the member was trained with another config, or on other text than `corpus_hash`; names both.
        """
        record = self._found.get(member.name)
        if record is None:
            return None
        old = configs.from_dict(RunConfig, record.config)
        changed = [d for d in configs.difference(old, member.config) if not d.startswith(_FREE)]
        if corpus_hash is not None and record.corpus["hash"] != corpus_hash:
            changed.append(f"text of hash {record.corpus['hash'][:12]} -> {corpus_hash[:12]}")
        if changed:
            path = self.folder / f"{member.name}.json"
            told = f"{str(path)!r} is of another member ({'; '.join(changed)})"
            raise ConfigError(f"{told}: remove it to train this one anew, or give another --out")
        return record

    def of(self, study: Study) -> dict[str, Record]:
        """Those of the study's members that have finished, by name; all must be of the same text."""
        found = {}
        for member in every(study, self.rates(study)):
            record = self.get(member)
            if record is not None:
                found[member.name] = record
        hashes = {record.corpus["hash"][:12] for record in found.values()}
        if len(hashes) > 1:
            raise ConfigError(f"{str(self.folder)!r} holds members of different text, hashes {', '.join(hashes)}")
        return found

    def strangers(self, study: Study) -> list[str]:
        """Names of records that are no members of the study."""
        return sorted(set(self._found) - {member.name for member in every(study, self.rates(study))})

    def rates(self, study: Study) -> dict[str, tuple[float, ...]]:
        """Each variant's learning rates: the study's, or the best of its search where that has finished.

        None (an empty tuple) where it diverged at every rate.
        """
        if study.learning_rates:
            return dict.fromkeys(study.variants, study.learning_rates)
        trials: dict[str, list[Record | None]] = {}
        for member in study.search_members():
            trials.setdefault(member.variant, []).append(self.get(member))
        best = {name: best_rate(found) for name, found in trials.items() if None not in found}
        rates = {name: () if rate is None else (rate,) for name, rate in best.items()}
        source = {name: variant.rates_from or name for name, variant in study.variants.items()}
        return {name: rates[source[name]] for name in study.variants if source[name] in rates}

    def write(self, member: Member, **facts) -> Record:
        """Keep what came of a member. The file appears whole or not at all."""
        record = Record(member.phase, member.variant, member.learning_rate, member.seed, kept(member.config), **facts)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{member.name}.json"
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(_dump(record))
        partial.replace(path)
        self._found[member.name] = record
        return record


def best_rate(trials: list[Record]) -> float | None:
    """The learning rate with the lowest development loss; None if every trial diverged."""
    alive = [trial for trial in trials if trial.development is not None]
    order = lambda trial: (trial.development.loss, trial.learning_rate)
    return min(alive, key=order).learning_rate if alive else None


def _dump(record: Record) -> str:
    """JSON of a key a line, and a point of the curve a line."""
    values = {"format": FORMAT} | dataclasses.asdict(record)
    lines = (f"  {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _read(path: Path) -> Record:
    try:
        values = json.loads(path.read_text())
        told = values.pop("format")
        if told != FORMAT:
            raise ConfigError(f"{str(path)!r}: has format {told}, this version reads {FORMAT}")
        for name in ("development", "heldout", "swapped"):
            values[name] = None if values[name] is None else Evaluation(**values[name])
        values["curve"] = [(step, loss) for step, loss in values["curve"]]
        return Record(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{str(path)!r} is no record of a member ({type(error).__name__}: {error})") from error


def is_complete(study: Study, records: Records) -> bool:
    return all(records.get(member) for member in every(study, records.rates(study)))


def confirmed(found: dict[str, Record]) -> dict[tuple[str, float], dict[int, Record]]:
    """Finished confirmations by (variant, learning rate) and seed."""
    rows: dict[tuple[str, float], dict[int, Record]] = {}
    for record in found.values():
        if record.phase == CONFIRM:
            rows.setdefault((record.variant, record.learning_rate), {})[record.seed] = record
    return rows
