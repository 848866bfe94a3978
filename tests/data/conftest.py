import socket
import sys
import types

import pytest
from written import FakeStream, jsonl, lines

from gva_jax.config import DataConfig
from gva_jax.data.prepare import Recipe, prepare
from gva_jax.display import Display

SOURCE = "docstrings:json,email,argparse,logging,asyncio,unittest"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A few hundred documents of the standard library, each tenth held out, each tenth for development."""
    return DataConfig(source=SOURCE, holdout=0.1, directory=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def corpus(data):
    return prepare(data, 400, Display(quiet=True))


@pytest.fixture
def recipe(tmp_path):
    """400 documents in two files, six rounds of shards."""
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in/a.jsonl", lines(150))
    source = jsonl(tmp_path / "in/b.jsonl", lines(250, 150))
    return Recipe(source=source, vocab_size=300, holdout=0.1, shard_bytes=6_000)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("looked for a network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def hub(monkeypatch):
    """Replaces the library: what was asked for, and the records that it gives."""
    asked, records = [], []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return FakeStream(records)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked, records
