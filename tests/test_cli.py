"""The command line: overrides, help, and every user's mistake in one line, without a traceback or a trace on disk."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from readme import block_with

from gva_jax import cli, config, runtime
from gva_jax.continuations import Growing
from gva_jax.display import Display
from gva_jax.options import GenerateOptions, TrainOptions, nearest, option_names, parse, parse_with_config


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory; commands that fail must leave it so."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def overridden(*args):
    return parse_with_config(TrainOptions, ["quickstart", *args], "gva train", "").config


# ---- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "changed"),
    [
        ([], []),
        (["--train.steps", "50"], ["train.steps: {} -> 50"]),
        (["--train.steps=50"], ["train.steps: {} -> 50"]),
        (["--model.attention.rope_dim", "24"], ["model.attention.rope_dim: {} -> 24"]),
        (["--model.attention.rope-dim=24"], ["model.attention.rope_dim: {} -> 24"]),
        (["--model.attention.rope_dim", "None"], ["model.attention.rope_dim: {} -> None"]),
        (["--model.attention.q_norm", "False"], ["model.attention.q_norm: {} -> False"]),
        (["--optimizer.learning_rate", "1e-4"], ["optimizer.learning_rate: {} -> 0.0001"]),
        (["--data.layout", "windows", "--name", "b"], ["name: {} -> 'b'", "data.layout: {} -> 'windows'"]),
        (["--sample.prompts", "One", "two words"], ["sample.prompts: {} -> ('One', 'two words')"]),
    ],
)
def test_overrides_change_what_they_name_and_nothing_else(args, changed):
    base = config.load("quickstart")

    def old(path):
        value = base
        for part in path.split("."):
            value = getattr(value, part)
        return repr(value)

    expected = [line.format(old(line.partition(":")[0])) for line in changed]
    assert config.difference(base, overridden(*args)) == expected


def test_heads_and_groups_are_judged_together_not_one_by_one():
    """12 heads do not fit quickstart's groups, and neither do 4 groups its heads; both at once are fine."""
    attention = overridden("--model.attention.num_heads", "12", "--model.attention.num_kv_heads", "4").model.attention
    assert (attention.num_heads, attention.num_kv_heads) == (12, 4)


def test_the_config_may_follow_its_overrides_flag():
    assert parse_with_config(TrainOptions, ["--train.steps=5", "quickstart"], "gva train", "").config.train.steps == 5


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("train.stepz", "train.steps"),
        ("steps", "train.steps"),
        ("rope_dim", "model.attention.rope_dim"),
        ("model.rope_dim", "model.attention.rope_dim"),
        ("data.contxt_length", "data.context_length"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
    ],
)
def test_the_nearest_name(given, meant):
    assert nearest(given, option_names(TrainOptions)) == meant


# ---- help ------------------------------------------------------------------------------------------------------------


