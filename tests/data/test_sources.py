"""Every kind of source: its documents in order, again from any point, and what it says of bad input."""

import bz2
import gzip
import json
import lzma
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

from gva_jax.config import ConfigError
from gva_jax.data import files
from gva_jax.data.sources import BadInput, open_source
from gva_jax.display import Display

QUIET = Display(quiet=True)
TEXTS = [f"Document {i} of them, with ü and 日本.\nIt has {'two ' * (i % 5)}lines." for i in range(40)]


def opened(source, field="text"):
    return open_source(str(source), field, QUIET)


def read(source, field="text") -> list[str]:
    return list(opened(source, field).documents())


def write_jsonl(path, texts=TEXTS, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))


def write_parquet(path, texts=TEXTS, rows=7):
    pa.parquet.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=rows)


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """A prepared TFDS data set with the texts."""

    class Written(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        code_path = None

        def _info(self):
            kinds = tfds.features.FeaturesDict({"text": tfds.features.Text(), "n": np.int64})
            return tfds.core.DatasetInfo(builder=self, features=kinds, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(TEXTS), "other": self._generate_examples(TEXTS[:3])}

        def _generate_examples(self, texts):
            for i, text in enumerate(texts):
                yield i, {"text": text, "n": i}

    folder = tmp_path_factory.mktemp("tfds")
    builder = Written(data_dir=folder, file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    return folder / "written" / "1.0.0"


def make(kind: str, folder, tfds_folder) -> str:
    """A source of a kind whose documents are `TEXTS`."""
    half = len(TEXTS) // 2
    if kind == "text":
        (folder / "a.txt").write_text("\n<|endoftext|>\n".join(TEXTS[:half]))
        (folder / "b.txt").write_text("\n<|endoftext|>\n\n".join(TEXTS[half:]) + "\n")
    elif kind == "jsonl":
        write_jsonl(folder / "a.jsonl", TEXTS[:half])
        write_jsonl(folder / "b.jsonl", TEXTS[half:])
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", TEXTS[:half])
        write_parquet(folder / "b.parquet", TEXTS[half:])
    elif kind == "hf":
        pytest.importorskip("datasets", reason="needs the extra data")
        write_parquet(folder / "train-0.parquet", TEXTS[:half])
        write_parquet(folder / "train-1.parquet", TEXTS[half:])
        return f"hf:{folder}:train"
    elif kind == "tfds":
        return f"tfds:{tfds_folder}:train"
    return f"{kind}:{folder}/*"


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "tfds", "hf"])
def test_the_documents_come_in_order_and_again_from_any_point(kind, tmp_path, tfds_folder):
    name = make(kind, tmp_path, tfds_folder)
    source, found, positions = opened(name), [], []
    for text in source.documents():
        found.append(text)
        positions.append(json.loads(json.dumps(source.position)))
    assert found == TEXTS
    assert source.total in (None, source.done)
    for i in (0, 6, 7, 19, 20, 38, 39):
        again = opened(name)
        assert list(again.documents(positions[i])) == TEXTS[i + 1 :]
        assert again.done == source.done
    same = opened(name)
    assert list(same.documents()) == list(same.documents()) == TEXTS  # twice over the same object
    assert json.loads(json.dumps(same.identity())) == opened(name).identity()


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
def test_compressed_files(tmp_path, ending):
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.get(ending)
    packed = pack(data) if pack else pa.compress(data, codec="zstd", asbytes=True)
    (tmp_path / f"a.jsonl.{ending}").write_bytes(packed)
    source = opened(f"jsonl:{tmp_path}/*")
    documents = source.documents()
    assert [next(documents) for _ in range(5)] == TEXTS[:5] and source.total is None
    assert list(opened(f"jsonl:{tmp_path}/*").documents(source.position)) == TEXTS[5:]
    (tmp_path / f"a.jsonl.{ending}").write_bytes(packed[:-40])
    with pytest.raises(BadInput, match=f"a.jsonl.{ending}: cannot be read"):
        read(f"jsonl:{tmp_path}/*")


