"""Documents on their way from a source to shards: measured, assigned to a split, tokenised. Few are in memory."""

import concurrent.futures
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gva_jax.data.sources import Source, digest
from gva_jax.data.tokenizer import Tokenizer

# Bytes of text that are tokenised in one call, by all cores.
_BATCH = 1 << 20


@dataclass(frozen=True)
class Document:
    text: str
    # Of UTF-8.
    size: int
    digest: bytes

    def split(self, holdout: float) -> str:
        """Its hash decides, so it never moves when others come or go."""
        # Not the bytes of the hash that docstrings are sorted by: what a budget leaves of them is split like the whole.
        share = int.from_bytes(self.digest[-8:], "big") / 2**64
        return "heldout" if share < holdout else "development" if share < 2 * holdout else "train"


class Stream:
    """The documents of a source, in rounds, until it ends or the next one does not fit into `left` bytes."""

    def __init__(self, source: Source, position: Any, left: int | None):
        self._texts, self._left = source.documents(position), left
        self.exhausted = False

    def round(self, size: int) -> Iterator[Document]:
        """Documents of `size` bytes or, with the last one, a little more; nothing is read beyond them."""
        while size > 0:
            text = next(self._texts, None)
            document = None if text is None else Document(text, len(text.encode()), digest(text))
            if document is None or (self._left is not None and document.size > self._left):
                self.exhausted = True
                return
            size -= document.size
            if self._left is not None:
                self._left -= document.size
            yield document


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents of about `_BATCH` bytes together."""
    for first in documents:
        batch, size = [first], first.size
        while size < _BATCH and (more := list(itertools.islice(documents, 1))):
            batch += more
            size += more[0].size
        yield batch


def encoded(documents: Iterator[Document], tokenizer: Tokenizer) -> Iterator[tuple[list[Document], list[np.ndarray]]]:
    """Documents, some at a time, with their token ids.

    These are found by all cores while the documents before are written and the next ones are read.
    """

    def encode(batch: list[Document]) -> list[np.ndarray]:
        return [np.array(ids, np.int32) for ids in tokenizer.encode_batch([document.text for document in batch])]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        ahead = None
        for batch in _batches(documents):
            ids = pool.submit(encode, batch)
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead = batch, ids
        if ahead is not None:
            yield ahead[0], ahead[1].result()
