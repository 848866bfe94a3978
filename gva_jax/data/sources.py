"""Where text comes from: one object that yields documents, whatever they are kept in.

docstrings[:NAME,NAME]     the installed Python packages, or some of them
text:GLOB                  text files
jsonl:GLOB                 a JSON object a line
parquet:GLOB               a row a document
tfds:NAME[/CONFIG]:SPLIT   a TFDS data set
hf:NAME[/CONFIG]:SPLIT     a data set of the Hugging Face hub, or a folder of files, streamed
"""

import abc
import difflib
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any

from gva_jax.config import ConfigError
from gva_jax.display import Display

KINDS = ("docstrings", "text", "jsonl", "parquet", "tfds", "hf")


class BadInput(ConfigError):
    """Text that cannot be read, told by its file and line. What has been prepared before it stays good."""


class Source(abc.ABC):
    """Documents in an order that does not change. Reading can be taken up again after any document."""

    # What `done` and `total` count, for a person who waits.
    unit: str = "documents"
    total: int | None = None
    # How much has been read.
    done: int = 0
    # Where the document that came last ends, as JSON: `documents(position)` goes on with the next one.
    position: Any = None

    @abc.abstractmethod
    def documents(self, position: Any = None) -> Iterator[str]:
        """The documents after `position`, none of them empty. One iteration at a time.

        Raises:
          BadInput: something cannot be read; names the file and the line.
        """

    @abc.abstractmethod
    def identity(self, position: Any = None) -> list:
        """What the documents (those before `position`) depend on, as JSON: unequal lists, perhaps other documents."""


def open_source(source: str, field: str, display: Display) -> Source:
    """The source that a string names; `field` is where a record holds its text.

    Raises:
      ConfigError: no such source, nothing in it, or a package that reads it is not installed.
    """
    kind, _, rest = source.partition(":")
    if kind == "docstrings":
        return Docstrings(source, display)
    if kind in ("text", "jsonl", "parquet"):
        from gva_jax.data import files

        return {"text": files.Text, "jsonl": files.JsonLines, "parquet": files.Parquet}[kind](source, rest, field)
    if kind in ("tfds", "hf"):
        from gva_jax.data import hubs

        return {"tfds": hubs.Tfds, "hf": hubs.HuggingFace}[kind](source, rest, field)
    close = difflib.get_close_matches(kind, (*KINDS, "prepared"), n=1)
    advice = f"did you mean {close[0]}? " if close else ""
    known = "docstrings, docstrings:NAME,NAME, text:GLOB, jsonl:GLOB, parquet:GLOB, tfds:NAME:SPLIT, hf:NAME:SPLIT"
    raise ConfigError(f"source = {source!r}: {advice}known are {known} and, to train, prepared:DIR")


def digest(text: str) -> bytes:
    """A document's hash: it decides its split, and where it stands among docstrings."""
    return hashlib.sha256(text.encode()).digest()


def checked(text: Any, where: str, field: str) -> str:
    """A record's text, if it is text that can be written as UTF-8."""
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{where}: field {field!r} is not UTF-8 ({error.reason} at byte {error.start})") from None
    if not isinstance(text, str):
        raise BadInput(f"{where}: field {field!r} is {type(text).__name__}, must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{where}: field {field!r} is not text ({error.reason} at character {error.start})") from None
    return text


def no_field(where: str, field: str, known: Any) -> BadInput:
    return BadInput(f"{where}: no field {field!r}; there are {', '.join(map(str, known)) or 'none'}")


class Docstrings(Source):
    """Docstrings in the order of their hashes, so that a budget takes some of every package and not the first ones."""

    def __init__(self, source: str, display: Display):
        from gva_jax.data import docstrings

        self._find = lambda: sorted(docstrings.documents(source, display), key=digest)
        self._texts = None

    def documents(self, position: int | None = None) -> Iterator[str]:
        if self._texts is None:
            self._texts = self._find()
            self.total = len(self._texts)
        self.position = self.done = position or 0
        for i in range(self.done, len(self._texts)):
            self.position = self.done = i + 1
            yield self._texts[i]

    def identity(self, position: Any = None) -> list:
        installed = sorted({f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions()})
        return [sys.version, sys.prefix, installed]
