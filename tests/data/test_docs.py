"""docs/data.md: what it shows runs, and what it names exists."""

import json
import re
import shlex
from pathlib import Path

import numpy as np

from gva_jax.cli import main
from gva_jax.data.sources import KINDS
from gva_jax.options import PrepareOptions, TrainOptions, option_names

TEXT = (Path(__file__).parents[2] / "docs/data.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(line) for kind, block in BLOCKS for line in block.splitlines() if line.startswith("gva ")]


def test_options_and_sources_that_are_named_exist():
    known = {
        "prepare": [name.replace("_", "-") for name in option_names(PrepareOptions)],
        "train": option_names(TrainOptions),
    }
    assert len(COMMANDS) == 4
    for _, command, *args in COMMANDS:
        assert {arg[2:] for arg in args if arg.startswith("--")} <= set(known[command])
    named = re.findall(r"`--([\w-]+)", TEXT)
    assert named and set(named) <= set(known["prepare"])
    assert {name.partition(":")[0] for name in re.findall(r"^\| `([a-z]+)", TEXT, flags=re.MULTILINE)} == set(KINDS)


def test_the_first_commands_and_the_example_run(tmp_path, monkeypatch, capsys):
    import gzip

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages").mkdir()
    texts = [" ".join(f"{(i * k) % 9973}" for k in range(1, 200)) for i in range(1, 400)]
    with gzip.open("pages/a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in texts)
    prepare, train = COMMANDS[:2]
    assert main([*prepare[1:], "--vocab-size", "400", "--holdout", "0.1"]) == 0
    scope = {}
    exec(next(block for kind, block in BLOCKS if kind == "python"), scope)
    assert scope["documents"][0]["tokens"].dtype == np.uint16
    # The corpus is found; the model needs an id for every token.
    assert main([*train[1:], "--model.vocab_size", "300", "--data.batch_size", "8"]) == 2
    assert "model.vocab_size = 300: must be 400 or more" in capsys.readouterr().err
