"""Small inputs that tests write themselves, and what came of them."""

import hashlib
import json
from pathlib import Path

import tokenizers

WORDS = ("the", "value", "key", "query", "head", "group", "of", "and", "is", "a", "cache", "that", "not", "page")


def lines(count: int, start: int = 0) -> list[str]:
    """Distinct documents of some words each."""
    return [" ".join(WORDS[(i * k + k) % 14] for k in range(3, 20)) + f" {i}" for i in range(start, start + count)]


def jsonl(path: Path, texts: list[str]) -> str:
    """Writes the texts and returns the source that reads them."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return f"jsonl:{path.parent}/*.jsonl"


def files(folder: Path) -> dict[str, str]:
    """Every file below a folder and its checksum."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def decoded(corpus, split: str) -> list[str]:
    return [corpus.tokenizer.decode(document["tokens"]) for document in corpus.source(split)]


def words(vocabulary, path: Path) -> None:
    """Writes a tokenizer that knows these words, of which the first stands for all others."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=vocabulary[0])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(path))


class FakeStream:
    """What `datasets.load_dataset(..., streaming=True)` gives, of which only what is used."""

    def __init__(self, records):
        self._records, self._next = records, 0

    def __iter__(self):
        while self._next < len(self._records):
            record = self._records[self._next]
            self._next += 1
            if isinstance(record, Exception):
                raise record
            yield record

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]
