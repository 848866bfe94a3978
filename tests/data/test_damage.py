"""A corpus that is damaged while it is in use: one line that names the file, and nothing else lost."""

import json
import shutil

import pytest

from gva_jax.config import ConfigError, DataConfig
from gva_jax.data.corpus import DATASET, open_corpus
from gva_jax.data.loader import evaluation_batches, train_iterator
from gva_jax.data.prepare import make
from gva_jax.display import Display


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """400 documents in six rounds of shards."""
    from written import jsonl, lines

    from gva_jax.data.prepare import Recipe

    folder = tmp_path_factory.mktemp("whole")
    source = jsonl(folder / "a.jsonl", lines(400))
    recipe = Recipe(source=source, vocab_size=300, holdout=0.1, shard_bytes=6_000)
    return make(recipe, folder / "corpus", Display(quiet=True))


@pytest.fixture
def corpus(whole, tmp_path):
    """A copy to harm, open."""
    shutil.copytree(whole.folder, tmp_path / "corpus")
    return open_corpus(tmp_path / "corpus")


def shard(corpus, split, number):
    return corpus.folder / DATASET / f"tokens-{split}-{number:05d}.array_record"


def flip(path):
    """The size stays, a few bytes do not."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 40] = bytes(255 - byte for byte in content[middle : middle + 40])
    path.write_bytes(content)


HARMS = {
    "is damaged (its checksum differs)": flip,
    "is missing": lambda path: path.unlink(),
    "has 1,000 bytes, must have": lambda path: path.write_bytes(path.read_bytes()[:1000]),
}


@pytest.mark.parametrize("number", [0, 3, 5])
@pytest.mark.parametrize("told", HARMS)
def test_training_names_the_shard_that_it_cannot_read(corpus, told, number):
    iterator = train_iterator(corpus, DataConfig(batch_size=2, context_length=16))
    path = shard(corpus, "train", number)
    HARMS[told](path)
    with pytest.raises(ConfigError) as error:
        for _ in range(1000):
            next(iterator)
    iterator.close()
    said = str(error.value)
    assert said.startswith(f"shard {str(path)!r} {told}") and "\n" not in said
    assert f"`gva prepare jsonl:{corpus.folder.parents[1]}"[:14] in said and f"--out {corpus.folder}`" in said


@pytest.mark.parametrize("told", HARMS)
def test_evaluation_names_it_too(corpus, told):
    batches = evaluation_batches(corpus, "heldout", DataConfig(batch_size=2, context_length=16))
    HARMS[told](shard(corpus, "heldout", 1))
    with pytest.raises(ConfigError, match="tokens-heldout-00001"):
        list(batches)


def test_a_failure_that_passes_is_none(corpus, monkeypatch):
    documents = corpus.source("train")
    expected = [document["tokens"].tolist() for document in documents.__getitems__([3, 99, 200])]
    monkeypatch.setattr(type(documents._documents), "__getitems__", lambda *_: 1 / 0)
    assert [document["tokens"].tolist() for document in documents.__getitems__([3, 99, 200])] == expected
    assert sum(1 for _ in documents) == len(documents)
    for outside in (-1, len(documents)):
        with pytest.raises(IndexError):
            documents[outside]


def test_a_shard_that_is_whole_but_cannot_be_read_is_named_with_the_reason(corpus, monkeypatch):
    documents = corpus.source("train")

    def fail(*_):
        raise RuntimeError("I/O timeout\nat length")

    for name in ("__getitem__", "__getitems__"):
        monkeypatch.setattr(type(documents._documents), name, fail)
    last = len(documents) - 1
    with pytest.raises(ConfigError, match=r"tokens-train-00005\.array_record' cannot be read: I/O timeout$"):
        documents.__getitems__([last])
    with pytest.raises(ConfigError, match=r"tokens-train-00000\.array_record' cannot be read: I/O timeout$"):
        documents[0]


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_text('{"a": 1')])
def test_what_tfds_keeps_beside_the_shards_is_missed(corpus, name, harm):
    harm(corpus.folder / DATASET / name)
    with pytest.raises(ConfigError, match=r"dataset_info\.json or features\.json is missing or damaged .*: prepare"):
        train_iterator(corpus, DataConfig())


@pytest.mark.parametrize("part", ["shards", "splits", "hash", "tokenizer"])
def test_a_manifest_that_lacks_a_part_is_refused(corpus, part):
    path = corpus.folder / "manifest.json"
    described = json.loads(path.read_text())
    for changed in ({k: v for k, v in described.items() if k != part}, described | {part: [{"file": "a"}]}):
        if part == "hash" and part in changed:
            continue  # any text may be one
        path.write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=r"manifest\.json' is damaged .*: prepare the corpus anew"):
            open_corpus(corpus.folder)


def test_a_missing_tokenizer_is_refused(corpus):
    (corpus.folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json' is missing"):
        open_corpus(corpus.folder)
