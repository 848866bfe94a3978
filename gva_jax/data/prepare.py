"""Text to a corpus on disk, once for each question: split, tokenise, write shards. Streams, and can be killed.

While it is made, FOLDER.partial holds it: `corpus`, which is renamed to FOLDER when all is done, and `progress.json`,
replaced after each finished round of shards: what they hold, and where their text ended. The same call goes on there.
Every step is a function of the text before it, so the result has the same bytes as if it had not been interrupted.
"""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gva_jax.config import ConfigError, DataConfig, cache_folder, require
from gva_jax.data import needs_extra
from gva_jax.data.corpus import (
    DATASET,
    FORMAT,
    SPLITS,
    TOKENIZER,
    Corpus,
    SplitStats,
    baselines,
    chained,
    check_fits,
    open_corpus,
    read_manifest,
    write_manifest,
)  # fmt: skip
from gva_jax.data.shards import Shard, ShardWriter, features, sha256, to_disk, write_metadata
from gva_jax.data.sources import Source, open_source
from gva_jax.data.stream import Stream, encoded
from gva_jax.data.tokenizer import Tokenizer, check_vocab_size
from gva_jax.display import Display, Task

# Bytes of text that a tokenizer is trained on, at most: more would change little and cost time and memory.
TRAINED_ON = 100_000_000

_PROGRESS = "progress.json"


@dataclass(frozen=True)
class Recipe:
    """Everything, beside the text itself, that decides what a corpus holds."""

    source: str
    # Where a record holds its text.
    text_field: str = "text"
    # A JSON file of `tokenizers`. None: train one.
    tokenizer: str | None = None
    # Of the tokenizer that is trained.
    vocab_size: int = 8192
    # Use at most so much text, the first documents of the source.
    max_bytes: int | None = None
    # Share of the documents in each of the development and the held-out split.
    holdout: float = 0.02
    # Bytes of text in a round of shards, one of each split.
    shard_bytes: int = 256_000_000

    def as_json(self) -> dict:
        """For comparison; a tokenizer is what its file holds, wherever it lies."""
        asked = dataclasses.asdict(self)
        if self.tokenizer is not None:
            readable = os.path.isfile(self.tokenizer)
            require(readable, "tokenizer", self.tokenizer, "no such file; give the tokenizer.json of a model")
            asked |= {"tokenizer": sha256(Path(self.tokenizer)), "vocab_size": None}
        return asked


def prepare(data: DataConfig, vocab_size: int, display: Display) -> Corpus:
    """The corpus that `data` asks for, for a model with `vocab_size` ids; made if it is not in the cache.

    Another process that prepares the same corpus is waited for.

    Raises:
        ConfigError: the source cannot be read, a split would be empty, the text is too small for `vocab_size`, the
            tokenizer has more ids than that, the folder cannot be written, or an extra is not installed.
    """
    if data.source.startswith("prepared:"):
        for name in ("max_bytes", "tokenizer"):
            right = f"must be None: {data.source} has been prepared already; give it to `gva prepare`"
            require(getattr(data, name) is None, f"data.{name}", getattr(data, name), right)
        corpus = open_corpus(Path(data.source.removeprefix("prepared:")))
        _say(corpus, display)
    else:
        recipe = Recipe(data.source, data.text_field, data.tokenizer, vocab_size, data.max_bytes, data.holdout)
        source = open_source(recipe.source, recipe.text_field, display)
        question = json.dumps([FORMAT, recipe.as_json(), source.identity()])
        key = hashlib.sha256(question.encode()).hexdigest()[:16]
        corpus = make(recipe, cache_folder(data.directory) / "data" / key, display, source)
    check_fits(corpus, vocab_size)
    return corpus


def make(recipe: Recipe, folder: Path, display: Display, source: Source | None = None, verify: bool = False) -> Corpus:
    """The corpus of `recipe` in `folder`: made, finished if it was begun, or, if it is there, checked.

    With `verify`, one that is there is checked in every byte.

    Raises:
        ConfigError: as `prepare`, or the folder, or what was begun in it, is of something else. Nothing is then at
            `folder` that was not there before.
    """
    source = source or open_source(recipe.source, recipe.text_field, display)
    asked = {"recipe": recipe.as_json(), "input": source.identity()}
    new = not _is_there(folder)
    if new or _work(folder).exists():  # also what one left that was killed at its very end
        with _locked(folder) as work:
            if not _is_there(folder):
                _fill(work, folder, recipe, asked, source, display)
    found = read_manifest(folder)
    _compare(folder, {"recipe": found["recipe"], "input": found["input"]}, asked | {"input": _hash(asked["input"])})
    corpus = open_corpus(folder, verify and not new)
    _say(corpus, display)
    return corpus


