"""ArrayRecord shards that TFDS reads: one file holds the tokens of consecutive documents of a split."""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gva_jax.config import ConfigError
from gva_jax.data import needs_extra

NAME = "tokens"
# Without the number of shards, which is not known while they are written.
_TEMPLATE = "{DATASET}-{SPLIT}-{SHARD_INDEX}.{FILEFORMAT}"


@dataclass(frozen=True)
class Shard:
    """One file and what it holds."""

    file: str
    split: str
    documents: int
    # Without end-of-text ids.
    tokens: int
    # Of UTF-8 text.
    bytes: int
    # Of the file.
    size: int
    sha256: str

    def check(self, folder: Path, whole: bool) -> None:
        """Raises `ConfigError` if the file in `folder` is missing, cut short or, looking at all of it, altered."""
        path = folder / self.file
        size = path.stat().st_size if path.is_file() else None
        if size != self.size:
            wrong = "is missing" if size is None else f"has {size:,} bytes, must have {self.size:,}"
            raise ConfigError(f"shard {str(path)!r} {wrong}: prepare the corpus anew")
        if whole and sha256(path) != self.sha256:
            raise ConfigError(f"shard {str(path)!r} is damaged (its checksum differs): prepare the corpus anew")


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def features(vocab_size: int) -> Any:
    """What a record holds, for TFDS: tokens as raw bytes, which are written 10 times faster than as integers."""
    tfds = needs_extra("tensorflow_datasets")
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
    return tfds.features.FeaturesDict({NAME: tfds.features.Tensor(shape=(None,), dtype=dtype, encoding="bytes")})


class ShardWriter:
    """Writes one shard of each split that gets a document, at the same time; `numbers` says which one of its split.

    The same documents give the same bytes.
    """

    def __init__(self, folder: Path, numbers: dict[str, int], features: Any):
        self._folder, self._numbers, self._features = folder, numbers, features
        self._dtype = features[NAME].np_dtype
        self._module = needs_extra("array_record.python.array_record_module")
        self._writers, self._totals = {}, {}

    def write(self, split: str, ids: np.ndarray, num_bytes: int) -> None:
        """Append a document, of `num_bytes` bytes of text."""
        if split not in self._writers:
            # Readers want single records, not blocks of them: training draws at random.
            path = str(self._folder / self._file(split))
            self._writers[split] = self._module.ArrayRecordWriter(path, "group_size:1")
            self._totals[split] = np.zeros(3, np.int64)
        record = self._features.serialize_example({NAME: ids.astype(self._dtype)})
        with _written():
            self._writers[split].write(record)
        self._totals[split] += (1, len(ids), num_bytes)

    def close(self) -> list[Shard]:
        """Finish the files; they are on disk when this returns."""
        shards = []
        for split, writer in self._writers.items():
            with _written():
                writer.close()
            path = self._folder / self._file(split)
            to_disk(path)
            totals = map(int, self._totals[split])
            shards.append(Shard(path.name, split, *totals, size=path.stat().st_size, sha256=sha256(path)))
        return shards

    def _file(self, split: str) -> str:
        return f"{NAME}-{split}-{self._numbers[split]:05d}.array_record"


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """A full disk is a `RuntimeError` to ArrayRecord, with a message of several parts."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(0, str(error).partition(";")[0]) from error


def to_disk(path: Path) -> None:
    """Wait until a file or folder survives a power cut."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_metadata(folder: Path, shards: list[Shard], features: Any) -> None:
    """Make the shards in `folder` a TFDS data set, which any user of TFDS can read."""
    tfds = needs_extra("tensorflow_datasets")
    infos = []
    for split in dict.fromkeys(shard.split for shard in shards):
        mine = [shard for shard in shards if shard.split == split]
        template = tfds.core.ShardedFileTemplate(
            data_dir=folder, template=_TEMPLATE, dataset_name=NAME, split=split, filetype_suffix="array_record"
        )
        lengths = [shard.documents for shard in mine]
        num_bytes = sum(shard.size for shard in mine)
        infos.append(
            tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=num_bytes, filename_template=template)
        )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        tfds.folder_dataset.write_metadata(
            data_dir=folder, features=features, split_infos=infos, version=folder.name, filename_template=_TEMPLATE,
            check_data=False, description="Token ids of whole documents, without end-of-text ids.",
        )  # fmt: skip
