"""A corpus is made once, whole, to the same bytes whatever happens, with flat memory and without a network."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import types

import pytest
import tensorflow_datasets as tfds
from rich.console import Console
from written import files, jsonl, lines, words

from gva_jax.config import ConfigError, DataConfig
from gva_jax.data import prepare as module
from gva_jax.data import sources
from gva_jax.data.corpus import open_corpus
from gva_jax.data.loader import train_iterator
from gva_jax.data.prepare import Recipe, make, prepare
from gva_jax.data.tokenizer import Tokenizer
from gva_jax.display import Display

QUIET = Display(quiet=True)


def test_the_second_call_reads_the_first_one_s_files(corpus, data, monkeypatch):
    monkeypatch.setattr(sources.Docstrings, "documents", lambda *_: pytest.fail("scanned again"))
    assert prepare(data, 400, QUIET) == corpus
    layout = dataclasses.replace(data, seed=5, batch_size=3, context_length=7, layout="windows")
    assert prepare(layout, 400, QUIET) == corpus


def test_whatever_changes_the_corpus_changes_its_folder(data, monkeypatch):
    folders, installed = [], []
    monkeypatch.setattr(module, "make", lambda recipe, folder, *_: folders.append(folder))
    monkeypatch.setattr(module, "check_fits", lambda *_: None)
    prepare(data, 400, QUIET)
    prepare(dataclasses.replace(data, seed=3, batch_size=2), 400, QUIET)
    assert len(set(folders)) == 1
    prepare(data, 401, QUIET)
    for changes in ({"holdout": 0.2}, {"max_bytes": 10}, {"source": "docstrings:json"}, {"text_field": "body"}):
        prepare(dataclasses.replace(data, **changes), 400, QUIET)
    monkeypatch.setattr(module, "FORMAT", -1)
    prepare(data, 400, QUIET)
    monkeypatch.setattr(sources.importlib.metadata, "distributions", lambda: installed)
    installed.append(types.SimpleNamespace(metadata={"Name": "new"}, version="1"))
    prepare(data, 400, QUIET)
    assert len(set(folders)) == len(folders) - 1


def test_text_that_changed_is_prepared_anew(recipe, tmp_path):
    data = DataConfig(source=recipe.source, holdout=0.1, directory=str(tmp_path / "cache"))
    old = prepare(data, 300, QUIET)
    jsonl(tmp_path / "in/b.jsonl", lines(260, 150))
    new = prepare(data, 300, QUIET)
    assert sum(s.documents for s in new.splits.values()) == sum(s.documents for s in old.splits.values()) + 10


def test_the_same_text_gives_the_same_files(corpus, data, tmp_path):
    again = prepare(dataclasses.replace(data, directory=str(tmp_path)), 400, QUIET)
    assert dataclasses.replace(again, folder=corpus.folder) == corpus
    assert files(again.folder) == files(corpus.folder)


def test_it_says_what_there_is_and_tfds_says_nothing(tmp_path, capfd):
    out = io.StringIO()
    data = DataConfig(source="docstrings:json,email", holdout=0.2, directory=str(tmp_path))
    corpus = prepare(data, 300, Display(console=Console(file=out, soft_wrap=True)))
    said = out.getvalue().splitlines()[-2:]
    total = {f: sum(getattr(s, f) for s in corpus.splits.values()) for f in ("documents", "bytes", "tokens")}
    assert all(f"{count:,} {name}" in said[0] for name, count in total.items()) and corpus.hash[:12] in said[0]
    assert str(corpus.folder) in said[1]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["docstrings", "text", "jsonl", "parquet", "tfds", "hf"])
def test_prepare_and_train_without_a_network(tmp_path, no_network, kind):
    (tmp_path / "in").mkdir()
    source = {"docstrings": "docstrings:json,email", "tfds": None}.get(kind, f"{kind}:{tmp_path}/in/*")
    if kind == "text":
        (tmp_path / "in/a.txt").write_text("\n<|endoftext|>\n".join(lines(300)))
    elif kind == "jsonl":
        jsonl(tmp_path / "in/a.jsonl", lines(300))
    elif kind in ("parquet", "hf"):
        import pyarrow.parquet

        if kind == "hf":
            pytest.importorskip("datasets", reason="needs the extra data")
            source = f"hf:{tmp_path}/in:train"
        pyarrow.parquet.write_table(pyarrow.table({"text": lines(300)}), tmp_path / "in/train.parquet")
    elif kind == "tfds":

        class Written(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            VERSION, code_path = tfds.core.Version("1.0.0"), None

            def _info(self):
                kinds = tfds.features.FeaturesDict({"text": tfds.features.Text()})
                return tfds.core.DatasetInfo(builder=self, features=kinds)

            def _split_generators(self, dl_manager):
                return {"train": self._generate_examples()}

            def _generate_examples(self):
                for i, text in enumerate(lines(300)):
                    yield i, {"text": text}

        Written(data_dir=tmp_path, file_format="array_record").download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )
        source = f"tfds:{tmp_path}/written/1.0.0:train"
    data = DataConfig(source=source, holdout=0.2, directory=str(tmp_path))
    iterator = train_iterator(prepare(data, 300, QUIET), data)
    assert next(iterator)["inputs"].shape == (8, 256)
    iterator.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from gva_jax.data import prepare
from gva_jax.display import Display

kind, at = sys.argv[3], int(sys.argv[4])
owner, name = {"write": (prepare.ShardWriter, "write"), "record": (prepare._Progress, "save"),
               "finish": (prepare, "write_metadata"), "manifest": (prepare, "write_manifest"),
               "tokenizer": (prepare.Tokenizer, "save")}[kind]
real, calls = getattr(owner, name), []

def counted(*args):
    calls.append(args)
    if len(calls) == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)

setattr(owner, name, counted)
recipe = prepare.Recipe(source=sys.argv[1], vocab_size=300, holdout=0.1, shard_bytes=6_000)
prepare.make(recipe, Path(sys.argv[2]), Display(quiet=True))
"""


