"""TFDS data sets and those of the Hugging Face hub as sources. Local ones are read without a network."""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from gva_jax.config import ConfigError
from gva_jax.data import needs_extra
from gva_jax.data.sources import BadInput, Source, checked, no_field

# Records read in one call.
_READ_AT_ONCE = 256


def _name_and_split(source: str, rest: str) -> tuple[str, str]:
    name, _, split = rest.rpartition(":")
    if not name or not split:
        kind = source.partition(":")[0]
        raise ConfigError(f"source = {source!r}: must be {kind}:NAME:SPLIT or {kind}:NAME/CONFIG:SPLIT")
    return name, split


def _refusal(source: str, error: Exception) -> str:
    """The first line of what a library says, after the source that it could not give."""
    said = next(iter(str(error).strip().splitlines()), "")
    return f"source = {source!r}: {type(error).__name__}: {said}"


class Tfds(Source):
    """A TFDS data set: a name that TFDS knows, or the folder of a prepared one (in the format array_record).

    A data set that is not there yet is downloaded and prepared by TFDS, in the folder that TFDS_DATA_DIR names.
    """

    def __init__(self, source: str, rest: str, field: str):
        name, split = _name_and_split(source, rest)
        tfds = needs_extra("tensorflow_datasets")
        prepared = os.path.isfile(os.path.join(name, "dataset_info.json"))
        if not prepared:
            needs_extra("importlib_resources", "data")
        try:
            # TFDS prints to standard output and draws bars of its own.
            with contextlib.redirect_stdout(io.StringIO()):
                if prepared:
                    builder = tfds.builder_from_directory(name)
                else:
                    builder = tfds.builder(name, file_format="array_record")
                    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
                self._records = builder.as_data_source(split)
        except Exception as error:  # of every kind: unknown names, splits and formats, downloads that fail
            raise ConfigError(_refusal(source, error)) from error
        self._source, self._field, self._name = source, field, str(builder.info.full_name)
        self.total = len(self._records)

    def documents(self, position: int | None = None) -> Iterator[str]:
        self.position = self.done = position or 0
        for start in range(self.done, self.total, _READ_AT_ONCE):
            indices = range(start, min(start + _READ_AT_ONCE, self.total))
            for i, record in zip(indices, self._records.__getitems__(list(indices)), strict=True):
                where = f"{self._source}: record {i}"
                if self._field not in record:
                    raise no_field(where, self._field, record)
                text = checked(record[self._field], where, self._field)
                self.position = self.done = i + 1
                if text.strip():
                    yield text

    def identity(self, position: Any = None) -> list:
        return [self._name, self.total]


class HuggingFace(Source):
    """A data set of the Hugging Face hub, streamed: what is not read is not downloaded, and nothing is kept on disk.

    NAME is OWNER/NAME, or a folder of files (Parquet, JSON lines, text) on this machine. Where it stands is the
    library's own state of the stream, so that going on skips whole files and downloads nothing again but a part of one.
    """

    def __init__(self, source: str, rest: str, field: str):
        name, split = _name_and_split(source, rest)
        config = None
        if not os.path.isdir(name) and name.count("/") == 2:
            name, _, config = name.rpartition("/")
        self._source, self._field, self._asked = source, field, (name, config, split)

    def documents(self, position: dict | None = None) -> Iterator[str]:
        name, config, split = self._asked
        datasets = needs_extra("datasets", "data")
        try:
            stream = datasets.load_dataset(name, config, split=split, streaming=True)
        except Exception as error:  # of every kind: the hub's, the network's, the file formats'
            raise ConfigError(_refusal(self._source, error)) from error
        self.done = 0
        if position is not None:
            stream.load_state_dict(position["stream"])
            self.done = position["documents"]
        self._stream = stream
        records = iter(stream)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # also a file that is no JSON, or bytes that are no text
                raise BadInput(f"{_refusal(self._source, error)} (after {self.done:,} records)") from error
            where = f"{self._source}: record {self.done + 1}"
            if self._field not in record:
                raise no_field(where, self._field, record)
            self.done += 1
            text = checked(record[self._field], where, self._field)
            if text.strip():
                yield text

    @property
    def position(self) -> dict:
        return {"stream": self._stream.state_dict(), "documents": self.done}

    def identity(self, position: Any = None) -> list:
        name = self._asked[0]
        paths = sorted(os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files)
        facts = ((path, os.stat(path)) for path in paths)
        return [*self._asked, [[path, stat.st_size, stat.st_mtime_ns] for path, stat in facts]]
