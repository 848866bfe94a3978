"""Round trips, sizes and determinism of the tokenizer."""

import codecs
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

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
        "import sys; from gva_jax.data.docstrings import documents; from gva_jax.data.tokenizer import Tokenizer\n"
        "from gva_jax.display import Display\n"
        "Tokenizer.train(documents('docstrings:json,logging', Display(quiet=True)), 700).save(sys.argv[1])"
    )
    for seed, threads in ((1, 1), (2, 4)):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-c", code, tmp_path / str(seed)], env=environment, check=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_vocabulary_that_the_text_cannot_fill_is_refused_and_the_largest_one_named():
    with pytest.raises(ConfigError, match=r"vocab_size = 5000: must be (\d+) or less") as error:
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


# ---- tokenizers of others --------------------------------------------------------------------------------------------


def of_sentence_pieces(**model):
    """As SentencePiece tokenizers are converted: a lower block for a space, bytes where a character is unknown."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocabulary |= {piece: 259 + i for i, piece in enumerate(("▁", "▁the", "k", "e", "y", "t", "h", "he", "▁t"))}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he")]
    model = dict(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True) | model
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    return backend


def test_a_tokenizer_of_sentence_pieces(tmp_path):
    of_sentence_pieces().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.eot_id == 2 and tokenizer.vocab_size == 268
    for text in ("the key", " the key the key", "naïve 🎉 the", "</s>a<s>"):
        ids = tokenizer.encode(text)  # neither cut, filled up nor framed, as the file asks
        assert tokenizer.decode(ids) == text and tokenizer.encode_batch([text, ""]) == [ids, []]
        assert not {1, 2} & set(ids) and tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert len(tokenizer.encode(" the key")) == 5
    assert tokenizer.decode([1, 2, 261, 2]) == "k" and tokenizer.decode([261, 5000]) == "k"


def test_a_byte_level_tokenizer_with_more_tokens(tokenizer, tmp_path):
    """Ids with a hole, tokens added as text, and special ones that stand for nothing."""
    tokenizer.save(tmp_path / "tokenizer.json")
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    described["added_tokens"] += [
        {"id": 280, "content": "  ", "special": False, **flags},
        {"id": 290, "content": "<|user|>", "special": True, **flags},
    ]
    (tmp_path / "more.json").write_text(json.dumps(described))
    more = Tokenizer.load(tmp_path / "more.json")
    assert more.vocab_size >= 282 and more.eot_id == 0
    for text in ("The  value", "a <|user|>"):
        assert more.decode(more.encode(text)) == text
    assert 280 in more.encode("The  value") and more.token_bytes()[280] == 2


def test_a_tokenizer_of_words_gives_words():
    vocabulary = {word: i for i, word in enumerate(("[UNK]", "[EOS]", "the", "key", "##s"))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.Whitespace(), tokenizers.decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.eot_id == 1 and tokenizer.decode(tokenizer.encode("the keys")) == " the keys"


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "mute.json"))
    with pytest.raises(ConfigError, match=r"mute.json' has no end-of-text id: it must know one of <\|endoftext\|>, "):
        Tokenizer.load(tmp_path / "mute.json")


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs the extra: pip install 'gva-jax\[train\]'"):
        Tokenizer.train(TEXTS, 300)
