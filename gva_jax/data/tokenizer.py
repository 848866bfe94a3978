"""Text to token ids and back: a byte-level BPE trained on the corpus it serves, or any `tokenizers` JSON file."""

import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gva_jax.config import ConfigError, require
from gva_jax.data import needs_extra

END_OF_TEXT = "<|endoftext|>"

# What tokenizers call the token that ends a document, the first that is known counts.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


def check_vocab_size(vocab_size: int) -> None:
    """Refuses a vocabulary without room for every byte."""
    require(vocab_size >= 257, "vocab_size", vocab_size, "must be 257 or more: 256 bytes and the end-of-text id")


class Tokenizer:
    """Text to token ids and back; without loss for any text if it is byte-level, as a trained one is.

    `eot_id` is the end-of-text id (0 in a trained tokenizer). Special tokens are never read out of text: text that
    spells one is text like any other.
    """

    def __init__(self, backend: Any, name: str = "tokenizer"):
        """`backend` is a `tokenizers.Tokenizer`, `name` what messages call it; see `train` and `load`."""
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        ends = (backend.token_to_id(end) for end in ENDS_OF_TEXT)
        self.eot_id: int | None = next((end for end in ends if end is not None), None)
        if self.eot_id is None:
            raise ConfigError(f"{name} has no end-of-text id: it must know one of {', '.join(ENDS_OF_TEXT)}")
        self._backend = backend

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train on `texts`; the same texts in the same order give the same tokenizer.

        Raises:
            ConfigError: `vocab_size` cannot hold the bytes and the end-of-text id, or is more than the texts give.
        """
        tokenizers = needs_extra("tokenizers")
        check_vocab_size(vocab_size)
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = byte_level(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_level.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        largest = backend.get_vocab_size()
        right = f"must be {largest} or less: this text gives no more"
        require(largest == vocab_size, "vocab_size", vocab_size, right)
        return cls(backend)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Read the JSON file of a tokenizer: what `save` wrote, or one of the many published as tokenizer.json.

        Raises:
            ConfigError: there is no such file, it is no tokenizer, or the tokenizer has no end-of-text id.
        """
        tokenizers = needs_extra("tokenizers")
        name = f"tokenizer {os.fspath(path)!r}"
        try:
            backend = tokenizers.Tokenizer.from_file(os.fspath(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"{name} cannot be read: {error}") from error
        return cls(backend, name)

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokenizer to a file (the JSON of Hugging Face `tokenizers`)."""
        Path(path).write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self._pieces)

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        return _pieces(self._backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; no end-of-text id."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in parallel."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; end-of-text ids vanish, bytes that are no UTF-8 become the replacement character."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of some ids. A token may end inside a character: to stream, feed these to an incremental
        decoder (`codecs.getincrementaldecoder("utf-8")("replace")`). Ids past the vocabulary (a model may have more)
        stand for nothing."""
        return b"".join([self._pieces[i] for i in ids if i < len(self._pieces)])

    def token_bytes(self) -> np.ndarray:
        """The number of UTF-8 bytes each id stands for, (vocab,) int32; 0 for special ids."""
        return np.array([len(piece) for piece in self._pieces], dtype=np.int32)


def _pieces(backend: Any) -> list[bytes]:
    """The bytes that every id adds to a text, as its tokenizer's kind writes them; none for special tokens."""
    described = json.loads(backend.to_str())
    special = {token["id"] for token in described["added_tokens"] if token["special"]}
    added = {token["id"]: token["content"].encode() for token in described["added_tokens"]}
    parts = json.dumps([described["pre_tokenizer"], described["decoder"]])
    piece = _of_bytes if '"ByteLevel"' in parts else _of_words if '"WordPiece"' in parts else _of_sentence_pieces
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        pieces[i] = b"" if i in special else added[i] if i in added else piece(token)
    return pieces


def _of_bytes(token: str) -> bytes:
    """A token of byte-level BPE, which writes every byte as a character."""
    byte_of = _byte_of()
    return bytes(byte_of[c] for c in token) if byte_of.keys() >= set(token) else token.encode()


@functools.cache
def _byte_of() -> dict[str, int]:
    """Printable bytes are written as themselves (in Latin-1), the other 68, in order, as the characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _of_sentence_pieces(token: str) -> bytes:
    """A token of SentencePiece and its like: a lower block is a space, <0x0A> a byte."""
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _of_words(token: str) -> bytes:
    """A token of WordPiece: it continues a word (##) or begins one."""
    return token[2:].encode() if token.startswith("##") else b" " + token.encode()
