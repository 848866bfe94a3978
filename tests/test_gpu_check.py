"""`scripts/gpu_check.sh` without a GPU: every piece goes through, and a late or a failing one costs nothing else."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check(out, *options):
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(out), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([ROOT / "scripts/gpu_check.sh", *options], env=environment, capture_output=True, text=True)
    return done, json.loads((out / "gpu_check.json").read_text()) if (out / "gpu_check.json").exists() else None


@pytest.mark.long
def test_a_rehearsal_runs_every_kind_of_piece(tmp_path):
    done, figures = check(tmp_path, "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not figures["failed"]
    numbers = {(f["implementation"], f["dtype"], f["case"].split(",")[0]) for f in figures["numbers"]}
    assert ("pallas_triton", "float32", "H=2") in numbers and ("pallas_triton", "bfloat16", "GVA") in numbers
    timed = {(f["family"], f["implementation"]) for f in figures["decode"]}
    assert {("gva", "pallas_triton"), ("mla", "pallas_triton"), ("gqa", "jax.nn")} <= timed
    assert [f["config"] for f in figures["training"]] == ["gva_350m", "gqa_350m"]
    assert "| batch, context |" in done.stdout.rsplit("# Decode kernels on", 1)[1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/kernels"))
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts/gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_late_and_failing_pieces_are_listed(script, tmp_path, capsys):
    check = script.Check(10_000, tmp_path)
    check.piece("broken", 1, lambda: 1 // 0)
    check.piece("good", 1, lambda: "well")
    check.deadline -= 10_000
    check.piece("late", 1, lambda: pytest.fail("ran after the deadline"))
    assert check.finish() == 1
    told = capsys.readouterr().out
    assert "good (0.0 s): well" in told and "- broken: FAILED: ZeroDivisionError" in told
    figures = json.loads((tmp_path / "gpu_check.json").read_text())
    assert figures["skipped"] == ["late"] and len(figures["failed"]) == 1


def test_a_piece_that_never_ends_leaves_the_table(script, tmp_path, monkeypatch):
    statuses = []
    monkeypatch.setattr(script.os, "_exit", statuses.append)
    check = script.Check(10_000, tmp_path)
    check.piece("stuck", 1, check._stop)  # what the timer would call meanwhile
    assert statuses == [1]
    assert "stuck: not finished at the deadline" in (tmp_path / "gpu_check.md").read_text()


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="needs a machine without an NVIDIA GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done, figures = check(tmp_path)
    assert done.returncode == 2 and figures is None
    assert done.stderr.strip() == "no GPU: JAX runs on cpu; --rehearse goes through the motions"
