"""Text to a corpus on disk: split, tokenise, write as a TFDS data set. Done once for each question, then read back."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gva_jax.config import ConfigError, DataConfig, cache_folder, require
from gva_jax.data import needs_extra
from gva_jax.data.sources import documents
from gva_jax.data.tokenizer import Tokenizer, check_vocab_size
from gva_jax.display import Display, Task

# Part of every key: raise it when the same question gets another answer (filter, split, tokenizer, files).
FORMAT = 1

SPLITS = ("train", "development", "heldout")


@dataclass(frozen=True)
class SplitStats:
    """What one split holds."""

    documents: int
    # Without the end-of-text ids.
    tokens: int
    # Of UTF-8 text.
    bytes: int


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: three splits of token documents and the tokenizer that made them."""

    folder: Path
    # SHA-256 of the list of documents: equal hashes, equal text.
    hash: str
    # By name: train, development, heldout.
    splits: dict[str, SplitStats]
    # Bits per byte on the held-out split of a model that knows only the vocabulary, ...
    uniform_bpb: float
    # ... and of one that knows how often each token occurs in the train split (each count plus one).
    unigram_bpb: float

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / "tokenizer.json")

    def source(self, split: str) -> Sequence[dict[str, np.ndarray]]:
        """Random access to a split's documents: `source[i]["tokens"]` is (n,) int32, without end-of-text ids."""
        tfds = needs_extra("tensorflow_datasets")
        return tfds.builder_from_directory(self.folder / "tokens" / "1.0.0").as_data_source(split)


def prepare(data: DataConfig, vocab_size: int, display: Display) -> Corpus:
    """The corpus that `data` asks for, tokenised with `vocab_size` ids; made if it is not in the cache.

    Which split a document belongs to, and whether `data.max_bytes` admits it, is decided by its hash alone: a smaller
    budget gives a subset of every split. Another process that prepares the same corpus is waited for.

    Raises:
        ConfigError: the source is unknown, a split would be empty, the text is too small for `vocab_size`, the folder
            cannot be written, or the extra `train` is not installed.
    """
    root = cache_folder(data.directory) / "data"
    folder = root / _key(data, vocab_size)
    if not folder.exists():
        with _locked(folder):
            if not folder.exists():
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)  # left by one that was killed
                _write(partial, data, vocab_size, display)
                partial.rename(folder)
    corpus = _read(folder)
    units = ("documents", "bytes", "tokens")
    totals = (f"{sum(getattr(stats, unit) for stats in corpus.splits.values()):,} {unit}" for unit in units)
    display.say(f"corpus {data.source}: {', '.join(totals)}, hash {corpus.hash[:12]}")
    display.say(f"corpus cached in {folder}")
    return corpus


def _key(data: DataConfig, vocab_size: int) -> str:
    """The name of the folder of a prepared corpus: a hash of everything its content depends on."""
    installed = sorted({f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions()})
    question = [FORMAT, data.source, data.max_bytes, data.holdout, vocab_size, sys.version, sys.prefix, installed]
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16]


def _read(folder: Path) -> Corpus:
    described = json.loads((folder / "corpus.json").read_text())
    described["splits"] = {name: SplitStats(**stats) for name, stats in described["splits"].items()}
    return Corpus(folder=folder, **described)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of one corpus; the system lets go of it when its process dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_suffix(".lock"), os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        right = f"{error.strerror}: must be a folder that can be written to and locked"
        raise ConfigError(f"data.directory = {os.fspath(folder.parent.parent)!r}: {right}") from error
    try:
        yield
    finally:
        os.close(lock)


# ---- making ----------------------------------------------------------------------------------------------------------


