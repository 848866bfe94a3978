"""What a run tells while it goes on: rates, MFU, the places where figures go, launches."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import events
import numpy as np
import pytest
import tiny_run as tiny

from gva_jax import distributed, info
from gva_jax.display import Display, Task
from gva_jax.train import metrics, record, writers
from gva_jax.train.guard import SkipLimit
from gva_jax.train.metrics import Meter, Work
from gva_jax.train.writers import Log


@pytest.fixture
def config(tmp_path):
    run = replace(tiny.config(), name="tiny", runs=str(tmp_path / "runs"))
    run.folder.mkdir(parents=True)
    return run


def lines(config) -> list[dict]:
    return writers.read(config.folder / "metrics.jsonl")


# ---- rates -----------------------------------------------------------------------------------------------------------


class Metered:
    """A meter on a clock of its own, with what it wrote and said."""

    def __init__(self, monkeypatch, every=2, work=None, start=0):
        self.now, self.written, self.said = 0.0, [], []
        monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: self.now))
        log = SimpleNamespace(write=lambda step, figures: self.written.append((step, figures)))
        display = Display(quiet=True)
        display.say = self.said.append
        self.task = Task("train", 100, start, 0.0, None, self.said.append)
        skips = SkipLimit(0, None, display)
        self.meter = Meter(log, self.task, display, every, work or Work(1000, 10, None), skips)

    def step(self, step, seconds, loss=1.0):
        """The step before it comes in `seconds` after it was dispatched."""
        self.now += seconds
        self.meter.dispatched(step, {"loss": loss, "learning_rate": 0.5, "grad_norm": 2.0, "skipped_in_a_row": 0})

    def rates(self):
        return {step: figures.get("tokens_per_second") for step, figures in self.written}


def test_the_first_step_of_a_launch_which_compiles_is_left_out_of_the_rate(monkeypatch):
    at = Metered(monkeypatch)
    at.step(1, 0)
    for step in range(2, 6):
        at.step(step, 60 if step == 2 else 0.5)  # step 1 comes in after a minute
    assert at.rates() == {2: pytest.approx(1000 / 0.5), 4: pytest.approx(1000 / 0.5)}


def test_a_rate_without_steps_to_take_it_from_is_left_out(monkeypatch):
    at = Metered(monkeypatch, every=1)
    for step in (1, 2, 3):
        at.step(step, 0.25)
    assert at.rates() == {1: None, 2: pytest.approx(4000)}


def test_evaluations_and_checkpoints_are_left_out_of_the_rate_and_no_interval_is_lost(monkeypatch):
    at = Metered(monkeypatch, every=4)
    for step in range(1, 4):
        at.step(step, 0.5)
    with at.meter.paused():  # step 3 comes in at once: the device is idle
        at.now += 1000
    for step in range(4, 10):
        at.step(step, 0.5)
    assert at.rates() == {4: pytest.approx(2000), 8: pytest.approx(2000)}


def test_the_running_step_is_never_waited_for(monkeypatch):
    read = []

    class Loss:
        def __init__(self, step):
            self.step = step

        def __float__(self):
            read.append(self.step)
            return 1.0

    at = Metered(monkeypatch)
    for step in range(1, 5):
        at.step(step, 0.1, Loss(step))
        assert step not in read and (step == 1 or step - 1 in read)
    at.meter.flush()
    assert 4 in read


def test_a_line_an_interval_says_it_all(monkeypatch):
    at = Metered(monkeypatch, every=2, work=Work(tokens=1000, flops_per_token=10, peak=50_000.0))
    monkeypatch.setattr(at.task, "left", lambda: "1:23 left")
    for step in range(1, 6):
        at.step(step, 0.5)
    assert at.said[1] == "step 4/100  loss 1.0000  lr 5.00e-01  gradient 2.000  2,000 tokens/s  MFU 40.0%  1:23 left"
    assert len(at.said) == 2  # and the task's own lines are off


@pytest.mark.parametrize(("start", "left"), [(0, "27:30 left"), (90, "2:30 left")])
def test_time_left_leaves_the_first_step_out(monkeypatch, start, left):
    from gva_jax import display

    now = [0.0]
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: now[0]))
    task = Task("train", 100 if start else 120, start, 1e9, None, lambda line: None)
    now[0] = 500  # compiled
    task.advance()
    assert task.left() == ""
    for _ in range(9 if not start else 4):
        now[0] += 15 if not start else 30
        task.advance()
    assert task.left() == left


def test_days_left_are_told_in_hours(monkeypatch):
    from gva_jax import display

    now = [0.0]
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: now[0]))
    task = Task("train", 1002, 0, 1e9, None, lambda line: None)
    task.advance()
    now[0] = 172.8
    task.advance()
    assert task.left() == "48:00:00 left"


# ---- MFU -------------------------------------------------------------------------------------------------------------


def mesh(*kinds):
    return SimpleNamespace(devices=np.array([SimpleNamespace(device_kind=kind) for kind in kinds]))


def test_mfu_by_hand():
    run = tiny.config("gqa")
    # Per token: 2 layers of 32 x (32 + 16 + 16 + 32) attention and 3 x 32 x 64 SwiGLU, an output of 32 x 64; scores and
    # values of 4 heads of width 8 over (16 + 1) / 2 positions on average; a multiply and an add each, thrice.
    flops = 3 * 2 * (2 * (32 * 96 + 3 * 32 * 64 + 2 * 4 * 8 * 17 / 2) + 32 * 64)
    work = Work.of(run, mesh(*["TPU v5 lite"] * 4))
    rates = work.rates(steps=10, seconds=0.5)
    assert work.tokens == 16 * 16
    assert rates["tokens_per_second"] == 10 * 256 / 0.5
    assert rates["mfu"] == pytest.approx(flops * 5120 / (4 * 197e12))


def test_a_chip_of_two_devices_has_one_peak():
    """JAX makes two devices of a TPU7x."""
    assert Work.of(tiny.config(), mesh(*["TPU7x"] * 8)).peak == 4 * 2307e12


def test_mfu_is_left_out_where_the_chip_is_not_known():
    for kinds in (["cpu"], ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce"]):
        assert Work.of(tiny.config(), mesh(*kinds)).rates(1, 1.0).keys() == {"tokens_per_second"}


def test_recomputation_does_not_raise_mfu():
    run = tiny.config()
    with_remat = replace(run, model=replace(run.model, remat="full"))
    assert info.training_flops(with_remat) == info.training_flops(run)


# ---- places ----------------------------------------------------------------------------------------------------------


def test_both_places_hold_the_same_figures_under_their_names(config):
    log = Log(config, 0, print)
    log.write(5, {"loss": 2.5, "learning_rate": 0.25, "grad_norm": 1.5, "tokens_per_second": 8.0, "mfu": 0.5})
    log.write(5, {"development_loss": 3.5, "development_bits_per_byte": 1.25, "heldout_perplexity": 20.0})
    log.close()
    assert lines(config) == [
        {"step": 5, "loss": 2.5, "learning_rate": 0.25, "grad_norm": 1.5, "tokens_per_second": 8.0, "mfu": 0.5},
        {"step": 5, "development_loss": 3.5, "development_bits_per_byte": 1.25, "heldout_perplexity": 20.0},
    ]
    assert events.scalars(config.folder / "tensorboard") == {
        "train/loss": [(5, 2.5)],
        "train/learning_rate": [(5, 0.25)],
        "train/grad_norm": [(5, 1.5)],
        "speed/tokens_per_second": [(5, 8.0)],
        "speed/mfu": [(5, 0.5)],
        "development/loss": [(5, 3.5)],
        "development/bits_per_byte": [(5, 1.25)],
        "heldout/perplexity": [(5, 20.0)],
    }


def test_a_resumed_run_leaves_no_step_twice(config):
    for start, stop, loss in ((0, 12, 1.0), (7, 9, 2.0), (8, 12, 3.0)):  # the first two are killed: never closed
        log = Log(config, start, print)
        for step in range(start + 1, stop + 1):
            log.write(step, {"loss": loss})
    log.close()
    expected = [(step, 1.0 if step <= 7 else 2.0 if step == 8 else 3.0) for step in range(1, 13)]
    assert [(r["step"], r["loss"]) for r in lines(config)] == expected
    for _ in range(100):  # what was not closed comes within a second
        shown = events.scalars(config.folder / "tensorboard")["train/loss"]
        if shown == expected:
            break
        import time

        time.sleep(0.05)
    assert shown == expected


def test_a_finished_run_launched_again_writes_nothing_twice(config):
    for _ in range(2):
        log = Log(config, 20, print)
        log.write(20, {"heldout_loss": 2.0})
        log.close()
    assert len(lines(config)) == 1
    assert events.scalars(config.folder / "tensorboard") == {"heldout/loss": [(20, 2.0)]}


def test_a_line_that_a_killed_process_left_unfinished_is_dropped(config):
    path = config.folder / "metrics.jsonl"
    path.write_text('{"step": 5, "loss": 2.0}\n{"step": 10, "lo')
    log = Log(config, 10, print)
    log.write(15, {"loss": 1.0})
    log.close()
    assert [r["step"] for r in lines(config)] == [5, 15]


def test_other_processes_write_nothing(config, monkeypatch):
    monkeypatch.setattr(distributed, "first", lambda: False)
    log = Log(config, 0, print)
    log.write(1, {"loss": 1.0})
    log.close()
    record.launch(config.folder, 0, None)
    assert list(config.folder.iterdir()) == []


# ---- Weights & Biases, by a stand-in ---------------------------------------------------------------------------------

STAND_IN = """
import json, os
from types import SimpleNamespace

