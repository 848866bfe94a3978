"""What a prepared corpus holds, and that it is made once, whole and without a network."""

import dataclasses
import io
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from rich.console import Console

from gva_jax.config import ConfigError, DataConfig
from gva_jax.data import prepare as module
from gva_jax.data.loader import train_iterator
from gva_jax.data.prepare import SPLITS, baselines, prepare, select, split
from gva_jax.data.sources import documents
from gva_jax.display import Display

QUIET = Display(quiet=True)
TEXTS = [f"text {i} " + "x" * (i % 7) for i in range(1000)]


def test_the_splits_hold_every_document_of_the_source_once(corpus, data):
    texts = {name: [corpus.tokenizer.decode(document["tokens"]) for document in corpus.source(name)] for name in SPLITS}
    assert texts == split(documents(data.source, QUIET), data.holdout)
    for name, stats in corpus.splits.items():
        tokens = [document["tokens"] for document in corpus.source(name)]
        assert stats.documents == len(corpus.source(name)) == len(tokens) > 0
        assert stats.tokens == sum(map(len, tokens))
        assert stats.bytes == sum(len(text.encode()) for text in texts[name])
        assert all(t.dtype == np.int32 and t.ndim == 1 and (t > 0).all() and (t < 400).all() for t in tokens)


def test_a_document_stays_in_its_split_whatever_the_budget():
    whole = split(TEXTS, 0.1)
    assert sorted(text for part in whole.values() for text in part) == sorted(TEXTS)
    assert 60 < len(whole["development"]) < 140 and 60 < len(whole["heldout"]) < 140
    smaller = select(TEXTS, 3000)
    for budget in (100, 1000, 3000, 5000):
        chosen = select(TEXTS, budget)
        assert budget - 20 < sum(map(len, chosen)) <= budget
        assert set(chosen) <= set(smaller) or set(chosen) >= set(smaller)
        assert chosen == [text for text in TEXTS if text in set(chosen)]
    parts = split(smaller, 0.1)
    assert all(set(parts[name]) <= set(whole[name]) for name in SPLITS)
    assert all(0.02 < len(parts[name]) / len(smaller) < 0.2 for name in ("development", "heldout"))
    assert select(TEXTS, None) == TEXTS and select(TEXTS, 10**9) == TEXTS and select(TEXTS, 3) == []


def test_the_baselines_are_those_of_a_hand_count(corpus):
    train, heldout = [np.array([1, 1, 2]), np.array([2])], [np.array([1, 3])]
    uniform, unigram = baselines(train, heldout, 4, num_bytes=5)
    assert math.isclose(uniform, 3 * 2 / 5)  # 1, 3 and the end of text, two bits each
    # Counts of 0 to 3 in train with one added: 3, 3, 3, 1.
    assert math.isclose(unigram, -(2 * math.log2(3 / 10) + math.log2(1 / 10)) / 5)
    assert 1 < corpus.unigram_bpb < corpus.uniform_bpb < 8


def test_the_second_call_reads_the_first_one_s_files(corpus, data, monkeypatch):
    monkeypatch.setattr(module, "documents", lambda *_: pytest.fail("scanned again"))
    assert prepare(data, 400, QUIET) == corpus
    layout = dataclasses.replace(data, seed=5, batch_size=3, context_length=7, layout="windows")
    assert prepare(layout, 400, QUIET) == corpus


def test_whatever_changes_the_corpus_changes_its_folder(data, monkeypatch):
    key = module._key
    keys = [key(data, 400), key(data, 401)]
    for changes in ({"holdout": 0.2}, {"max_bytes": 10}, {"source": "docstrings:json"}):
        keys.append(key(dataclasses.replace(data, **changes), 400))
    monkeypatch.setattr(module, "FORMAT", -1)
    keys.append(key(data, 400))
    monkeypatch.undo()
    extra = types.SimpleNamespace(metadata={"Name": "new"}, version="1")
    monkeypatch.setattr(module.importlib.metadata, "distributions", lambda: [extra])
    keys.append(key(data, 400))
    assert len(set(keys)) == len(keys)


def test_the_same_text_gives_the_same_files(corpus, data, tmp_path):
    again = prepare(dataclasses.replace(data, directory=str(tmp_path)), 400, QUIET)
    assert dataclasses.replace(again, folder=corpus.folder) == corpus
    for name in ("corpus.json", "tokenizer.json"):
        assert (again.folder / name).read_bytes() == (corpus.folder / name).read_bytes()
    for name in SPLITS:
        pairs = zip(again.source(name), corpus.source(name), strict=True)
        assert all((a["tokens"] == b["tokens"]).all() for a, b in pairs)