def run(capsys, *argv):
    """Exit code, standard output, standard error of `gva ARGV`."""
    code = cli.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_overview_lists_commands_and_configs(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    for name in (*cli.COMMANDS, *config.shipped()):
        assert name in out


def test_version(capsys):
    assert run(capsys, "--version")[:2] == (0, "gva-jax 0.1.0\n")


@pytest.mark.parametrize("command", ["train", "info"])
def test_help_without_a_config_says_what_to_give(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "CONFIG is a file" in out and "quickstart" in out


@pytest.fixture
def help_of(capsys, monkeypatch):
    """Reads `gva train CONFIG --help` into {option: meaning and default}."""
    monkeypatch.setenv("COLUMNS", "80")  # one column of boxes

    def read(name):
        code, out, _ = run(capsys, "train", name, "--help")
        assert code == 0
        entries, option = {}, None
        for row in (row.strip(" │") for row in out.splitlines()):
            if not row.strip("─╭╮╰╯-"):
                option = None
            elif row.startswith("--"):
                option = row.split()[0]
                entries[option] = ""
            elif option is not None:
                entries[option] += f" {row}"
        return out, entries

    return read


def test_help_names_every_option_with_its_default_in_that_config(help_of):
    out, entries = help_of("gva_350m")
    assert set(entries) == {f"--{name}" for name in option_names(TrainOptions)}
    for name, default in (
        ("train.steps", "57221"),
        ("data.source", "hf:HuggingFaceFW/fineweb-edu:train"),
        ("model.dtype", "bfloat16"),
        ("model.attention.key_init", "scale_matched"),
        ("optimizer.learning_rate", "0.0006"),
        ("train.eval_batches", "50"),
    ):
        assert entries[f"--{name}"].endswith(f"(default: {default})")
    assert "Optimiser steps." in entries["--train.steps"]
    assert "compilation cache" in out and config.cache_folder().name in out


def test_every_option_has_a_meaning_of_its_own(help_of):
    """A field without a comment would silently show the comment of the field before it, or none."""
    _, entries = help_of("quickstart")
    meanings = [entry.partition("(default:")[0].strip() for entry in entries.values()]
    assert all(meanings)
    assert sorted(set(meanings)) == sorted(meanings)


def test_generate_help(capsys):
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    for name in ("RUN", "--prompt", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--json"):
        assert name in out


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["train"], "gva train needs a CONFIG"),
        (["info", "--json"], "gva info needs a CONFIG"),
        (["train", "nope"], "config 'nope': no such file"),
        (["train", "configs/nope.py"], "config 'configs/nope.py': no such file"),
        (["train", "quickstart", "--train.stepz", "5"], "no option --train.stepz; did you mean --train.steps?"),
        (["train", "quickstart", "--train.stepz=5"], "no option --train.stepz; did you mean --train.steps?"),
        (["train", "quickstart", "more"], "more"),
        (["train", "quickstart", "--train.steps", "-3"], "train.steps = -3: must be 1 or more"),
        (["train", "quickstart", "--train.steps", "many"], "--train.steps: invalid literal for int()"),
        (["train", "quickstart", "--train.steps"], "--train.steps"),
        (["train", "quickstart", "--model.attention.rope_dim", "15"], "rope_dim = 15: must be even"),
        (["train", "gva_350m", "--model.attention.rope_dim", "64"], "rope_dim = 64: must be below head_dim = 64"),
        (["train", "gva_350m", "--model.attention.num_heads", "6"], "num_kv_heads = 4: must divide num_heads = 6"),
        (["train", "quickstart", "--model.attention.key_init", "fancy"], "invalid choice 'fancy'"),
        (["train", "quickstart", "--model.attention.family", "gqqa"], "attention.family = 'gqqa': must be one of mha"),
        (["train", "quickstart", "--model.attention.latent_dim", "8"], "attention.latent_dim = 8"),
        (["train", "quickstart", "--train.accumulation", "3"], "train.accumulation = 3: must divide"),
        (["train", "quickstart", "--name", "a/b"], "name = 'a/b': must be a plain folder name"),
        (["train", "quickstart", "--mesh.tensor", "999"], "999"),
        (["generate"], "RUN"),
        (["generate", "runs/none", "--prompt", "a"], "run = 'runs/none': no such folder"),
        (["generate", "."], "prompt = (): give one or more"),
        (["generate", ".", "--prompt", "a"], "."),
        (["generate", ".", "--promt", "a"], "no option --promt; did you mean --prompt?"),
        (["generate", ".", "--prompt", "a", "--temperature", "-1"], "temperature = -1.0: must not be negative"),
        (["generate", ".", "--prompt", "a", "--top-p", "2"], "top_p = 2.0: must be above 0"),
        (["generate", ".", "--prompt", "a", "--top-k", "0"], "top_k = 0: must be 1 or more"),
        (["generate", ".", "--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens = 0: must be 1 or more"),
        (["generate", ".", "--prompt", "a", "--implementation", "fast"], "implementation = 'fast': must be one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(capsys, folder, argv, message):
    code, _, err = run(capsys, *argv)
    lines = err.splitlines()
    assert code == 2
    assert lines[-1].startswith("error: ") and message in lines[-1], err
    assert "Traceback" not in err
    assert [line for line in lines if not line.startswith(("device: ", "warning: "))] == lines[-1:]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("missing", sorted(cli.TRAIN_EXTRA))
def test_a_missing_extra_names_itself(capsys, monkeypatch, missing):
    def command(args):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=f"{missing}.part")

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    code, _, err = run(capsys, "train", "quickstart")
    assert (code, err) == (2, f"error: {missing} is not installed; it comes with: pip install 'gva-jax[train]'\n")


def test_a_missing_module_of_our_own_is_a_fault_not_a_mistake(monkeypatch):
    def command(args):
        raise ModuleNotFoundError("No module named 'gva_jax.nothing'", name="gva_jax.nothing")

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train"])


def test_a_loss_that_is_not_finite_is_one_line_and_no_usage_error(capsys, monkeypatch):
    def command(args):
        raise FloatingPointError("step 3: loss is nan")

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    assert run(capsys, "train") == (1, "", "error: step 3: loss is nan\n")


def test_interrupted(capsys, monkeypatch):
    def command(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    assert run(capsys, "train") == (130, "", "interrupted\n")


def test_the_console_script_exits_with_the_code():
    code = "import sys; from gva_jax.cli import main; sys.exit(main(['train', 'nope']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: config 'nope'")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [[], ["train", "--help"], ["info", "quickstart", "--json"]])
def test_a_reader_that_has_gone_is_no_fault(args, unbuffered):
    """`gva ... | head`: the end that a shell reports for SIGPIPE, and not a word."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"from gva_jax import cli; import sys; sys.exit(cli.main({args}))"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_the_first_line_names_device_kind_count_and_backend():
    assert runtime.describe_devices() == "device: 8 x cpu (backend cpu)"


def test_an_accelerator_that_lies_idle_is_told(monkeypatch):
    present = {"/dev/nvidia[0-9]*": ["/dev/nvidia0"]}
    monkeypatch.setattr(runtime.glob, "glob", lambda pattern: present.get(pattern, []))
    assert "an NVIDIA GPU is present (/dev/nvidia0) but JAX runs on the CPU" in runtime.unused_accelerator()
    present.clear()
    assert runtime.unused_accelerator() is None


def test_an_unusable_platform_is_a_mistake(tmp_path):
    code = "import sys; from gva_jax import cli, runtime; from gva_jax.display import Display\n"
    code += "cli.COMMANDS['train'] = lambda args: runtime.start(Display())\nsys.exit(cli.main(['train']))"
    environment = {"JAX_PLATFORMS": "tpux", "GVA_JAX_CACHE": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: JAX finds no device: ")
    assert "Traceback" not in done.stderr


def test_compiled_programs_are_kept_where_the_help_says(tmp_path):
    code = """
import jax
from gva_jax import runtime
from gva_jax.display import Display
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
runtime.start(Display(quiet=True))
jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8)))
"""
    environment = {"JAX_PLATFORMS": "cpu", "GVA_JAX_CACHE": str(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert any((tmp_path / "xla").iterdir())


# ---- text that grows -------------------------------------------------------------------------------------------------


def test_a_character_is_shown_when_its_last_byte_has_come():
    data = "aé🙂".encode()
    growing, seen = Growing(lambda ids: bytes(ids)), []
    for byte in data:
        growing.append(byte)
        seen.append(growing.text)
    assert seen == ["a", "a", "aé", "aé", "aé", "aé", "aé🙂"]


def test_bytes_that_are_no_character_are_replaced_at_the_end():
    growing = Growing(lambda ids: bytes(ids))
    for byte in "🙂".encode()[:2]:
        growing.append(byte)
    assert growing.text == ""
    growing.append(None)
    growing.append(None)
    assert growing.text == "\N{REPLACEMENT CHARACTER}"


def test_generate_options(tmp_path):
    args = [str(tmp_path), "--prompt", "a b", "--prompt", "c", "--top_k", "5", "--temperature", "0", "--json"]
    options = parse(GenerateOptions, args, "gva generate", "")
    expected = GenerateOptions(str(tmp_path), ("a b", "c"), top_k=5, temperature=0.0, json=True)
    assert dataclasses.asdict(options) == dataclasses.asdict(expected)
    assert Display(quiet=True).live is False


# ---- a whole run, tiny -----------------------------------------------------------------------------------------------

TINY = [
    *("--data.source", "docstrings:json,argparse,logging", "--data.holdout", "0.2", "--data.context_length", "32"),
    *("--data.batch_size", "8", "--model.vocab_size", "300", "--model.num_layers", "1", "--model.model_dim", "32"),
    *("--model.hidden_dim", "32", "--train.steps", "2", "--sample.max_new_tokens", "2"),
]


def test_train_then_generate(capsys, folder):
    """One test: each part needs the run that the first one makes."""
    code, out, err = run(capsys, "train", "quickstart", *TINY)
    assert (code, err) == (0, "")
    assert out.startswith("device: 8 x cpu (backend cpu)\n") and "runs/quickstart" in out
    config_text = (folder / "runs/quickstart/config.json").read_text()

    # One prompt: its text alone on standard output, the same for the same seed.
    sampled = ["generate", "runs/quickstart", "--prompt", "Return", "--max-new-tokens", 3, "--seed", 1]
    code, out, err = run(capsys, *sampled)
    assert code == 0 and out.startswith("Return") and out.endswith("\n")
    assert err == "device: 8 x cpu (backend cpu)\n"
    assert run(capsys, *sampled)[1] == out

    # Several prompts, as text and as JSON.
    greedy = ["--max-new-tokens", 3, "--temperature", 0]
    several = ["generate", "runs/quickstart", "--prompt", "Return", "--prompt", "A", *greedy]
    code, out, _ = run(capsys, *several)
    rows = json.loads(run(capsys, *several, "--json")[1])
    assert code == 0 and [row["prompt"] for row in rows] == ["Return", "A"]
    assert all(len(row["tokens"]) <= 3 for row in rows)
    assert out == "".join(f"--- {i}/2\n{row['prompt']}{row['text']}\n\n" for i, row in enumerate(rows, 1))

    # The library's way to the same run.
    exec(block_with("gva_jax.load("), {})
    assert capsys.readouterr().out.endswith("\n")

    # The same name for another run is refused, and the run kept.
    code, _, err = run(capsys, "train", "quickstart", *TINY, "--model.model_dim", "64")
    assert code == 2 and "holds another run (model.model_dim: 32 -> 64)" in err and err.count("\n") == 1
    assert (folder / "runs/quickstart/config.json").read_text() == config_text