CALLS = []

def setup():
    return SimpleNamespace(settings=SimpleNamespace(mode=os.environ.get("WANDB_MODE", "online")))

def login(prompt=True):
    CALLS.append(("login", prompt))
    return "KEY" in os.environ

class Run:
    def log(self, figures, step):
        if "BREAK_LOG" in os.environ:
            raise OSError("disk is\\nfull")
        CALLS.append(("log", step, figures))

    def finish(self):
        CALLS.append(("finish",))

def init(**options):
    if "BREAK_INIT" in os.environ:
        raise RuntimeError("no server")
    CALLS.append(("init", options))
    return Run()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Installs the stand-in; the result is a function that tells what it was asked to do."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(folder)
    for name in ("WANDB_MODE", "WANDB_DISABLED", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    sys.modules.pop("wandb", None)
    yield lambda: sys.modules["wandb"].CALLS if "wandb" in sys.modules else None
    sys.modules.pop("wandb", None)


def logged(config) -> list[str]:
    """One launch with one figure; what was said."""
    said = []
    log = Log(config, 0, said.append)
    log.write(1, {"loss": 1.0})
    log.write(2, {"loss": 1.0})
    log.close()
    return said


def test_wandb_gets_the_figures_of_every_launch_in_one_run(config, wandb, monkeypatch):
    monkeypatch.setenv("KEY", "1")
    assert logged(config) == [] == logged(config)
    (_, first), (_, second) = [call for call in wandb() if call[0] == "init"]
    assert first == second and first["resume"] == "allow" and first["name"] == "tiny"
    assert first["config"]["model"]["vocab_size"] == 64 and first["dir"] == str(config.folder)
    assert wandb()[2:5] == [("log", 1, {"train/loss": 1.0}), ("log", 2, {"train/loss": 1.0}), ("finish",)]
    assert ("login", False) in wandb()  # nobody is asked for a key


def test_wandb_offline_needs_no_login(config, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert logged(config) == []
    assert [call[0] for call in wandb()] == ["init", "log", "log", "finish"]


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true")])
def test_wandb_is_not_imported_where_it_is_disabled(config, wandb, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert logged(config) == [] and wandb() is None


def test_the_folder_that_wandb_leaves_is_not_taken_for_it(config, tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert logged(config) == [] and "wandb" not in sys.modules


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (None, "Weights & Biases is installed but not logged in: `wandb login`, or WANDB_MODE=offline"),
        ("BREAK_INIT", "warning: Weights & Biases is left out: RuntimeError: no server"),
        ("BREAK_LOG", "warning: Weights & Biases is left out: OSError: disk is full"),
    ],
)
def test_a_failure_of_wandb_is_told_once_and_the_run_goes_on(config, wandb, monkeypatch, broken, told):
    if broken:
        monkeypatch.setenv("KEY", "1")
        monkeypatch.setenv(broken, "1")
    assert logged(config) == [told]
    assert len(lines(config)) == 2


# ---- launches --------------------------------------------------------------------------------------------------------


def git(folder, *args):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True)


def test_the_revision_is_that_of_a_checkout_and_says_whether_it_was_changed(tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    assert record.revision(root) is None
    git(root, "init", "-q")
    assert record.revision(root) is None  # no commit yet
    (root / "a.py").write_text("1\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    clean = record.revision(root)
    assert len(clean["revision"]) == 40 and clean["dirty"] is False
    (root / "a.py").write_text("2\n")
    assert record.revision(root) == {"revision": clean["revision"], "dirty": True}
    (root / "inside").mkdir()
    assert record.revision(root / "inside") is None  # an environment in a checkout is not the checkout


def test_every_launch_is_a_line_with_what_is_needed_to_repeat_it(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gva", "train", "quickstart", "--name", "two words"])
    run = tiny.Run(config)
    for step in (0, 7):
        record.launch(config.folder, step, run.mesh)
    first, second = map(json.loads, (config.folder / "launches.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 7)
    assert first["command"] == "gva train quickstart --name 'two words'"
    assert first["devices"] == {"cpu": 8} and first["processes"] == 1
    assert first["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1, "context": 1}
    assert {"jax", "flax", "optax", "orbax-checkpoint", "grain"} <= first["versions"].keys()
    assert first["time"].endswith("+00:00") and first["python"] and first["gva_jax"] and "git" in first
