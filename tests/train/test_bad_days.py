"""Signals, full disks and damaged files: the same command goes on, and to the same end, bit for bit."""

import contextlib
import os
import shutil
import signal
from dataclasses import replace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run as tiny
from test_checkpoint import DAMAGES, files_no_larger_than, steps_in
from test_loop import logged

import gva_jax
from gva_jax import cli, runtime
from gva_jax.config import DataConfig, RunConfig, RunError, TrainConfig
from gva_jax.display import Display
from gva_jax.train import evaluation, loop, stopping
from gva_jax.train import state as states
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.stopping import Interrupted, StopRequest
from gva_jax.train.writers import append


class Heard(Display):
    """Keeps what is said."""

    def __init__(self):
        super().__init__(quiet=True)
        self.lines = []

    def say(self, text=""):
        self.lines.append(text)


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """All runs here are the same one, so the steps that the first compiles serve all."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_train_step", "make_eval_step"):
            patch.setattr(loop, name, _once(getattr(loop, name)))
        yield


def _once(make):
    made = []

    def once(*args):
        if not made:
            made.append(make(*args))
        return made[0]

    return once


def tiny_run(folder, name="tiny") -> RunConfig:
    return replace(
        tiny.config(vocab_size=300, dropout=0.1),
        name=name,
        runs=str(folder / "runs"),
        data=DataConfig(source="docstrings:json,argparse", context_length=32, batch_size=8, holdout=0.3),
        train=TrainConfig(steps=20, log_every=1, checkpoint_every=7, eval_every=8, eval_batches=3),
    )


def saved(run: RunConfig, step: int = 20) -> dict:
    folder = run.folder.resolve() / f"checkpoints/{step}"
    trees = {name: ocp.StandardCheckpointer().restore(folder / name) for name in ("params", "optimizer")}
    return jax.tree.map(np.asarray, trees) | {"data": (folder / "data/metadata").read_text()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A whole run: its config, the curve, and what was saved last."""
    run = tiny_run(tmp_path_factory.mktemp("undisturbed"))
    loop.train(run, Display(quiet=True))
    return run, logged(run), saved(run)


def assert_ends_as(run: RunConfig, undisturbed) -> None:
    _, curve, state = undisturbed
    assert logged(run) == curve
    jax.tree.map(np.testing.assert_array_equal, saved(run), state)


def signalled(patch, where, name: str, signum, *, before: bool = True, call: int = 1) -> None:
    """The process receives the signal in so-manieth call of `where.name`: before or after what it does."""
    original, calls = getattr(where, name), []

    def wrapped(*args, **kw):
        calls.append(None)
        if before and len(calls) == call:
            signal.raise_signal(signum)
        result = original(*args, **kw)
        if not before and len(calls) == call:
            signal.raise_signal(signum)
        return result

    patch.setattr(where, name, wrapped)


def in_the_first_step(patch):  # which compiles
    original = loop.make_train_step

    def make(*args):
        def step(*args):
            signal.raise_signal(signal.SIGTERM)
            return original(*made)(*args)

        made = args
        return step

    patch.setattr(loop, "make_train_step", make)


# What happens, where the process stands then (step, its checkpoints), and by which signal it says it was stopped.
MOMENTS = [
    ("state", lambda p: signalled(p, states, "create", signal.SIGINT), 0, [], signal.SIGINT),
    ("compile", in_the_first_step, 1, [1], signal.SIGTERM),
    ("evaluation", lambda p: signalled(p, evaluation, "put", signal.SIGINT, call=2), 8, [7, 8], signal.SIGINT),
    ("saving", lambda p: signalled(p, Checkpoints, "save", signal.SIGTERM, before=False), 14, [8, 14], signal.SIGTERM),
    ("last save", lambda p: signalled(p, Checkpoints, "save", signal.SIGTERM), 20, [14, 20], signal.SIGTERM),
    ("last evaluation", lambda p: signalled(p, evaluation, "put", signal.SIGINT, call=2), 20, [14, 20], 2),
]