def _say(corpus: Corpus, display: Display) -> None:
    units = ("documents", "bytes", "tokens")
    totals = (f"{sum(getattr(stats, unit) for stats in corpus.splits.values()):,} {unit}" for unit in units)
    display.say(f"corpus: {', '.join(totals)}, hash {corpus.hash[:12]}")
    display.say(f"corpus kept in {corpus.folder}")


def _is_there(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _compare(folder: Path, old: dict, new: dict) -> None:
    """Refuses to take for an answer what was made, or begun, for another question."""
    changed = [f"{name}: {value!r} -> {new['recipe'].get(name)!r}" for name, value in old["recipe"].items()
               if value != new["recipe"].get(name)]  # fmt: skip
    if not changed and old["input"] != new["input"]:
        changed = ["its input has changed since"]
    if changed:
        raise ConfigError(f"{str(folder)!r} holds another corpus ({'; '.join(changed)}): remove it, or name another")


def _work(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Hold the lock of what is being made for `folder`: a folder beside it, gone when it is of no more use.

    The system lets go of the lock when its process dies.
    """
    work = _work(folder)
    if _is_there(work) and not any((work / name).is_file() for name in ("lock", _PROGRESS)):
        raise ConfigError(f"{str(work)!r} is in the way, of something else: move it, or name another folder")
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work / "lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        right = f"{error.strerror}: must be a folder that can be written to and locked"
        raise ConfigError(f"{str(folder.parent)!r}: {right}") from error
    try:
        yield work
    finally:
        if _is_there(folder) or not (work / _PROGRESS).exists():
            shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


# ---- making ----------------------------------------------------------------------------------------------------------


@dataclass
class _Progress:
    """How far it has come: everything that is needed to go on after the last finished round of shards."""

    # What is being made.
    asked: dict
    # Of the source: where the last document ends, and how much lies before that, in its own unit.
    position: Any = None
    done: int = 0
    # No document comes after it.
    ended: bool = False
    shards: list[Shard] = dataclasses.field(default_factory=list)
    # Of all documents so far.
    hash: str = ""
    # By split: how often each id is a target, (vocab,).
    counts: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, work: Path, asked: dict, source: Source) -> "_Progress":
        """What an interrupted call has finished, of the same recipe and of text that is still the same."""
        if not (work / _PROGRESS).exists():
            return cls(asked)
        told = json.loads((work / _PROGRESS).read_text())
        # Later files may have been mended or added.
        read = source.identity(told["position"])
        old = told["asked"]
        _compare(work, old | {"input": old["input"][: len(read)]}, asked | {"input": read})
        shards = [Shard(**shard) for shard in told["shards"]]
        for shard in shards:
            shard.check(work / "corpus" / DATASET, whole=False)
        counts = {name: np.array(counts) for name, counts in told["counts"].items()}
        return cls(**told | {"asked": asked, "shards": shards, "counts": counts})

    def save(self, work: Path) -> None:
        counts = {name: counts.tolist() for name, counts in self.counts.items()}
        told = vars(self) | {"shards": [vars(shard) for shard in self.shards], "counts": counts}
        partial = work / f".{_PROGRESS}"
        partial.write_text(json.dumps(told))
        to_disk(partial)
        partial.replace(work / _PROGRESS)


def _fill(work: Path, folder: Path, recipe: Recipe, asked: dict, source: Source, display: Display) -> None:
    """Make the corpus in `work`, or what is still missing of it, and give it its name."""
    for package in ("tokenizers", "tensorflow_datasets", "array_record.python.array_record_module"):
        needs_extra(package)  # before the long work, not after it
    corpus = work / "corpus"
    progress = _Progress.load(work, asked, source)
    if progress.shards:
        display.say(f"continuing {work} after {sum(shard.documents for shard in progress.shards):,} documents")
    else:
        shutil.rmtree(corpus, ignore_errors=True)
    try:
        (corpus / DATASET).mkdir(parents=True, exist_ok=True)
        finished = {shard.file for shard in progress.shards}
        for path in (corpus / DATASET).iterdir():
            if path.name not in finished:
                path.unlink()
        tokenizer = _tokenizer(corpus / TOKENIZER, recipe, source, display)
        _write_shards(work, progress, recipe, source, tokenizer, display)
        try:
            _finish(corpus, progress, recipe, tokenizer, display)
        except ConfigError:  # a split is empty: what was written is of no use to another recipe
            (work / _PROGRESS).unlink(missing_ok=True)
            raise
        corpus.rename(folder)
        to_disk(folder.parent)
    except OSError as error:  # the disk is full, say
        raise ConfigError(f"{str(work)!r} cannot be written: {error.strerror or error}") from error


def _tokenizer(path: Path, recipe: Recipe, source: Source, display: Display) -> Tokenizer:
    """The corpus's tokenizer: the one that is there, the one that the recipe names, or one trained on the text."""
    if path.exists():
        return Tokenizer.load(path)
    if recipe.tokenizer is not None:
        tokenizer = Tokenizer.load(recipe.tokenizer)
    else:
        check_vocab_size(recipe.vocab_size)
        stream = Stream(source, None, min(TRAINED_ON, recipe.max_bytes or TRAINED_ON))
        texts = (one.text for one in stream.round(TRAINED_ON) if one.split(recipe.holdout) == "train")
        with display.task("reading for the tokenizer, bytes") as task:
            first = next(texts, None)
            _require_documents(recipe, "train", first is not None)
            tokenizer = Tokenizer.train(_counted(itertools.chain([first], texts), task), recipe.vocab_size)
    partial = path.with_suffix(".partial")
    tokenizer.save(partial)
    partial.replace(path)
    return tokenizer


def _counted(texts: Iterable[str], task: Task) -> Iterator[str]:
    for text in texts:
        yield text
        task.advance(len(text))


def _write_shards(
    work: Path, progress: _Progress, recipe: Recipe, source: Source, tokenizer: Tokenizer, display: Display
) -> None:
    """Tokenise what is left of the source, in rounds of one shard a split, and note each round when it is on disk."""
    left = None if recipe.max_bytes is None else recipe.max_bytes - sum(shard.bytes for shard in progress.shards)
    stream = Stream(source, progress.position, left)
    kinds, vocab = features(tokenizer.vocab_size), tokenizer.vocab_size
    progress.counts = progress.counts or {name: np.zeros(vocab, np.int64) for name in SPLITS}
    since, tokens, shown = time.monotonic(), 0, progress.done
    with display.task(f"tokenising, {source.unit}", total=source.total, start=shown) as task:
        while not progress.ended:
            numbers = collections.Counter(shard.split for shard in progress.shards)
            writer = ShardWriter(work / "corpus" / DATASET, numbers, kinds)
            for documents, ids in encoded(stream.round(recipe.shard_bytes), tokenizer):
                targets = {name: [] for name in SPLITS}
                for document, document_ids in zip(documents, ids, strict=True):
                    name = document.split(recipe.holdout)
                    writer.write(name, document_ids, document.size)
                    targets[name] += [document_ids, [tokenizer.eot_id]]
                for name, parts in targets.items():
                    if parts:
                        progress.counts[name] += np.bincount(np.concatenate(parts), minlength=vocab)
                progress.hash = chained(progress.hash, [document.digest for document in documents])
                tokens += sum(map(len, ids))
                rate = f"{tokens / max(time.monotonic() - since, 1e-9):,.0f} tokens/s"
                task.advance(source.done - shown, figures=rate)
                shown = source.done
            progress.shards += writer.close()
            progress.position, progress.done, progress.ended = source.position, source.done, stream.exhausted
            if progress.shards:
                progress.save(work)


def _finish(corpus: Path, progress: _Progress, recipe: Recipe, tokenizer: Tokenizer, display: Display) -> None:
    """What a corpus has beside its shards."""
    stats = {}
    for name in SPLITS:
        mine = [(shard.documents, shard.tokens, shard.bytes) for shard in progress.shards if shard.split == name]
        _require_documents(recipe, name, bool(mine))
        stats[name] = SplitStats(*(sum(column) for column in zip(*mine, strict=True)))
    written = sum(one.bytes for one in stats.values())
    decoded = int(sum(progress.counts.values()) @ tokenizer.token_bytes())
    if written != decoded:
        told = f"{written:,} bytes of text have become tokens of {decoded:,} bytes"
        display.say(f"warning: the tokenizer does not keep every byte ({told}): bits per byte are those of its tokens")
    bits = baselines(progress.counts["train"], progress.counts["heldout"], stats["heldout"].bytes)
    identity = _hash([progress.hash, sha256(corpus / TOKENIZER), recipe.holdout])
    write_metadata(corpus / DATASET, progress.shards, features(tokenizer.vocab_size))
    made_from = progress.asked["recipe"], _hash(progress.asked["input"])
    write_manifest(Corpus(corpus, identity, stats, *bits), *made_from, progress.shards)


def _require_documents(recipe: Recipe, split: str, there: bool) -> None:
    change = "lower" if split == "train" else "raise"  # train has what the two others leave
    limits = f"{change} holdout = {recipe.holdout}, "
    limits += f"raise max_bytes = {recipe.max_bytes}, " if recipe.max_bytes else ""
    right = f"none of its documents, if it has any, is in the {split} split: {limits}or use a larger source"
    require(there, "source", recipe.source, right)


def _hash(question: Any) -> str:
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()