def test_killed_anywhere_the_same_call_finishes_to_the_same_bytes(recipe, tmp_path):
    """One folder is killed again and again, each time at another place and further on; another once, at its end."""
    whole = files(make(recipe, tmp_path / "whole", QUIET).folder)
    assert len(whole) > 15

    def kill(folder, kind, at):
        command = [sys.executable, "-c", KILLED, recipe.source, folder, kind, str(at)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not folder.exists()

    done = []
    for kind, at in (("tokenizer", 1), ("write", 200), ("record", 2), ("manifest", 1)):
        kill(tmp_path / "often", kind, at)
        progress = tmp_path / "often.partial/progress.json"
        done.append(len(json.loads(progress.read_text())["shards"]) if progress.exists() else 0)
    assert 0 == done[0] < done[1] < done[2] < done[3] and done[2] % 3 == 0
    out = io.StringIO()
    assert files(make(recipe, tmp_path / "often", Display(console=Console(file=out, soft_wrap=True))).folder) == whole
    assert "continuing" in out.getvalue() and "after 400 documents" in out.getvalue()
    assert sorted(os.listdir(tmp_path)) == ["in", "often", "whole"]


def test_what_was_begun_is_not_mixed_with_something_else(recipe, tmp_path, monkeypatch):
    """Interrupted in the second file: changes before that refuse, a mended or added file after it does not."""
    bad = tmp_path / "in/c.jsonl"
    bad.write_text('{"text": "fine"}\n{"tixt": "wrong"}\n')
    out = tmp_path / "out"
    Tokenizer.train(lines(50), 280).save(tmp_path / "mine.json")  # given, so that the text is read once
    recipe = dataclasses.replace(recipe, tokenizer=str(tmp_path / "mine.json"))
    with pytest.raises(sources.BadInput, match=r"c.jsonl:2: no field 'text'; there are tixt"):
        make(recipe, out, QUIET)
    assert not out.exists() and (tmp_path / "out.partial").exists()
    with pytest.raises(ConfigError, match=r"out.partial' holds another corpus \(holdout: 0.1 -> 0.2\): remove it"):
        make(dataclasses.replace(recipe, holdout=0.2), out, QUIET)
    first = (tmp_path / "in/a.jsonl").stat()
    os.utime(tmp_path / "in/a.jsonl", (1, 1))
    with pytest.raises(ConfigError, match=r"out.partial' holds another corpus \(its input has changed since\)"):
        make(recipe, out, QUIET)
    os.utime(tmp_path / "in/a.jsonl", ns=(first.st_atime_ns, first.st_mtime_ns))
    jsonl(bad, lines(30, 400))
    mended = make(recipe, out, QUIET)
    assert files(mended.folder) == files(make(recipe, tmp_path / "again", QUIET).folder)
    assert sorted(os.listdir(tmp_path)) == ["again", "in", "mine.json", "out"]


def test_what_a_hub_has_given_is_kept_when_it_fails(hub, tmp_path):
    _, records = hub
    records[:] = [{"text": text} for text in lines(400)]
    Tokenizer.train(lines(50), 280).save(tmp_path / "mine.json")
    recipe = Recipe("hf:a/b:train", tokenizer=str(tmp_path / "mine.json"), holdout=0.1, shard_bytes=6_000)
    whole = files(make(recipe, tmp_path / "whole", QUIET).folder)
    record, records[300] = records[300], OSError("connection lost")
    with pytest.raises(ConfigError, match="connection lost"):
        make(recipe, tmp_path / "out", QUIET)
    load, sys.modules["datasets"].load_dataset = sys.modules["datasets"].load_dataset, lambda *_, **__: 1 / 0
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        make(recipe, tmp_path / "out", QUIET)
    sys.modules["datasets"].load_dataset, records[300] = load, record
    records[:100] = [OSError("asked for again")] * 100
    assert files(make(recipe, tmp_path / "out", QUIET).folder) == whole


def test_what_is_there_already_is_checked(recipe, tmp_path):
    corpus = make(recipe, tmp_path / "out", QUIET)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert make(recipe, tmp_path / "out", QUIET, verify=True) == corpus
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/progress.json").write_text("{}")  # as one leaves it that is killed at its very end
    assert make(recipe, tmp_path / "out", QUIET) == corpus
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    with pytest.raises(ConfigError, match=r"holds another corpus \(max_bytes: None -> 5\): remove it"):
        make(dataclasses.replace(recipe, max_bytes=5), tmp_path / "out", QUIET)
    shard = next((tmp_path / "out").rglob("*-train-00001*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    assert open_corpus(tmp_path / "out") == corpus  # which looks at sizes
    with pytest.raises(ConfigError, match=r"train-00001.array_record' is damaged"):
        make(recipe, tmp_path / "out", QUIET, verify=True)
    shard.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"train-00001.array_record' has [0-9,]+ bytes, must have"):
        open_corpus(tmp_path / "out")
    shard.unlink()
    with pytest.raises(ConfigError, match=r"train-00001.array_record' is missing"):
        open_corpus(tmp_path / "out")


def test_of_two_that_prepare_at_once_one_waits_for_the_other(recipe, tmp_path, monkeypatch):
    real, made, found = module._fill, [], []
    monkeypatch.setattr(module, "_fill", lambda *args: made.append(args) or real(*args))
    threads = [threading.Thread(target=lambda: found.append(make(recipe, tmp_path / "out", QUIET))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(found) == 2 and found[0] == found[1]
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


MEASURED = """
import resource, sys
from pathlib import Path
from gva_jax.data.prepare import Recipe, make
from gva_jax.display import Display

for name in ("small", "large"):
    recipe = Recipe(f"jsonl:{name}.jsonl", tokenizer="mine.json", holdout=0.1, shard_bytes=2_000_000)
    make(recipe, Path(name), Display(quiet=True))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_stays_flat(tmp_path):
    """After 4 MB of text 24 MB need no more (kept as text or as tokens they would)."""
    words(("x", "<eos>"), tmp_path / "mine.json")
    for name, times in (("small", 400), ("large", 2400)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": f"{i}" + " 12345678901234567" * 600}) + "\n" for i in range(times))
    command = [sys.executable, "-c", MEASURED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    small, large = map(int, done.stdout.split())
    assert open_corpus(tmp_path / "large").splits["train"].bytes > 15_000_000
    assert large - small < 12, f"{small} MB, then {large} MB"
