"""Text, JSON lines and Parquet files as sources: one record at a time, whatever their size."""

import abc
import bz2
import contextlib
import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from gva_jax.config import require
from gva_jax.data import needs_extra
from gva_jax.data.sources import BadInput, Source, checked, no_field

# A text file's document ends at the first empty line after so many bytes, ...
PIECE = 4_096
# ... or, where there is none, at the end of a line after so many; a line longer than that is cut.
LONGEST = 1 << 20
# A line that ends a document, as several published collections of stories and web pages have it.
_MARK = b"<|endoftext|>"
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class _Files(Source):
    """Files that match a pattern, in the order of their names. `position` is the file's number and a place in it."""

    def __init__(self, source: str, pattern: str, field: str):
        self._paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
        require(bool(self._paths), "source", source, "no file matches the pattern")
        self._field = field

    def documents(self, position: list | None = None) -> Iterator[str]:
        first, place = position or (0, None)
        self.done = self._before(first, place)
        for number in range(first, len(self._paths)):
            path = self._paths[number]
            with _told(path):
                for text, end in self._read(path, place):
                    self.position = [number, end]
                    self.done = self._before(number, end)
                    if text.strip():
                        yield text
            place = None

    def identity(self, position: list | None = None) -> list:
        paths = self._paths if position is None else self._paths[: position[0] + 1]
        facts = ((path, os.stat(path)) for path in paths)
        return [[path, stat.st_size, stat.st_mtime_ns] for path, stat in facts]

    @abc.abstractmethod
    def _read(self, path: str, place: Any) -> Iterator[tuple[str, Any]]:
        """The documents of one file after `place` (None: its beginning), each with the place where it ends."""

    @abc.abstractmethod
    def _before(self, number: int, place: Any) -> int:
        """How much lies before a position, in the source's unit."""


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """What the system or a decompressor has to say of a file becomes a line that names it."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


class _Lines(_Files):
    """Files that are read by lines, compressed ones (.gz, .bz2, .xz, .zst) too. A place is an offset and a line."""

    def __init__(self, source: str, pattern: str, field: str):
        super().__init__(source, pattern, field)
        self._sizes = [os.path.getsize(path) for path in self._paths]
        self.unit = "bytes"
        if not any(path.endswith((*_COMPRESSED, ".zst")) for path in self._paths):
            self.total = sum(self._sizes)

    def _before(self, number: int, place: list | None) -> int:
        return sum(self._sizes[:number]) + (place[0] if place else 0)

    def _read(self, path: str, place: list | None) -> Iterator[tuple[str, list]]:
        offset, line = place or (0, 0)
        with _open(path) as file:
            file.seek(offset)
            yield from self._records(path, file, offset, line)

    @abc.abstractmethod
    def _records(self, path: str, file: BinaryIO, offset: int, line: int) -> Iterator[tuple[str, list]]:
        """The documents of an open file that stands at `offset`, after `line` lines."""


def _open(path: str) -> BinaryIO:
    ending = os.path.splitext(path)[1]
    if ending == ".zst":
        return _Forward(needs_extra("pyarrow", "data").input_stream(path, compression="zstd"))
    return _COMPRESSED.get(ending, open)(path, "rb")


class _Forward(io.BufferedReader):
    """A stream that cannot go back, of which `seek` skips the beginning."""

    def seek(self, offset: int, whence: int = 0) -> int:
        while offset > 0 and (skipped := len(self.read(min(offset, LONGEST)))):
            offset -= skipped
        return offset


class Text(_Lines):
    """Plain text. A document ends with its file, at a line `<|endoftext|>`, or, in files that are longer than
    4 kB, at the next empty line: a book becomes sections, small files stay whole."""

    def _records(self, path: str, file: BinaryIO, offset: int, line: int) -> Iterator[tuple[str, list]]:
        parts, size = [], 0
        while raw := file.readline(LONGEST):
            raw, text = _whole_characters(raw, file, path, line + 1)
            offset += len(raw)
            line += raw.endswith(b"\n")
            mark, empty = raw.strip() == _MARK, not raw.strip()
            if not mark:
                parts.append(text.removeprefix("\ufeff") if offset == len(raw) else text)
                size += len(raw)
            if mark or (empty and size >= PIECE) or size >= LONGEST:
                yield "".join(parts).strip("\r\n"), [offset, line]
                parts, size = [], 0
        yield "".join(parts).strip("\r\n"), [offset, line]


def _whole_characters(raw: bytes, file: BinaryIO, path: str, line: int) -> tuple[bytes, str]:
    """A line and its text; a line that was cut inside a character is first completed from the file."""
    while True:
        try:
            return raw, raw.decode()
        except UnicodeDecodeError as error:
            cut = error.end == len(raw) >= LONGEST and error.reason == "unexpected end of data"
            if not cut or not (more := file.read(1)):
                raise _not_utf8(path, line, raw, error) from None
            raw += more


def _not_utf8(path: str, line: int, raw: bytes, error: UnicodeDecodeError) -> BadInput:
    return BadInput(f"{path}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x}, column {error.start + 1})")


class JsonLines(_Lines):
    """One JSON object a line, of which one field is the text. Empty lines count as nothing."""

    def _records(self, path: str, file: BinaryIO, offset: int, line: int) -> Iterator[tuple[str, list]]:
        for raw in file:
            start, offset, line = offset, offset + len(raw), line + 1
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.removeprefix(_BOM if start == 0 else b"").decode())
            except UnicodeDecodeError as error:
                raise _not_utf8(path, line, raw, error) from None
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{path}:{line}: not JSON ({error})") from None
            where = f"{path}:{line}"
            if not isinstance(record, dict):
                raise BadInput(f"{where}: must be a JSON object with a field {self._field!r}")
            if self._field not in record:
                raise no_field(where, self._field, record)
            yield checked(record[self._field], where, self._field), [offset, line]


class Parquet(_Files):
    """One row a document; only the column of the text is read. A place is a row."""

    unit = "rows"

    def __init__(self, source: str, pattern: str, field: str):
        super().__init__(source, pattern, field)
        self._parquet = needs_extra("pyarrow.parquet", "data")
        self._rows = [self._open(path).metadata.num_rows for path in self._paths]
        self.total = sum(self._rows)

    def _open(self, path: str):
        try:
            file = self._parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise BadInput(f"{path}: is no Parquet file: {str(error).splitlines()[0]}") from error
        if self._field not in file.schema_arrow.names:
            raise no_field(path, self._field, file.schema_arrow.names)
        return file

    def _before(self, number: int, place: int | None) -> int:
        return sum(self._rows[:number]) + (place or 0)

    def _read(self, path: str, place: int | None) -> Iterator[tuple[str, int]]:
        start, row = place or 0, 0
        with self._open(path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start:  # read before
                    row += rows
                    continue
                for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[self._field]):
                    # As bytes, which need not be UTF-8; what is no text keeps its kind, to be told.
                    column = batch.column(0)
                    for value in column.cast("binary") if _is_text(column.type) else column:
                        row += 1
                        if row > start:
                            yield checked(value.as_py(), f"{path}: row {row}", self._field), row


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string")
