"""`gva prepare`, training on what it wrote, and everything that is refused: one line, and nothing left behind."""

import dataclasses
import os
import subprocess
import sys

import pytest
from written import files, jsonl, lines, words

from gva_jax import cli
from gva_jax.config import ConfigError, DataConfig
from gva_jax.data import sources
from gva_jax.data.loader import train_iterator
from gva_jax.data.prepare import make, prepare
from gva_jax.display import Display

QUIET = Display(quiet=True)


@pytest.mark.parametrize(
    ("changes", "vocab_size", "message"),
    [
        ({"source": "hf:a/b"}, 300, "source = 'hf:a/b': must be hf:NAME:SPLIT"),
        (
            {"max_bytes": 10},
            300,
            "none of its documents, if it has any, is in the train split: lower holdout = .*, raise max_bytes = 10, or",
        ),
        ({"holdout": 1e-9}, 300, "is in the development split: raise holdout = 1e-09"),
        ({}, 256, "vocab_size = 256: must be 257 or more"),
        ({}, 10**6, "vocab_size = 1000000: must be [0-9]+ or less"),
        ({"directory": __file__}, 300, "must be a folder that can be written to"),
        ({"tokenizer": "none.json"}, 300, "tokenizer = 'none.json': no such file"),
        ({"tokenizer": __file__}, 300, "cannot be read"),
    ],
)
def test_what_cannot_be_prepared_is_refused(tmp_path, changes, vocab_size, message):
    data = DataConfig(source="docstrings:json,email", holdout=0.2, directory=str(tmp_path))
    with pytest.raises(ConfigError, match=message) as error:
        prepare(dataclasses.replace(data, **changes), vocab_size, QUIET)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "data").exists() or os.listdir(tmp_path / "data") == []


def test_missing_tfds_names_the_extra(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ConfigError, match=r"tensorflow_datasets: needs the extra: pip install 'gva-jax\[train\]'"):
        make(recipe, tmp_path / "out", QUIET)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_lies_where_it_works_is_left_alone(recipe, tmp_path, kind):
    there = tmp_path / "out.partial"
    if kind == "folder":
        there.mkdir()
        there = there / "thesis.txt"
    there.write_text("years of work")
    with pytest.raises(ConfigError, match=r"out.partial' is in the way, of something else: move it"):
        make(recipe, tmp_path / "out", QUIET)
    assert there.read_text() == "years of work" and not (tmp_path / "out").exists()


def test_a_prepared_folder_is_trained_on_if_its_tokens_fit(recipe, tmp_path):
    corpus = make(recipe, tmp_path / "out", QUIET)
    data = DataConfig(source=f"prepared:{tmp_path}/out", context_length=16)
    assert prepare(data, 300, QUIET) == prepare(data, 512, QUIET) == corpus
    iterator = train_iterator(corpus, data)
    assert next(iterator)["inputs"].shape == (8, 16)
    iterator.close()
    right = "model.vocab_size = 299: must be 300 or more: the tokenizer of '.*out' has ids up to 299"
    with pytest.raises(ConfigError, match=right):
        prepare(data, 299, QUIET)
    for changes, message in (
        ({"max_bytes": 5}, "data.max_bytes = 5: must be None"),
        ({"tokenizer": "a.json"}, "data.tokenizer = 'a.json': must be None"),
        ({"source": f"prepared:{tmp_path}/none"}, "none': no such folder"),
        ({"source": f"prepared:{tmp_path}/in"}, "in': holds no readable manifest.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(dataclasses.replace(data, **changes), 300, QUIET)
    (tmp_path / "out/tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json' is missing or not the one"):
        prepare(data, 300, QUIET)
    (tmp_path / "out/manifest.json").write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="manifest has format 1, this version reads 2"):
        prepare(data, 300, QUIET)


# ---- the command -----------------------------------------------------------------------------------------------------


def gva(capsys, *argv) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["prepare", recipe.source, "--out", "out", "--vocab-size", 300, "--holdout", 0.1]
    code, out, err = gva(capsys, *command, "--shard-megabytes", 0.006)
    assert (code, err) == (0, "")
    assert out.endswith("to train: gva train CONFIG --data.source prepared:out --model.vocab_size 300\n")
    assert files(tmp_path / "out") == files(make(recipe, tmp_path / "same", QUIET).folder)
    assert gva(capsys, *command, "--shard-megabytes", 0.006)[0] == 0
    code, _, err = gva(capsys, *command)
    assert code == 2 and "'out' holds another corpus (shard_bytes: 6000 -> 256000000)" in err and err.count("\n") == 1


FULL = """
import resource, sys
from gva_jax import cli

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(cli.main(["prepare", sys.argv[2], "--out", "out", "--vocab-size", "300"]))
"""


@pytest.mark.parametrize("limit", [10_000, 100_000])
def test_a_disk_that_fills_up_is_one_line(tmp_path, limit):
    """In the tokenizer's file, and in a shard's."""
    source = jsonl(tmp_path / "a.jsonl", lines(2000))
    command = [sys.executable, "-c", FULL, str(limit), source]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: 'out.partial' cannot be written: ") and "File too large" in done.stderr
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["text:*"], "out"),
        (["--out", "out"], "SOURCE"),
        (["txt:*", "--out", "out"], "did you mean text?"),
        (["text:none*", "--out", "out"], "source = 'text:none*': no file matches the pattern"),
        (["jsonl:bad.jsonl", "--out", "out"], "bad.jsonl:2: not UTF-8 (byte 0xff, column 11)"),
        (["jsonl:bad.jsonl", "--out", "out", "--text-field", "body"], "bad.jsonl:1: no field 'body'; there are text"),
        (["jsonl:bad.jsonl", "--out", "out", "--feld", "body"], "no option --feld; did you mean --text_field?"),
        (["jsonl:bad.jsonl", "--out", "bad.jsonl"], "'bad.jsonl': holds no readable manifest.json"),
        (["jsonl:bad.jsonl", "--out", "out", "--tokenizer", "mute.json"], "'mute.json' has no end-of-text id"),
        (["jsonl:bad.jsonl", "--out", "out", "--holdout", "0.5"], "holdout = 0.5: must lie between"),
        (["jsonl:bad.jsonl", "--out", "out", "--shard-megabytes", "0"], "shard_megabytes = 0.0: must be above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    words(("a",), tmp_path / "mute.json")
    code, _, err = gva(capsys, "prepare", *argv)
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("error: ") and message in err
    assert sorted(os.listdir()) == ["bad.jsonl", "mute.json"]


def test_the_help_names_every_source_and_option(capsys):
    code, out, _ = gva(capsys, "prepare", "--help")
    assert code == 0
    for name in (*sources.KINDS, "--out", "--tokenizer", "--text-field", "--holdout", "prepared:DIR"):
        assert name in out


def test_importing_the_package_stays_light():
    code = (
        "import sys, gva_jax.data.prepare, gva_jax.data.loader, gva_jax.data.files, gva_jax.data.hubs\n"
        "heavy = {'jax', 'grain', 'tensorflow_datasets', 'tokenizers', 'tensorflow', 'pyarrow', 'datasets'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
