"""A byte-level BPE tokenizer, trained on the corpus it serves."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gva_jax.config import ConfigError, require
from gva_jax.data import needs_extra

END_OF_TEXT = "<|endoftext|>"


def check_vocab_size(vocab_size: int) -> None:
    """Refuses a vocabulary without room for every byte."""
    require(vocab_size >= 257, "model.vocab_size", vocab_size, "must be 257 or more: 256 bytes and the end-of-text id")


class Tokenizer:
    """Text to token ids and back, without loss for any text.

    Ids 0 to `vocab_size - 1`: the end-of-text id 0, which no text encodes to, the 256 bytes, and merged pieces.
    """

    eot_id = 0

    def __init__(self, backend: Any):
        """`backend` is a `tokenizers.Tokenizer` made by `train`; see `train` and `load`."""
        # Text that spells the end-of-text mark is text like any other.
        backend.encode_special_tokens = True
        self._backend = backend
        self._pieces = _pieces(backend)

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
        require(largest == vocab_size, "model.vocab_size", vocab_size, right)
        return cls(backend)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Read what `save` wrote. Raises `ConfigError` if there is no such file or it is no tokenizer."""
        tokenizers = needs_extra("tokenizers")
        try:
            return cls(tokenizers.Tokenizer.from_file(os.fspath(path)))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"tokenizer {os.fspath(path)!r} cannot be read: {error}") from error

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokenizer to a file (the JSON of Hugging Face `tokenizers`)."""
        self._backend.save(os.fspath(path))

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; no end-of-text id."""
        return self._backend.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in parallel."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; end-of-text ids vanish, bytes that are no UTF-8 become the replacement character."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of some ids. A token may end inside a character: to stream, feed these to an incremental
        decoder (`codecs.getincrementaldecoder("utf-8")("replace")`)."""
        return b"".join([self._pieces[i] for i in ids])

    def token_bytes(self) -> np.ndarray:
        """The number of UTF-8 bytes each id stands for, (vocab,) int32; 0 for the end-of-text id."""
        return np.array([len(piece) for piece in self._pieces], dtype=np.int32)


def _pieces(backend: Any) -> list[bytes]:
    """The bytes of every id. Byte-level BPE writes a byte as a character: printable ones as themselves (in Latin-1),
    the other 68, in order, as the characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    return [b"" if token == END_OF_TEXT else bytes(byte_of[c] for c in token) for token in tokens]