def test_a_long_text_is_cut_at_empty_lines_and_a_short_one_is_not(tmp_path):
    paragraph = "A line of this long text, as good as any other.\n" * 20
    (tmp_path / "short.txt").write_text(f"{'a' * 99}\n\nb\n")
    (tmp_path / "tall.txt").write_text(f"{paragraph}\n" * 40)
    tall, short = "".join(read(f"text:{tmp_path}/tall.txt")), read(f"text:{tmp_path}/short.txt")
    assert short == [f"{'a' * 99}\n\nb"]
    pieces = read(f"text:{tmp_path}/tall.txt")
    assert len(pieces) == 8 and all(files.PIECE < len(piece) < 2 * files.PIECE for piece in pieces)
    assert tall.replace("\n", "") == (paragraph * 40).replace("\n", "")


@pytest.mark.parametrize("alphabet", ["x", "日本語の", "é"])
def test_a_line_without_end_is_cut_between_characters(tmp_path, alphabet, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1000)
    text = "a" + alphabet * 3000
    (tmp_path / "a.txt").write_text(text)
    pieces = read(f"text:{tmp_path}/a.txt")
    assert "".join(pieces) == text and all(len(piece.encode()) <= 1004 for piece in pieces)


def test_a_byte_order_mark_and_empty_documents_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfText.\r\nMore.\r\n")
    assert read(f"text:{tmp_path}/a.txt") == ["Text.\r\nMore."]
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "One"}\n\n{"text": " \\n"}\n{"text": "Two"}')
    assert read(f"jsonl:{tmp_path}/a.jsonl") == ["One", "Two"]
    (tmp_path / "b.txt").write_bytes(b"")
    assert read(f"text:{tmp_path}/b.txt") == []


BAD_LINES = [
    (b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl:2: not UTF-8 \(byte 0xff, column 11\)"),
    (b'{"text": "a"}\n\n{"txt": "b", "id": 1}\n', r"a.jsonl:3: no field 'text'; there are txt, id"),
    (b'{"text": "a"}\n{"text": "b"', r"a.jsonl:2: not JSON \(Expecting ',' delimiter"),
    (b'["text"]\n', r"a.jsonl:1: must be a JSON object with a field 'text'"),
    (b'{"text": null}\n', r"a.jsonl:1: field 'text' is NoneType, must be a string"),
    (b'{"text": "a \\ud800"}\n', r"a.jsonl:1: field 'text' is not text \(surrogates not allowed at character 2\)"),
    (b"[" * 100_000, r"a.jsonl:1: not JSON"),
    (b'{"n": ' + b"1" * 5000 + b', "text": "a"}', r"a.jsonl:1: not JSON"),
]


@pytest.mark.parametrize(("content", "message"), BAD_LINES)
def test_a_bad_line_is_told_by_file_and_number(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        read(f"jsonl:{tmp_path}/*.jsonl")
    assert "\n" not in str(error.value)


def test_bad_text_files_and_tables(tmp_path, tfds_folder):
    (tmp_path / "a.txt").write_bytes(b"fine\nfine too\nna\xefve\n")
    with pytest.raises(BadInput, match=r"a.txt:3: not UTF-8 \(byte 0xef, column 3\)"):
        read(f"text:{tmp_path}/a.txt")
    (tmp_path / "b.txt").write_bytes("half é".encode()[:-1])
    with pytest.raises(BadInput, match=r"b.txt:1: not UTF-8 \(byte 0xc3, column 6\)"):
        read(f"text:{tmp_path}/b.txt")
    with pytest.raises(BadInput, match=r"a.txt: is no Parquet file"):
        read(f"parquet:{tmp_path}/a.txt")
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a.parquet: no field 'body'; there are id, text"):
        opened(f"parquet:{tmp_path}/a.parquet", "body")
    with pytest.raises(BadInput, match=r"a.parquet: row 1: field 'id' is int, must be a string"):
        read(f"parquet:{tmp_path}/a.parquet", "id")
    write_parquet(tmp_path / "null.parquet", [*TEXTS[:20], None])
    with pytest.raises(BadInput, match=r"null.parquet: row 21: field 'text' is NoneType"):
        read(f"parquet:{tmp_path}/null.parquet")
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"fine", b"na\xefve"]).buffers())
    pa.parquet.write_table(pa.table({"text": broken}), tmp_path / "broken.parquet")
    with pytest.raises(BadInput, match=r"broken.parquet: row 2: field 'text' is not UTF-8 \(.* at byte 2\)"):
        read(f"parquet:{tmp_path}/broken.parquet")
    pa.parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:4] + b"\0" * 400 + whole[404:])
    with pytest.raises(BadInput, match=r"a.parquet: cannot be read"):
        read(f"parquet:{tmp_path}/a.parquet")
    with pytest.raises(BadInput, match=r"tfds:.*: record 0: no field 'body'; there are n, text"):
        read(f"tfds:{tfds_folder}:train", "body")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("txt:*", "did you mean text"),
        ("docstring", "did you mean docstrings"),
        ("", "known are docstrings"),
        ("text:", "no file matches"),
        ("jsonl:/nowhere/*", "no file matches"),
        ("tfds:mnist", "must be tfds:NAME:SPLIT"),
        ("hf:HuggingFaceFW/fineweb-edu", "must be hf:NAME:SPLIT or hf:NAME/CONFIG:SPLIT"),
    ],
)
def test_a_source_that_does_not_exist_is_refused(source, message):
    with pytest.raises(ConfigError, match=message) as error:
        opened(source)
    assert repr(source) in str(error.value) and "\n" not in str(error.value)