def test_it_says_what_there_is_and_tfds_says_nothing(tmp_path, capfd):
    out = io.StringIO()
    data = DataConfig(source="docstrings:json,email", holdout=0.2, directory=str(tmp_path))
    corpus = prepare(data, 300, Display(console=Console(file=out, soft_wrap=True)))
    said = out.getvalue().splitlines()[-2:]
    total = {f: sum(getattr(s, f) for s in corpus.splits.values()) for f in ("documents", "bytes", "tokens")}
    assert all(f"{count:,} {name}" in said[0] for name, count in total.items()) and corpus.hash[:12] in said[0]
    assert str(corpus.folder) in said[1]
    assert capfd.readouterr() == ("", "")


def test_prepare_and_train_without_a_network(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("looked for a network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    data = DataConfig(source="docstrings:json,email", holdout=0.2, directory=str(tmp_path))
    iterator = train_iterator(prepare(data, 300, QUIET), data)
    assert next(iterator)["inputs"].shape == (8, 256)
    iterator.close()


def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path):
    data = DataConfig(source="docstrings:json,email", holdout=0.2, directory=str(tmp_path))
    code = (
        "import os, signal, sys; from gva_jax.config import DataConfig; from gva_jax.data import prepare\n"
        "from gva_jax.display import Display\n"
        "prepare._write_dataset = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "data = DataConfig(source='docstrings:json,email', holdout=0.2, directory=sys.argv[1])\n"
        "prepare.prepare(data, 300, Display(quiet=True))"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path])
    assert killed.returncode == -signal.SIGKILL
    left = os.listdir(tmp_path / "data")
    assert any(name.endswith(".partial") for name in left)
    assert not any(name.isalnum() for name in left)
    corpus = prepare(data, 300, QUIET)
    assert len(corpus.source("train")) == corpus.splits["train"].documents
    assert sorted(os.listdir(tmp_path / "data")) == [corpus.folder.name, f"{corpus.folder.name}.lock"]


def test_of_two_that_prepare_at_once_one_waits_for_the_other(tmp_path, monkeypatch):
    scans, found = [], []
    monkeypatch.setattr(module, "documents", lambda *args: scans.append(args) or documents(*args))
    data = DataConfig(source="docstrings:json,email", holdout=0.2, directory=str(tmp_path))
    threads = [threading.Thread(target=lambda: found.append(prepare(data, 300, QUIET))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(scans) == 1 and len(found) == 2 and found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "vocab_size", "message"),
    [
        ({"source": "hf:a/b:train"}, 300, "data.source = 'hf:a/b:train'"),
        ({"max_bytes": 10}, 300, "of its 0 documents none is in the train split: raise .* or data.max_bytes = 10"),
        ({"holdout": 1e-9}, 300, "none is in the development split: raise data.holdout = 1e-09"),
        ({}, 256, "model.vocab_size = 256: must be 257 or more"),
        ({}, 10**6, "model.vocab_size = 1000000: must be [0-9]+ or less"),
        ({"directory": __file__}, 300, "data.directory = .*: must be a folder that can be written to"),
    ],
)
def test_what_cannot_be_prepared_is_refused(tmp_path, changes, vocab_size, message):
    data = DataConfig(source="docstrings:json,email", holdout=0.2, directory=str(tmp_path))
    with pytest.raises(ConfigError, match=message) as error:
        prepare(dataclasses.replace(data, **changes), vocab_size, QUIET)
    assert "\n" not in str(error.value)
    kept = os.listdir(tmp_path / "data") if (tmp_path / "data").exists() else []
    assert all(name.endswith(".lock") for name in kept)


def test_missing_tfds_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    monkeypatch.setattr(module, "documents", lambda *_: pytest.fail("scanned first"))
    data = DataConfig(source="docstrings:json,email", holdout=0.2, directory=str(tmp_path))
    with pytest.raises(ConfigError, match=r"tensorflow_datasets: needs the extra: pip install 'gva-jax\[train\]'"):
        prepare(data, 300, QUIET)


def test_importing_the_package_stays_light():
    code = (
        "import sys, gva_jax.data, gva_jax.data.prepare, gva_jax.data.loader\n"
        "heavy = {'jax', 'grain', 'tensorflow_datasets', 'tokenizers', 'tensorflow'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
