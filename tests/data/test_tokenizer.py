"""Round trips, sizes and determinism of the tokenizer."""

import codecs
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from gva_jax.config import ConfigError
from gva_jax.data.tokenizer import Tokenizer

TEXTS = [f"The {a} of the {b} is not the {b} of the {a}." for a in ("value", "key", "query") for b in ("head", "group")]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 280)


def test_the_vocabulary_is_all_bytes_the_end_of_text_and_whole_words(tokenizer):
    assert tokenizer.vocab_size == 280 and tokenizer.eot_id == 0
    lengths = tokenizer.token_bytes()
    assert lengths.shape == (280,) and lengths.dtype == np.int32
    assert lengths[0] == 0 and (lengths[1:257] == 1).all() and (lengths[257:] > 1).all()
    assert {tokenizer.decode_bytes([i]) for i in range(1, 257)} == {bytes([i]) for i in range(256)}
    assert len(tokenizer.encode(" the")) == 1


@pytest.mark.parametrize(
    "text",
    ["", " ", "The value.", "a\n\n\tb  c \r\n", "naïve Größe", "日本 🎉", "\x00\x7f\x80\xad\u2028", "a <|endoftext|>"],
)
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert 0 not in ids
    assert tokenizer.token_bytes()[np.array(ids, int)].sum() == len(text.encode())
    assert tokenizer.encode_batch([text, "x"])[0] == ids


def test_random_unicode_comes_back(tokenizer):
    rng = random.Random(0)
    points = [i for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    for _ in range(50):
        text = "".join(map(chr, rng.choices(points, k=20)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_drops_the_end_of_text_and_survives_half_a_character(tokenizer):
    ids = tokenizer.encode("é 🎉")
    assert tokenizer.decode([0, *ids, 0]) == "é 🎉"
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    stream = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [stream.decode(tokenizer.decode_bytes([i])) for i in ids]
    assert "".join(pieces) == "é 🎉" and "\ufffd" not in "".join(pieces)
    assert tokenizer.decode(np.array(ids)) == "é 🎉"


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    text = "The key of <|endoftext|> the head 🎉"
    assert loaded.encode(text) == tokenizer.encode(text) and loaded.decode(loaded.encode(text)) == text
    assert (loaded.token_bytes() == tokenizer.token_bytes()).all()


def test_training_gives_the_same_tokenizer_in_every_process(tmp_path):
    code = (
        "import sys; from gva_jax.data.sources import documents; from gva_jax.data.tokenizer import Tokenizer\n"
        "from gva_jax.display import Display\n"
        "Tokenizer.train(documents('docstrings:json,logging', Display(quiet=True)), 700).save(sys.argv[1])"
    )
    for seed, threads in ((1, 1), (2, 4)):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-c", code, tmp_path / str(seed)], env=environment, check=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_vocabulary_that_the_text_cannot_fill_is_refused_and_the_largest_one_named():
    with pytest.raises(ConfigError, match=r"model.vocab_size = 5000: must be (\d+) or less") as error:
        Tokenizer.train(TEXTS, 5000)
    largest = int(str(error.value).split("must be ")[1].split()[0])
    assert Tokenizer.train(TEXTS, largest).vocab_size == largest
    with pytest.raises(ConfigError):
        Tokenizer.train(TEXTS, largest + 1)


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    assert Tokenizer.train(TEXTS, 257).vocab_size == 257
    with pytest.raises(ConfigError, match="= 256: must be 257 or more"):
        Tokenizer.train(TEXTS, 256)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "none.json"):
        with pytest.raises(ConfigError, match=f"{name}' cannot be read"):
            Tokenizer.load(tmp_path / name)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs the extra: pip install 'gva-jax\[train\]'"):
        Tokenizer.train(TEXTS, 300)