def test_a_tfds_data_set_that_does_not_exist_is_refused(tfds_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "importlib_resources", types.ModuleType("importlib_resources"))
    with pytest.raises(ConfigError, match="DatasetNotFoundError: Dataset no_such_data_set not found"):
        opened("tfds:no_such_data_set:train")
    with pytest.raises(ConfigError, match=r"nosplit"):
        opened(f"tfds:{tfds_folder}:nosplit")


# ---- the Hugging Face hub, which no test can reach -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "config", "split"),
    [
        ("hf:HuggingFaceFW/fineweb-edu:train", "HuggingFaceFW/fineweb-edu", None, "train"),
        ("hf:HuggingFaceFW/fineweb-edu/sample-10BT:train", "HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
        ("hf:imdb:train", "imdb", None, "train"),
    ],
)
def test_what_the_hub_is_asked_for(hub, source, name, config, split):
    asked, records = hub
    records += [{"text": text} for text in TEXTS]
    opening = opened(source)
    assert not asked  # nothing is asked for before it is read
    documents = opening.documents()
    assert [next(documents) for _ in range(7)] == TEXTS[:7]
    assert asked == [((name, config), {"split": split, "streaming": True})]
    assert list(opened(source).documents(opening.position)) == TEXTS[7:]


def test_what_the_hub_refuses_is_one_line(hub):
    _, records = hub
    records += [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    with pytest.raises(BadInput, match="record 1: no field 'body'; there are text, id"):
        read("hf:a/b:train", "body")
    records[5] = OSError("connection lost\nat some place")
    with pytest.raises(BadInput, match=r"'hf:a/b:train': OSError: connection lost \(after 5 records\)"):
        read("hf:a/b:train")
    sys.modules["datasets"].load_dataset = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ConfigError, match="'hf:a/b:train': ZeroDivisionError"):
        read("hf:a/b:train")


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"datasets: needs the extra: pip install 'gva-jax\[data\]'"):
        read("hf:a/b:train")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pyarrow.parquet: needs the extra: pip install 'gva-jax\[data\]'"):
        opened(f"parquet:{__file__}")
    monkeypatch.setitem(sys.modules, "importlib_resources", None)
    with pytest.raises(ConfigError, match=r"importlib_resources: needs the extra: pip install 'gva-jax\[data\]'"):
        opened("tfds:a:train")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ConfigError, match=r"tensorflow_datasets: needs the extra: pip install 'gva-jax\[train\]'"):
        opened("tfds:a:train")
