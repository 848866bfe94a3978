"""What a prepared corpus holds: every document once, in its split, and a manifest and baselines that are true."""

import dataclasses
import hashlib
import io
import json
import math
import os

import numpy as np
import pytest
import tensorflow_datasets as tfds
from rich.console import Console
from written import decoded, files, lines, words

from gva_jax.config import ConfigError
from gva_jax.data.corpus import SPLITS, baselines
from gva_jax.data.prepare import make
from gva_jax.data.tokenizer import Tokenizer
from gva_jax.display import Display

QUIET = Display(quiet=True)


def share(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[-8:], "big") / 2**64


def expected(texts: list[str], holdout: float) -> dict[str, list[str]]:
    """The documents of each split, by hand."""
    kind = lambda s: "heldout" if s < holdout else "development" if s < 2 * holdout else "train"
    return {name: [text for text in texts if kind(share(text)) == name] for name in SPLITS}


def test_the_splits_hold_every_document_once_in_order(recipe, tmp_path):
    corpus = make(recipe, tmp_path / "out", QUIET)
    texts = expected(lines(400), 0.1)
    assert {name: decoded(corpus, name) for name in SPLITS} == texts
    for name, stats in corpus.splits.items():
        tokens = [document["tokens"] for document in corpus.source(name)]
        assert stats.documents == len(corpus.source(name)) == len(tokens) == len(texts[name])
        assert stats.tokens == sum(map(len, tokens))
        assert stats.bytes == sum(len(text.encode()) for text in texts[name])
        assert all(t.dtype == np.uint16 and t.ndim == 1 and (t > 0).all() and (t < 300).all() for t in tokens)


def test_the_manifest_is_true(recipe, tmp_path):
    corpus = make(recipe, tmp_path / "out", QUIET)
    told = json.loads((tmp_path / "out/manifest.json").read_text())
    assert told["recipe"] == dataclasses.asdict(recipe)
    assert told["tokenizer"]["vocab_size"] == 300 and told["tokenizer"]["end_of_text_id"] == 0
    present = files(tmp_path / "out")
    assert told["tokenizer"]["sha256"] == present.pop("tokenizer.json")
    shards = {f"tokens/1.0.0/{shard['file']}": shard for shard in told["shards"]}
    assert {name: shard["sha256"] for name, shard in shards.items()} == {n: s for n, s in present.items() if "-" in n}
    for name in SPLITS:
        mine = [shard for shard in told["shards"] if shard["split"] == name]
        stats = dataclasses.asdict(corpus.splits[name])
        assert told["splits"][name] == stats == {key: sum(shard[key] for shard in mine) for key in stats}
        assert len(mine) >= 5
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_users_of_tfds_read_the_shards(recipe, tmp_path):
    corpus = make(recipe, tmp_path / "out", QUIET)
    found = tfds.data_source("tokens", data_dir=tmp_path / "out", split="development")
    assert [list(a["tokens"]) for a in found] == [list(b["tokens"]) for b in corpus.source("development")]
    info = corpus.builder().info
    assert {name: info.splits[name].num_examples for name in SPLITS} == {
        name: stats.documents for name, stats in corpus.splits.items()
    }


def test_a_document_stays_in_its_split_and_a_budget_takes_the_first_ones(recipe, tmp_path):
    whole = make(recipe, tmp_path / "whole", QUIET)
    budget = sum(len(text) for text in lines(120)) + 3
    part = make(dataclasses.replace(recipe, max_bytes=budget), tmp_path / "part", QUIET)
    assert sum(stats.documents for stats in part.splits.values()) == 120
    texts = {name: decoded(part, name) for name in SPLITS}
    assert texts == expected(lines(120), 0.1)
    assert all(decoded(whole, name)[: len(texts[name])] == texts[name] for name in SPLITS)
    assert part.hash != whole.hash


def test_how_it_is_cut_into_shards_changes_no_document(recipe, tmp_path):
    a = make(recipe, tmp_path / "a", QUIET)
    b = make(dataclasses.replace(recipe, shard_bytes=10**9), tmp_path / "b", QUIET)
    assert dataclasses.replace(a, folder=b.folder) == b
    assert all(decoded(a, name) == decoded(b, name) for name in SPLITS)
    assert len(files(tmp_path / "b")) == 3 + 4 and len(files(tmp_path / "a")) > 15
    c = make(dataclasses.replace(recipe, holdout=0.11), tmp_path / "c", QUIET)
    assert c.hash != a.hash


def test_the_baselines_are_those_of_a_hand_count(corpus):
    # Train 1 1 2 and an end, held out 2 4 and two ends.
    uniform, unigram = baselines(np.array([1, 2, 1, 0]), np.array([1, 1, 0, 1]), num_bytes=5)
    assert math.isclose(uniform, 3 * 2 / 5)  # two bits each
    # Counts in train with one added: 2, 3, 2, 1.
    assert math.isclose(unigram, -(math.log2(2 / 8) + math.log2(3 / 8) + math.log2(1 / 8)) / 5)
    assert 1 < corpus.unigram_bpb < corpus.uniform_bpb < 8


def test_the_baselines_count_what_the_shards_hold(corpus):
    def counts(split):
        ids = [np.append(document["tokens"], 0) for document in corpus.source(split)]
        return np.bincount(np.concatenate(ids), minlength=400)

    found = baselines(counts("train"), counts("heldout"), corpus.splits["heldout"].bytes)
    assert found == (corpus.uniform_bpb, corpus.unigram_bpb)


# ---- a tokenizer of one's own ----------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_given_is_used(recipe, tmp_path):
    Tokenizer.train(lines(50), 280).save(tmp_path / "mine.json")
    given = dataclasses.replace(recipe, tokenizer=str(tmp_path / "mine.json"))
    corpus = make(given, tmp_path / "out", QUIET)
    assert corpus.tokenizer.vocab_size == 280
    assert {name: decoded(corpus, name) for name in SPLITS} == expected(lines(400), 0.1)
    (tmp_path / "mine.json").rename(tmp_path / "moved.json")
    moved = dataclasses.replace(given, tokenizer=str(tmp_path / "moved.json"), vocab_size=5)  # which no longer matters
    assert make(moved, tmp_path / "out", QUIET) == corpus
    Tokenizer.train(lines(60), 281).save(tmp_path / "moved.json")
    with pytest.raises(ConfigError, match="holds another corpus \\(tokenizer: "):
        make(moved, tmp_path / "out", QUIET)


def test_a_large_vocabulary_is_kept_whole(recipe, tmp_path):
    words((*map(str, range(70_000)), "the", "</s>"), tmp_path / "mine.json")
    out = io.StringIO()
    display = Display(console=Console(file=out, soft_wrap=True))
    given = dataclasses.replace(recipe, tokenizer=str(tmp_path / "mine.json"))
    corpus = make(given, tmp_path / "out", display)
    tokens = np.concatenate([document["tokens"] for document in corpus.source("train")])
    assert tokens.dtype == np.int32 and tokens.max() == 70_000 and corpus.tokenizer.eot_id == 70_001
    assert "warning: the tokenizer does not keep every byte" in out.getvalue()
