"""`gva evaluate`: the figures of training, other ones with a part swapped, and what cannot be swapped."""

import json

import pytest

from gva_jax import cli

TINY = [
    *("--data.source", "docstrings:json,argparse,logging", "--data.holdout", "0.2", "--data.context_length", "32"),
    *("--data.batch_size", "8", "--model.vocab_size", "300", "--model.num_layers", "1", "--model.model_dim", "32"),
    *("--model.hidden_dim", "32", "--train.steps", "2", "--sample.max_new_tokens", "2"),
    *("--model.attention.value_transform", "silu"),
]
RUN = "runs/quickstart"


def run(capsys, *argv):
    code = cli.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_is_evaluated_as_it_was_trained_or_with_a_part_swapped(capsys, tmp_path, monkeypatch):
    """One test: each part needs the run that the first one makes."""
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "train", "quickstart", *TINY)[0] == 0
    trained = json.loads((tmp_path / RUN / "metrics.jsonl").read_text().splitlines()[-1])

    def figures(*args):
        code, out, err = run(capsys, "evaluate", RUN, "--json", *args)
        assert code == 0 and err.startswith("device: ")
        return json.loads(out)

    heldout = figures()
    assert list(heldout) == ["run", "step", "split", "changed", "loss", "perplexity", "bits_per_byte", "targets"]
    assert (heldout["step"], heldout["split"], heldout["changed"]) == (2, "heldout", [])
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert heldout[name] == pytest.approx(trained[f"heldout_{name}"], rel=1e-6)

    swapped = figures("--model.attention.value_transform", "none", "--split", "development", "--data.batch_size", "16")
    assert swapped["split"] == "development"
    assert swapped["changed"][0] == "model.attention.value_transform: 'silu' -> 'none'"
    assert abs(swapped["loss"] / trained["development_loss"] - 1) > 1e-6, "the swap changes nothing"
    # What has no parameters and acts like what was trained: the same figures.
    same = figures("--split", "development", "--model.attention.form", "materialised")
    assert same["loss"] == pytest.approx(trained["development_loss"], rel=1e-5)

    code, out, _ = run(capsys, "evaluate", RUN, "--step", 2)
    assert code == 0 and f"{RUN}, step 2, heldout: loss {heldout['loss']:.4f}, perplexity" in out

    for args, message in (
        (["--model.attention.value_transform", "full_glu"], "value_transform/gate/kernel is missing in the checkpoint"),
        (["--model.model_dim", "64"], "model.model_dim: 32 -> 64: parameter"),
        (["--model.attention.value_transform", "gelu"], "invalid choice 'gelu'"),
        (["--data.context_length", "16"], "data.context_length: 32 -> 16: an evaluation may change model, mesh"),
        (["--data.seed", "1"], "data.seed: 0 -> 1: an evaluation may change"),
        (["--step", "1"], "step = 1: saved are 2"),
        (["--splitt", "heldout"], "did you mean --split?"),
    ):
        code, out, err = run(capsys, "evaluate", RUN, *args)
        assert (code, out.count("Traceback")) == (2, 0) and message in err and err.rstrip().count("\n") <= 1, err


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "gva evaluate needs a RUN"), (["none"], "run 'none': no such folder"), (["."], "holds no config.json")],
)
def test_what_is_no_run_is_refused(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "evaluate", *argv)
    assert code == 2 and message in err and err.count("\n") == 1
