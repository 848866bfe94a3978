"""Batches: every token once, documents kept apart, shuffled, sharded, resumed exactly."""

import dataclasses
import itertools
import json
import sys
import time

import numpy as np
import pytest

from gva_jax.config import ConfigError
from gva_jax.data.corpus import Corpus
from gva_jax.data.loader import evaluation_batches, train_iterator

LAYOUTS = ("packed", "windows")
KEYS = ("inputs", "targets", "segment_ids", "positions")


@pytest.fixture
def shaped(data):
    """The config with another layout, batch or length."""
    return lambda **changes: dataclasses.replace(data, **changes)


def stream(batches) -> np.ndarray:
    """Targets that count, in the order of the text."""
    return np.concatenate([batch["targets"][batch["segment_ids"] > 0] for batch in batches])


def cut(targets: np.ndarray) -> list[tuple[int, ...]]:
    """The documents of a stream of targets, each of which ends with an end of text."""
    assert targets[-1] == 0
    return [tuple(part[:-1].tolist()) for part in np.split(targets, np.flatnonzero(targets == 0) + 1)[:-1]]


def source(corpus: Corpus, split: str) -> list[tuple[int, ...]]:
    return [tuple(document["tokens"].tolist()) for document in corpus.source(split)]


def first_epochs(corpus, data, epochs) -> list[tuple[int, ...]]:
    """The documents of the first epochs of training."""
    iterator = train_iterator(corpus, data)
    wanted = corpus.splits["train"].documents * epochs
    batches = []
    while sum((batch["targets"] == 0).sum() for batch in batches) < wanted:
        batches.append(next(iterator))
    iterator.close()
    targets = stream(batches)
    return cut(targets[: np.flatnonzero(targets == 0)[-1] + 1])[:wanted]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "length"), [(1, 16), (3, 100), (8, 256), (1000, 50)])
