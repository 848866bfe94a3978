"""Documents to batches: shuffle, pack, batch and prefetch, on Grain.

A document with tokens t1..tn is the sequence eot t1..tn eot: the inputs are all but its last id, the targets all but
its first. So the end-of-text id begins and ends a document, and every token (and one end of text) is a target once.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gva_jax.config import DataConfig, require
from gva_jax.data import needs_extra
from gva_jax.data.corpus import Corpus

if TYPE_CHECKING:
    import grain

# Batches made ahead, by one thread: more would only contend for the interpreter lock.
_BATCHES_AHEAD = 4
# Documents that are read at once and travel through Grain as one element: each element costs it as much as a document.
_CHUNK = 64


def train_iterator(
    corpus: Corpus, data: DataConfig, *, process_index: int = 0, process_count: int = 1
) -> "grain.DatasetIterator":
    """Batches of the train split without end, shuffled anew each epoch by `data.seed`.

    Yields dictionaries of int32 arrays (b, T), b = data.batch_size / process_count, T = data.context_length:

        inputs, targets   token ids
        segment_ids       packed: 1, 2, ... for the documents (or pieces of documents) of a sequence; windows: 1
        positions         packed: 0, 1, ... within each segment; windows: 0 to T - 1

    With `layout="packed"` a document that does not fit goes on in the next sequence, as a segment of its own. With
    `layout="windows"` sequences are contiguous windows over the shuffled documents, blind to where these end. No
    sequence is padded.

    Batches do not depend on the number of processes: each process packs all documents, which is far cheaper than
    training on them, and keeps its rows.

    `get_state()` is a small JSON-able dictionary, the same in every process; `set_state` on a fresh iterator, also one
    of another number of processes, goes on with exactly the next batch.

    Raises:
        ConfigError: the processes do not divide the batch, or the whole split is smaller than a batch.
    """
    mine = _rows(data, process_index, process_count)
    split = corpus.splits["train"]
    most = (split.tokens + split.documents) // data.batch_size  # each document has an end-of-text id
    right = f"{data.batch_size:,} sequences (data.batch_size) of at most {most:,} tokens fit in the train split"
    require(data.context_length <= most, "data.context_length", data.context_length, right)
    grain = needs_extra("grain")
    source = corpus.source("train")
    order = grain.MapDataset.range(len(source)).seed(data.seed).shuffle().repeat()
    batches = _batches(source, order, data, corpus.tokenizer.eot_id, mine)
    return iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=_BATCHES_AHEAD))


def evaluation_batches(
    corpus: Corpus, split: str, data: DataConfig, *, process_index: int = 0, process_count: int = 1
) -> Iterable[dict[str, np.ndarray]]:
    """All of a split once, in order, in batches like those of `train_iterator`; may be iterated again.

    The last sequence, and the last batch, are filled up with segment id 0; targets there do not count. The others are
    the split's documents and one end-of-text id each. Sequences do not depend on the batch size or the number of
    processes: each process packs the whole split and keeps its rows, so that all see equally many batches.

    Raises:
        ConfigError: the processes do not divide the batch.
    """
    mine = _rows(data, process_index, process_count)
    source = corpus.source(split)
    order = needs_extra("grain").MapDataset.range(len(source))
    return _batches(source, order, data, corpus.tokenizer.eot_id, mine)


def _rows(data: DataConfig, process_index: int, process_count: int) -> slice:
    """The sequences of a batch that one process holds."""
    right = f"must be a multiple of the {process_count} processes"
    require(data.batch_size % process_count == 0, "data.batch_size", data.batch_size, right)
    count = data.batch_size // process_count
    return slice(process_index * count, (process_index + 1) * count)


def _batches(
    source: Sequence, order: "grain.MapDataset", data: DataConfig, eot_id: int, mine: slice
) -> "grain.IterDataset":
    """Concatenate the documents of `source`, in this order of their indices, cut the stream into batches, keep `mine`.

    Grain's rebatching does the cutting, and not its ConcatThenSplit: that one's state does not survive JSON (a tuple
    that comes back as a list is taken for a remainder: grain 0.2.18 then skips documents), and it is slower.
    """
    grain = needs_extra("grain")
    chunks = order.batch(_CHUNK).map(lambda indices: _concatenate(source.__getitems__(indices.tolist()), eot_id))
    # No threads for reading: it is cheaper than handing the result over, and the batches are made ahead as it is.
    stream = chunks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    batches = grain.experimental.RebatchIterDataset(stream, data.batch_size * data.context_length)
    shape = (mine.stop - mine.start, data.context_length)
    first, after = mine.start * data.context_length, mine.stop * data.context_length
    # A row is laid out by what it holds alone, so that the others need not be.
    return batches.map(lambda stream: _lay_out(stream[first:after], shape, data.layout))


def _concatenate(documents: Sequence[dict[str, np.ndarray]], eot_id: int) -> np.ndarray:
    """The sequences of some documents on end, (n, 3): input, target, and 1 where a document begins."""
    lengths = [len(document["tokens"]) + 1 for document in documents]
    stream = np.full((sum(lengths), 3), eot_id, dtype=np.int32)
    stream[:, 2] = 0
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        stream[start + 1 : start + length, 0] = document["tokens"]
        stream[start : start + length - 1, 1] = document["tokens"]
        stream[start, 2] = 1
        start += length
    return stream


def _lay_out(stream: np.ndarray, shape: tuple[int, int], layout: str) -> dict[str, np.ndarray]:
    """What a model reads, (b, T) each, from as much of the stream (see `_concatenate`); padded where it ends."""
    padded = np.zeros((math.prod(shape), 3), dtype=np.int32)
    padded[: len(stream)] = stream
    inputs, targets, begins = (column.reshape(shape).copy() for column in padded.T)
    real = (np.arange(len(padded), dtype=np.int32) < len(stream)).astype(np.int32).reshape(shape)
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    if layout == "windows":
        return {"inputs": inputs, "targets": targets, "segment_ids": real, "positions": positions}
    begins[:, 0] = 1  # what is left of a document is a segment of its own
    segment_ids = np.cumsum(begins, axis=1, dtype=np.int32) * real
    positions -= np.maximum.accumulate(positions * begins, axis=1)
    return {"inputs": inputs, "targets": targets, "segment_ids": segment_ids, "positions": positions}
