"""`--profile`: which steps are traced, and what the trace of a real run holds and does not."""

import contextlib
import gzip
import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import events
import jax
import pytest
from test_loop import Interrupting, tiny_run

from gva_jax.config import RunConfig
from gva_jax.train import writers
from gva_jax.train.loop import train
from gva_jax.train.profile import Profiler, window


@pytest.mark.parametrize(
    ("first", "last", "intervals", "traced"),
    [
        (1, 100, (), range(3, 8)),
        (1, 100, (4,), range(5, 9)),  # none of five steps fits between two evaluations
        (1, 100, (5,), range(6, 11)),
        (1, 100, (1,), range(3, 4)),
        (1, 100, (10, 6), range(13, 18)),
        (41, 100, (), range(43, 48)),  # resumed
        (1, 4, (), range(3, 5)),
        (1, 2, (), range(0)),
        (7, 6, (), range(0)),  # a finished run
    ],
)
def test_steps_without_compilation_or_interruption_are_traced(first, last, intervals, traced):
    assert window(first, last, lambda step: any(step % every == 0 for every in intervals)) == traced


def test_the_window_is_looked_for_near_the_start():
    """A row of five steps that comes after a day is no better than one of three now."""
    assert window(1, 10**6, lambda step: step % 3 == 0 and step < 10**5) == range(4, 7)


@pytest.mark.long
def test_a_trace_of_a_first_launch_and_of_a_resumed_one(tmp_path):
    run = tiny_run(tmp_path)
    model = replace(run.model, num_layers=1, scan_layers=False)
    run = replace(run, model=model, train=replace(run.train, eval_every=4, checkpoint_every=0, log_every=1))
    train(run, Interrupting(9, signal.SIGTERM), profile=True)
    train(run, Interrupting(17, signal.SIGTERM), profile=True)
    traces = sorted((run.folder / "profile").glob("plugins/profile/*/*.trace.json.gz"))
    assert len(list((run.folder / "profile").glob("plugins/profile/*/*.xplane.pb"))) == len(traces) == 2
    for trace, steps in zip(traces, ([5, 6, 7, 8], [13, 14, 15, 16]), strict=True):
        found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        names = {event.get("name", "") for event in found}
        assert [int(e["args"]["step_num"]) for e in found if e.get("name") == "train"] == steps
        assert any("Execute" in name for name in names)
        assert not [name for name in names if "backend_compile" in name or "Client::Compile" in name]
    # The interrupted run has the same steps in both places, none twice.
    records = [r for r in writers.read(run.folder / "metrics.jsonl") if "loss" in r]
    shown = events.scalars(run.folder / "tensorboard")["train/loss"]
    assert [r["step"] for r in records] == [step for step, _ in shown] == list(range(1, 19))
    assert [value for _, value in shown] == pytest.approx([r["loss"] for r in records])
    assert [r["step"] for r in writers.read(run.folder / "launches.jsonl")] == [0, 10]


@pytest.fixture
def rounds(monkeypatch):
    """Goes through the rounds of a launch from step 0, up to one that fails; what the profiler did meanwhile."""

    def go(count: int, wanted: bool = True, process: int = 0) -> list[str]:
        done = []
        monkeypatch.setattr(jax, "process_index", lambda: process)
        monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: done.append("start"))
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: done.append("stop"))
        meter = SimpleNamespace(paused=lambda: contextlib.nullcontext(done.append("wait")))
        with contextlib.suppress(FloatingPointError), Profiler() as profiler:
            if wanted:
                profiler.plan(RunConfig(), 0, meter, done.append)
            for step in range(1, count + 1):
                with profiler.round(step):
                    done.append(step)
            with profiler.round(count + 1):
                raise FloatingPointError
        return done

    return go


def test_the_device_is_idle_when_a_trace_starts_and_ends(rounds):
    folder = RunConfig().folder / "profile"
    said = f"profile: steps 3 to 7 are in {folder}; to open it: pip install xprof, then xprof --logdir {folder}"
    assert rounds(9) == [1, 2, "wait", "start", 3, 4, 5, 6, 7, "wait", "stop", said, 8, 9]


def test_a_run_that_ends_amid_the_traced_steps_still_leaves_its_trace(rounds):
    *done, said = rounds(4)
    assert done == [1, 2, "wait", "start", 3, 4, "stop"] and "steps 3 to 5 are in" in said


@pytest.mark.parametrize("case", [{"wanted": False}, {"process": 1}])
def test_nothing_is_traced_unasked_or_in_other_processes(rounds, case):
    assert rounds(9, **case) == list(range(1, 10))
