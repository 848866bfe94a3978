"""A prepared corpus: what its folder holds and how it is read.

DIR/manifest.json    what it was made from, what each split and each shard holds, checksums
DIR/tokenizer.json   the tokenizer, as JSON of Hugging Face `tokenizers`
DIR/tokens/1.0.0     the documents' tokens: a TFDS data set of ArrayRecord shards
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gva_jax.config import ConfigError, require
from gva_jax.data import needs_extra
from gva_jax.data.shards import Shard, sha256
from gva_jax.data.tokenizer import Tokenizer

# Part of every manifest and cache key: raise it when the same recipe gives another corpus (filter, split, files).
FORMAT = 2

SPLITS = ("train", "development", "heldout")

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
DATASET = Path("tokens") / "1.0.0"


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
    """Three splits of token documents and the tokenizer that made them."""

    folder: Path
    # SHA-256 of the documents, the tokenizer and how they were split: equal hashes, equal tokens.
    hash: str
    # By name: train, development, heldout.
    splits: dict[str, SplitStats]
    # Bits per byte on the held-out split of a model that knows only the vocabulary, ...
    uniform_bpb: float
    # ... and of one that knows how often each token occurs in the train split (each count plus one).
    unigram_bpb: float

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / TOKENIZER)

    def source(self, split: str) -> Sequence[dict[str, np.ndarray]]:
        """Random access to a split's documents: `source[i]["tokens"]` is (n,), without end-of-text ids.

        A shard that cannot be read, whenever that is found, is a `ConfigError`.
        """
        return _Documents(self, split)

    def builder(self):
        """The TFDS builder of the shards, read-only.

        Raises:
          ConfigError: what TFDS keeps beside the shards is missing or damaged.
        """
        tfds = needs_extra("tensorflow_datasets")
        try:
            return tfds.builder_from_directory(self.folder / DATASET)
        except Exception as error:  # of several libraries
            wrong = f"dataset_info.json or features.json is missing or damaged ({_first_line(error)})"
            raise ConfigError(f"{str(self.folder / DATASET)!r}: {wrong}: prepare the corpus anew") from error


class _Documents(Sequence):
    """TFDS's data source of a split, which names the shard where reading fails."""

    def __init__(self, corpus: Corpus, split: str):
        described = read_manifest(corpus.folder)
        self._folder, self._made_from = corpus.folder, described["recipe"]["source"]
        self._shards = [Shard(**shard) for shard in described["shards"] if shard["split"] == split]
        self._ends = list(itertools.accumulate(shard.documents for shard in self._shards))
        self._documents = corpus.builder().as_data_source(split)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")  # which also ends an iteration
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, np.ndarray]]:
        try:
            return self._documents.__getitems__(indices)
        except Exception:  # RuntimeError of ArrayRecord, in the main; which of the shards it was is not told
            return [self._read(index) for index in indices]

    def _read(self, index: int) -> dict[str, np.ndarray]:
        try:
            return self._documents[index]
        except Exception as error:
            shard = self._shards[bisect.bisect(self._ends, index)]
            check = f"`gva prepare {self._made_from} --out {self._folder}`, as it was given, checks the others"
            try:
                shard.check(self._folder / DATASET, whole=True)
            except ConfigError as found:
                raise ConfigError(f"{found}; {check}") from error
            path = str(self._folder / DATASET / shard.file)
            raise ConfigError(f"shard {path!r} cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def write_manifest(corpus: Corpus, recipe: dict, input_hash: str, shards: list[Shard]) -> None:
    """Write the manifest into the corpus's folder."""
    tokenizer = corpus.tokenizer
    described = {
        "format": FORMAT,
        "recipe": recipe,
        "input": input_hash,
        "hash": corpus.hash,
        "tokenizer": {
            "sha256": sha256(corpus.folder / TOKENIZER),
            "vocab_size": tokenizer.vocab_size,
            "end_of_text_id": tokenizer.eot_id,
        },
        "splits": {name: dataclasses.asdict(stats) for name, stats in corpus.splits.items()},
        "uniform_bpb": corpus.uniform_bpb,
        "unigram_bpb": corpus.unigram_bpb,
        "shards": [dataclasses.asdict(shard) for shard in shards],
    }
    (corpus.folder / MANIFEST).write_text(json.dumps(described, indent=2) + "\n")


def read_manifest(folder: Path) -> dict:
    """The manifest of a prepared corpus.

    Raises:
      ConfigError: the folder holds none, or one of another version.
    """
    try:
        described = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        wrong = "no such folder" if not folder.exists() else f"holds no readable {MANIFEST} of `gva prepare`"
        raise ConfigError(f"{str(folder)!r}: {wrong}") from error
    told = described.get("format") if isinstance(described, dict) else None
    if told != FORMAT:
        raise ConfigError(f"{str(folder)!r}: its manifest has format {told}, this version reads {FORMAT}: prepare anew")
    return described


def open_corpus(folder: Path, verify: bool = False) -> Corpus:
    """Read a prepared corpus. Every shard must be there in its full size; with `verify`, in every byte.

    Raises:
      ConfigError: the folder holds no corpus, or a shard or the tokenizer is missing or damaged.
    """
    described = read_manifest(folder)
    try:
        shards = [Shard(**shard) for shard in described["shards"]]
        splits = {name: SplitStats(**stats) for name, stats in described["splits"].items()}
        corpus = Corpus(folder, described["hash"], splits, described["uniform_bpb"], described["unigram_bpb"])
        known = described["tokenizer"]["sha256"]
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(folder / MANIFEST)!r} is damaged ({error!r}): prepare the corpus anew") from error
    for shard in shards:
        shard.check(folder / DATASET, verify)
    if not (folder / TOKENIZER).is_file() or sha256(folder / TOKENIZER) != known:
        raise ConfigError(f"{str(folder / TOKENIZER)!r} is missing or not the one that the manifest names")
    return corpus


def check_fits(corpus: Corpus, vocab_size: int) -> None:
    """Refuses a corpus of which a token would have no embedding."""
    needed = corpus.tokenizer.vocab_size
    right = f"must be {needed} or more: the tokenizer of {str(corpus.folder)!r} has ids up to {needed - 1}"
    require(needed <= vocab_size, "model.vocab_size", vocab_size, right)


def baselines(train: np.ndarray, heldout: np.ndarray, num_bytes: int) -> tuple[float, float]:
    """Bits per byte of the uniform and of the unigram model on the held-out documents, `num_bytes` long.

    Args:
        train, heldout: how often each id is a target, (vocab,): every token, and one end-of-text id a document. The
            unigram model knows the counts in `train`, each plus one.
    """
    bits = -np.log2((train + 1) / (train + 1).sum())
    return float(heldout.sum() * math.log2(len(train)) / num_bytes), float(heldout @ bits / num_bytes)


def chained(before: str, digests: Sequence[bytes]) -> str:
    """A hash of all documents so far, from that of those before: it does not depend on where shards begin."""
    return functools.reduce(lambda h, digest: hashlib.sha256(h + digest).digest(), digests, bytes.fromhex(before)).hex()