def test_an_evaluation_reads_every_document_once_in_order(corpus, shaped, layout, rows, length):
    batches = list(evaluation_batches(corpus, "heldout", shaped(layout=layout, batch_size=rows, context_length=length)))
    for batch in batches:
        assert set(batch) == set(KEYS)
        assert all(a.shape == (rows, length) and a.dtype == np.int32 and a.flags.c_contiguous for a in batch.values())
    stats = corpus.splits["heldout"]
    assert sum((batch["segment_ids"] > 0).sum() for batch in batches) == stats.tokens + stats.documents
    assert cut(stream(batches)) == source(corpus, "heldout")
    assert all((batch["segment_ids"] > 0).all() for batch in batches[:-1])
    assert len(batches) == -(-(stats.tokens + stats.documents) // (rows * length))


def test_an_evaluation_can_be_iterated_again(corpus, shaped):
    batches = evaluation_batches(corpus, "development", shaped())
    assert (stream(batches) == stream(batches)).all()


def test_packed_segments_are_single_documents_and_positions_restart(corpus, shaped):
    sequences = 0
    for batch in evaluation_batches(corpus, "heldout", shaped(context_length=96)):
        for inputs, targets, segments, positions in zip(*(batch[key] for key in KEYS), strict=True):
            real = segments > 0
            sequences += real.any()
            assert (np.diff(real.astype(int)) <= 0).all()  # padding at the end only
            inputs, targets, segments, positions = (a[real] for a in (inputs, targets, segments, positions))
            numbers = np.unique(segments)
            assert (numbers == np.arange(1, len(numbers) + 1)).all() and (np.diff(segments) >= 0).all()
            for number in numbers:
                mine = segments == number
                assert (positions[mine] == np.arange(mine.sum())).all()
                assert (inputs[mine][1:] == targets[mine][:-1]).all() and (inputs[mine][1:] != 0).all()
                assert number == 1 or inputs[mine][0] == 0  # only the first may go on with a document
                assert number == numbers[-1] or targets[mine][-1] == 0
    assert sequences > 20


def test_windows_are_contiguous_and_blind_to_documents(corpus, shaped):
    batches = list(evaluation_batches(corpus, "heldout", shaped(layout="windows", context_length=96)))
    count = sum(int((batch["segment_ids"] > 0).sum()) for batch in batches)
    flat = {key: np.concatenate([batch[key].reshape(-1) for batch in batches])[:count] for key in KEYS}
    assert (flat["inputs"][1:] == flat["targets"][:-1]).all() and flat["inputs"][0] == 0
    assert (flat["segment_ids"] == 1).all()
    assert (flat["positions"] == np.arange(count) % 96).all()
    packed = list(evaluation_batches(corpus, "heldout", shaped(context_length=96)))
    assert all((a["targets"] == b["targets"]).all() for a, b in zip(packed, batches, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_processes_of_an_evaluation_hold_the_rows_of_one(corpus, shaped, layout):
    data = shaped(layout=layout, batch_size=6, context_length=64)
    whole = list(evaluation_batches(corpus, "heldout", data))
    parts = [list(evaluation_batches(corpus, "heldout", data, process_index=i, process_count=3)) for i in range(3)]
    assert [len(part) for part in parts] == [len(whole)] * 3
    for batch, *rows in zip(whole, *parts, strict=True):
        assert all((np.concatenate([row[key] for row in rows]) == batch[key]).all() for key in KEYS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_reads_every_document_once_an_epoch_each_time_in_another_order(corpus, shaped, layout):
    documents = source(corpus, "train")
    read = first_epochs(corpus, shaped(layout=layout), epochs=2)
    first, second = read[: len(documents)], read[len(documents) :]
    assert sorted(first) == sorted(second) == sorted(documents)
    assert first != documents and second != first


def test_training_batches_are_full_and_follow_the_seed(corpus, shaped):
    def take(**changes):
        iterator = train_iterator(corpus, shaped(**changes))
        batches = list(itertools.islice(iterator, 5))
        iterator.close()
        return batches

    batches = take()
    for batch in batches:
        assert set(batch) == set(KEYS)
        assert all(a.shape == (8, 256) and a.dtype == np.int32 for a in batch.values())
        assert (batch["segment_ids"] > 0).all()
    assert (stream(batches) == stream(take())).all()
    assert (stream(batches) != stream(take(seed=1))).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_two_and_four_processes_train_on_the_same_batches_and_resume_each_other(corpus, shaped, layout):
    """Over more than an epoch, changing the number of processes after every few steps."""
    data = shaped(layout=layout, batch_size=8, context_length=512)

    def started(count, state=None):
        iterators = [train_iterator(corpus, data, process_index=i, process_count=count) for i in range(count)]
        for iterator in iterators if state else ():
            iterator.set_state(json.loads(state))
        return iterators

    one, counts = train_iterator(corpus, data), itertools.cycle((1, 2, 4, 8))
    parts, state, ends = started(4), None, 0
    while ends < 1.2 * corpus.splits["train"].documents:
        for _ in range(3):
            whole, rows = next(one), [next(part) for part in parts]
            for key in KEYS:
                assert (np.concatenate([row[key] for row in rows]) == whole[key]).all()
            ends += (whole["targets"] == 0).sum()
        states = {json.dumps(iterator.get_state()) for iterator in (one, *parts)}
        assert len(states) == 1  # whoever writes it
        (state,) = states
        for part in parts:
            part.close()
        parts = started(next(counts), state)
    for iterator in (one, *parts):
        iterator.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "length"), [(1, 16), (8, 256)])
def test_the_state_given_to_a_fresh_iterator_yields_the_same_next_batches(corpus, shaped, layout, rows, length):
    data = shaped(layout=layout, batch_size=rows, context_length=length)
    iterator = train_iterator(corpus, data)
    states, batches = [], []
    for _ in range(70):  # with 8 rows of 256: more than two epochs
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    iterator.close()
    for step in (0, 1, 2, 3, 7, 20, 41, 66):
        fresh = train_iterator(corpus, data)
        fresh.set_state(json.loads(states[step]))
        assert json.dumps(fresh.get_state()) == states[step]
        for batch in batches[step : step + 4]:
            resumed = next(fresh)
            assert all((resumed[key] == batch[key]).all() for key in KEYS)
        fresh.set_state(json.loads(states[0]))  # and one in use goes back
        assert (next(fresh)["inputs"] == batches[0]["inputs"]).all()
        fresh.close()


def test_what_cannot_be_laid_out_is_refused(corpus, shaped):
    with pytest.raises(ConfigError, match="batch_size = 8: must be a multiple of the 3 processes"):
        train_iterator(corpus, shaped(), process_count=3)
    with pytest.raises(ConfigError, match="batch_size = 8: must be a multiple of the 3 processes"):
        evaluation_batches(corpus, "heldout", shaped(), process_count=3)


def test_no_batch_holds_the_text_more_than_once(corpus, shaped):
    split = corpus.splits["train"]
    most = (split.tokens + split.documents) // 2
    train_iterator(corpus, shaped(batch_size=2, context_length=most)).close()
    right = f"data.context_length = {most + 1}: 2 sequences .* of at most {most:,} tokens fit in the train split"
    with pytest.raises(ConfigError, match=right):
        train_iterator(corpus, shaped(batch_size=2, context_length=most + 1))


def test_training_that_outpaces_any_model_is_fed(corpus, shaped):
    """20 times what the quickstart takes (8,000 tokens/s), in time of this process, on a machine that is busy."""
    iterator = train_iterator(corpus, shaped(batch_size=16))
    next(iterator)
    began, tokens = time.process_time(), 0
    while tokens < 400_000:
        tokens += next(iterator)["inputs"].size
    rate = tokens / (time.process_time() - began)
    iterator.close()
    assert rate > 20 * 8_000, f"{rate:,.0f} tokens/s"


def test_missing_grain_names_the_extra(corpus, shaped, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ConfigError, match=r"grain: needs the extra: pip install 'gva-jax\[train\]'"):
        train_iterator(corpus, shaped())
    with pytest.raises(ConfigError, match=r"grain: needs the extra"):
        evaluation_batches(corpus, "heldout", shaped())