def _write(folder: Path, data: DataConfig, vocab_size: int, display: Display) -> None:
    """Make the corpus, whole, in `folder`."""
    check_vocab_size(vocab_size)
    for package in ("tokenizers", "tensorflow_datasets"):  # before the long work, not after it
        needs_extra(package)
    chosen = select(documents(data.source, display), data.max_bytes)
    texts = split(chosen, data.holdout)
    for name in SPLITS:
        limits = f"data.holdout = {data.holdout}" + (f" or data.max_bytes = {data.max_bytes}" if data.max_bytes else "")
        right = f"of its {len(chosen):,} documents none is in the {name} split: raise {limits}, or use a larger source"
        require(len(texts[name]) > 0, "data.source", data.source, right)

    with display.task("training the tokenizer", total=len(texts["train"])) as task:
        tokenizer = Tokenizer.train(_counted(texts["train"], task), vocab_size)
    tokens = {}
    with display.task("tokenising", total=len(chosen)) as task:
        for name in SPLITS:
            tokens[name] = []
            for start in range(0, len(texts[name]), 256):
                batch = tokenizer.encode_batch(texts[name][start : start + 256])
                tokens[name] += [np.array(ids, dtype=np.int32) for ids in batch]
                task.advance(len(batch))

    folder.mkdir()
    tokenizer.save(folder / "tokenizer.json")
    _write_dataset(folder, tokens)
    stats = {
        name: SplitStats(len(texts[name]), sum(map(len, tokens[name])), sum(len(t.encode()) for t in texts[name]))
        for name in SPLITS
    }
    uniform, unigram = baselines(tokens["train"], tokens["heldout"], vocab_size, stats["heldout"].bytes)
    digest = hashlib.sha256(b"".join(_digest(text) for text in chosen)).hexdigest()
    corpus = Corpus(folder, digest, stats, uniform, unigram)
    described = {k: v for k, v in dataclasses.asdict(corpus).items() if k != "folder"}
    (folder / "corpus.json").write_text(json.dumps(described, indent=2) + "\n")


def select(texts: Sequence[str], max_bytes: int | None) -> list[str]:
    """At most `max_bytes` of UTF-8 text: whole documents, in the order of their hashes until one no longer fits.

    They are returned in the order of `texts`; a smaller budget selects a subset. None selects everything.
    """
    if max_bytes is None:
        return list(texts)
    order = sorted(range(len(texts)), key=lambda i: _digest(texts[i]))
    ends = np.cumsum([len(texts[i].encode()) for i in order])
    return [texts[i] for i in sorted(order[: np.searchsorted(ends, max_bytes, side="right")])]


def split(texts: Sequence[str], holdout: float) -> dict[str, list[str]]:
    """The documents of each split, in order. A document's hash decides, so it never moves when others come or go."""
    parts = {name: [] for name in SPLITS}
    for text in texts:
        # Not the bytes of the hash that `select` sorts by first: what it selects is split like the whole.
        share = int.from_bytes(_digest(text)[-8:], "big") / 2**64
        parts["heldout" if share < holdout else "development" if share < 2 * holdout else "train"].append(text)
    return parts


def baselines(
    train: list[np.ndarray], heldout: list[np.ndarray], vocab_size: int, num_bytes: int
) -> tuple[float, float]:
    """Bits per byte of the uniform and of the unigram model on the held-out documents, `num_bytes` long.

    Every token and one end-of-text id for each document are predicted. Unigram: counts in `train`, each plus one.
    """
    counts, wanted = (_counts(documents, vocab_size) for documents in (train, heldout))
    bits = -np.log2((counts + 1) / (counts + 1).sum())
    return float(wanted.sum() * math.log2(vocab_size) / num_bytes), float(wanted @ bits / num_bytes)


def _counts(token_documents: list[np.ndarray], vocab_size: int) -> np.ndarray:
    """How often each id is a target, (vocab,)."""
    counts = np.bincount(np.concatenate(token_documents), minlength=vocab_size)
    counts[Tokenizer.eot_id] += len(token_documents)
    return counts


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _counted(texts: list[str], task: Task) -> Iterator[str]:
    for text in texts:
        yield text
        task.advance()


def _write_dataset(folder: Path, tokens: dict[str, list[np.ndarray]]) -> None:
    """Write a TFDS data set below `folder`: `tokens/1.0.0`, array records, one example for each document."""
    tfds = needs_extra("tensorflow_datasets")

    class Tokens(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        # Where TFDS would look for checksums of downloads; finding it needs a package that TFDS does not require.
        code_path = None

        def _info(self):
            features = tfds.features.FeaturesDict({"tokens": tfds.features.Tensor(shape=(None,), dtype=np.int32)})
            # The loader shuffles; documents stay in order here.
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {name: self._generate_examples(tokens[name]) for name in SPLITS}

        def _generate_examples(self, documents):
            for i, ids in enumerate(documents):
                yield i, {"tokens": ids}

    # TFDS prints to standard output, draws bars of its own, and would look for the data set in a bucket.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        builder = Tokens(data_dir=folder, file_format="array_record")
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
