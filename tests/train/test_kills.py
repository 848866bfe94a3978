"""`scripts/kill_run.py` in short: real processes that are killed end as one that is not, bit for bit."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/kill_run.py"
spec = importlib.util.spec_from_file_location("kill_run", SCRIPT)
kill_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kill_run)


@pytest.mark.long
def test_three_kills_change_nothing(tmp_path, monkeypatch):
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]  # one device: quicker to start
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    kills = [
        kill_run.Kill(signal.SIGKILL, "step", step=30),
        kill_run.Kill(signal.SIGKILL, "saving", step=50),
        kill_run.Kill(signal.SIGTERM, "step", step=70),
    ]
    parts, told = kill_run.rehearse(tmp_path, 100, kills, say=lambda _: None)
    assert [part.exit_code for part in parts] == [-signal.SIGKILL, -signal.SIGKILL, 128 + signal.SIGTERM]
    assert parts[2].resumed is not None
    assert told.startswith("Equal bit for bit: 105 records")  # 100 steps, 4 evaluations and the end
    assert kill_run.table(parts).count("\n") == 4


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_has_every_moment_with_both_signals(seed):
    plan = kill_run.plan(300, 10, seed)
    assert len(plan) == 10 and {(kill.moment, kill.signum) for kill in plan} == {
        (moment, signum)
        for moment in ("launch", "step", "saving", "evaluation")
        for signum in (signal.SIGKILL, signal.SIGTERM)
    }
    assert all(1 <= kill.step < 300 for kill in plan)