def test_a_signal_anywhere_saves_and_the_same_command_goes_on(undisturbed, tmp_path, monkeypatch):
    run, heard = tiny_run(tmp_path), Heard()
    for moment, arrange, step, steps, signum in MOMENTS:
        with monkeypatch.context() as patch:
            arrange(patch)
            report = loop.train(run, heard)
        assert (report.step, report.stopped_by, report.heldout) == (step, signum, None), moment
        assert steps_in(run.folder) == steps, moment
        told = f"stopped at step {step} of 20" + (f", saved in {run.folder}" if step else "")
        assert heard.lines[-1] == f"{told}; the same command continues", moment
        if moment == "evaluation":  # half an evaluation is none
            assert [r["step"] for r in logged(run)][-1] == 8 and "development_loss" not in logged(run)[-1]
    assert loop.train(run, heard).stopped_by is None
    assert_ends_as(run, undisturbed)


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(undisturbed, tmp_path, monkeypatch, capfd):
    run, original = tiny_run(tmp_path), Checkpoints.save

    def save(self, state, *args):
        limit = contextlib.nullcontext() if int(state.step) < 14 else files_no_larger_than(2_000)
        with limit:
            original(self, state, *args)
            self.wait()

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save)
        with pytest.raises(RunError, match=r"runs/tiny/checkpoints': File too large; step 7 is whole"):
            loop.train(run, Display(quiet=True))
    assert capfd.readouterr().err == ""
    heard = Heard()
    loop.train(run, heard)
    assert f"resumed {run.folder} at step 7 of 20" in heard.lines
    assert_ends_as(run, undisturbed)


def test_a_damaged_checkpoint_and_a_line_cut_short_cost_some_steps_and_nothing_else(undisturbed, tmp_path, capfd):
    whole, _, _ = undisturbed
    run = tiny_run(tmp_path)
    shutil.copytree(whole.folder, run.folder)
    DAMAGES["one bit"](run.folder / "checkpoints/20")
    DAMAGES["truncated"](run.folder / "checkpoints/20")
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')

    said = []
    _, variables, _ = gva_jax.load(run.folder, said.append)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], saved(run, 14)["params"])
    assert len(said) == 1 and "checkpoint 20 in" in said[0] and said[0].endswith("going back to step 14")

    heard = Heard()
    loop.train(run, heard)
    assert any(line.endswith("going back to step 14") for line in heard.lines)
    assert f"resumed {run.folder} at step 14 of 20" in heard.lines
    assert_ends_as(run, undisturbed)
    assert capfd.readouterr().err == ""


def test_where_no_checkpoint_is_whole_nothing_is_trained_or_written(undisturbed, tmp_path):
    run = tiny_run(tmp_path)
    shutil.copytree(undisturbed[0].folder, run.folder)
    for step in (14, 20):
        DAMAGES["empty"](run.folder / f"checkpoints/{step}")
    before = sorted((p, p.stat().st_mtime_ns) for p in run.folder.rglob("*"))
    with pytest.raises(RunError, match="and so are all before it; nothing has been removed"):
        loop.train(run, Display(quiet=True))
    DAMAGES["all gone"](run.folder / "checkpoints/14/params")
    with pytest.raises(RunError, match="and so are all before it"), pytest.warns(match="going back to step 14"):
        DAMAGES["deleted"](run.folder / "checkpoints/20")
        gva_jax.load(run.folder)
    assert len(before) > len(sorted(run.folder.rglob("*")))


def test_a_line_of_metrics_that_cannot_be_written_is_told(tmp_path):
    with files_no_larger_than(10), pytest.raises(RunError, match=r"metrics\.jsonl' cannot be written: File too large"):
        append(tmp_path / "metrics.jsonl", {"step": 1, "loss": 0.5})


# ---- signals and exit codes ------------------------------------------------------------------------------------------


def test_before_it_is_deferred_a_signal_ends_at_once():
    with StopRequest() as stop, pytest.raises(Interrupted) as end:
        signal.raise_signal(signal.SIGTERM)
    assert (end.value.signum, end.value.at_once, stop.requested()) == (15, False, False)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_once_deferred_the_first_is_remembered_and_the_second_ends_at_once(monkeypatch):
    clock = 100.0
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock)
    with StopRequest() as stop:
        stop.defer()
        assert not stop.requested()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested() and stop.signum == 15
        clock += 0.5
        signal.raise_signal(signal.SIGTERM)  # the same one, that came by two ways
        clock += 0.6
        with pytest.raises(Interrupted) as end:
            signal.raise_signal(signal.SIGINT)
    assert (end.value.signum, end.value.at_once) == (2, True)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (
            RunError("a checkpoint cannot be written to 'x': No space left on device"),
            1,
            "error: a checkpoint",
        ),
        (Interrupted(signal.SIGTERM, at_once=False), 143, "interrupted"),
        (Interrupted(signal.SIGTERM, at_once=True), 143, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code, told):
    def train(*_, **__):
        raise error

    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(runtime, "start", lambda _: None)
    monkeypatch.setattr(loop, "train", train)
    assert cli.main(["train", "quickstart"]) == code
    err = capsys.readouterr().err
    assert err.startswith(told) and err.count("\n") == 1
    assert exits == ([code] if getattr(error, "at_once", False) else [])
