"""Checkpoints alone, on a state of a few numbers: what is kept, other meshes, failed writes, damaged files."""

import contextlib
import errno
import os
import resource
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gva_jax.config import ConfigError, RunError, TrainConfig
from gva_jax.train import checkpoint
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.fingerprint import fingerprint
from gva_jax.train.state import TrainState


class Position:
    """Stands for the loader's iterator: a position that can be read and set."""

    def __init__(self, at: int = 0):
        self.at = at

    def get_state(self) -> dict:
        return {"at": self.at}

    def set_state(self, state: dict) -> None:
        self.at = state["at"]


def state(step: int, devices: int = 1) -> TrainState:
    """Some arrays over a mesh of so many devices, all told by the step."""
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    draw = np.random.default_rng(step).normal
    return TrainState(
        step=put(np.int32(step)),
        params={"w": put(draw(size=(8, 96)).astype(np.float32), "fsdp"), "scale": put(jnp.bfloat16(draw(size=(5,))))},
        opt_state={"m": put(draw(size=(8, 96)).astype(np.float32), "fsdp"), "count": put(np.int32(step))},
        rng=put(np.array([step, 7], np.uint32)),
    )


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def written(folder, *steps: int, losses: dict | None = None, **kept) -> None:
    """Save these steps, in one part of a run."""
    checkpoints = Checkpoints(folder, TrainConfig(**kept))
    for step in steps:
        checkpoints.save(state(step), Position(step * 10), (losses or {}).get(step))
    checkpoints.close()


def steps_in(folder) -> list[int]:
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir())


def restored(folder, devices: int = 1, **kept) -> tuple[TrainState, int, list[str]]:
    """What a run would continue from, its position in the data, and what was said meanwhile."""
    position, said = Position(), []
    checkpoints = Checkpoints(folder, TrainConfig(**kept))
    found = checkpoints.restore(abstract(state(0, devices)), position, said.append)
    checkpoints.close()
    return found, position.at, said


# ---- what is kept ----------------------------------------------------------------------------------------------------

LOSSES = {10: 5.0, 20: 2.0, 30: float("nan"), 40: 3.0, 50: 4.0, 60: 4.5, 70: 4.4}
BEST = dict(eval_every=10, checkpoint_every=10)


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (dict(keep=2), [60, 70]),
        (dict(keep=1, checkpoint_every=10, keep_every=30), [30, 60, 70]),
        (dict(keep=1, keep_best=2, **BEST), [20, 40, 70]),
        (dict(keep=1, keep_every=50, keep_best=1, **BEST), [20, 50, 70]),
    ],
)
def test_what_is_kept_also_over_a_restart(tmp_path, kept, left):
    written(tmp_path, 10, 20, 30, 40, losses=LOSSES, **kept)
    written(tmp_path, 50, 60, 70, losses=LOSSES, **kept)
    assert steps_in(tmp_path) == left


def test_what_is_kept_may_change_between_the_parts_of_a_run(tmp_path):
    written(tmp_path, 10, 20, 30, 40, losses=LOSSES, keep=4)
    written(tmp_path, 50, 55, losses=LOSSES, keep=1, keep_best=2, **BEST)
    assert steps_in(tmp_path) == [20, 40, 55]  # 55 was saved where nothing is measured, and is not ranked


def test_garbage_for_metrics_loses_a_place_among_the_best_and_nothing_else(tmp_path):
    written(tmp_path, 10, 20, 40, losses=LOSSES, keep=3)
    (tmp_path / "checkpoints/20/metrics/metrics").write_text("{")
    assert restored(tmp_path, keep=3)[0].step == 40
    written(tmp_path, 50, 60, losses=LOSSES, keep=1, keep_best=1, **BEST)
    assert steps_in(tmp_path) == [40, 60]


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (dict(keep=0), "train.keep = 0: must be 1 or more"),
        (dict(keep_every=-1), "must not be negative"),
        (dict(keep_every=15, checkpoint_every=10), "must be a multiple of train.checkpoint_every = 10"),
        (dict(keep_every=15), "must be a multiple of train.checkpoint_every = 0"),
        (dict(keep_best=1, checkpoint_every=10), "to be a multiple of train.eval_every = 0"),
        (dict(keep_best=1, checkpoint_every=10, eval_every=4), "to be a multiple of train.eval_every = 4"),
    ],
)
def test_keeping_what_is_never_saved_or_measured_is_refused(train, told):
    with pytest.raises(ConfigError, match=told):
        TrainConfig(**train)


# ---- other meshes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [4, 2, 1])
def test_saved_on_four_devices_restored_on_fewer(tmp_path, devices):
    checkpoints = Checkpoints(tmp_path, TrainConfig())
    checkpoints.save(state(3, 4), Position(30))
    checkpoints.close()
    found, at, said = restored(tmp_path, devices)
    assert_same(found, state(3))
    assert (at, said) == (30, [])
    declared = state(0, devices)
    jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(f"{x.sharding} {y.sharding}"), found, declared)


def test_saved_and_restored_under_an_active_mesh(tmp_path):
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        checkpoints = Checkpoints(tmp_path, TrainConfig())
        checkpoints.save(state(3, 4), Position(30))
        checkpoints.close()
    with jax.set_mesh(jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])):
        assert_same(restored(tmp_path, 2)[0], state(3))


def test_a_fingerprint_does_not_depend_on_the_mesh_and_tells_every_change():
    prints = {int(fingerprint(state(3, devices).params)) for devices in (1, 2, 4)}
    assert len(prints) == 1
    tree = jax.tree.map(np.asarray, state(3))
    for change in (
        lambda w: w.view(np.uint32).__setitem__((3, 5), w.view(np.uint32)[3, 5] ^ 1),  # the last bit
        lambda w: w.view(np.uint32).__setitem__((3, 5), w.view(np.uint32)[3, 5] ^ (1 << 31)),  # the sign
        lambda w: w.__setitem__(slice(0, 2), w[[1, 0]]),  # rows exchanged
        lambda w: w.__setitem__(slice(None), w[:, ::-1].copy()),
        lambda w: w.__setitem__(slice(4, 8), 0),  # what zarr fills in for a chunk that is missing
    ):
        w = tree.params["w"].copy()
        change(w)
        prints.add(int(fingerprint(tree.params | {"w": w})))
    assert len(prints) == 6
    swapped = [tree.params["w"], tree.opt_state["m"]]
    assert fingerprint(swapped) != fingerprint(swapped[::-1])


# ---- writes that fail ------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RunError, match=r"checkpoints' cannot hold checkpoints: (File exists|Not a directory)"):
        Checkpoints(tmp_path, TrainConfig())


@contextlib.contextmanager
def files_no_larger_than(size: int):
    """The system refuses more, as it refuses everything when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_write_that_the_system_refuses_is_told_between_saves(tmp_path, capfd):
    written(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, TrainConfig())
    told = r"cannot be written to '.*checkpoints': File too large; step 1 is whole"
    with files_no_larger_than(2_000), pytest.raises(RunError, match=told) as failure:
        checkpoints.save(state(2), Position(20))
        assert checkpoints.latest == 1
        for _ in range(600):
            checkpoints.check()
            time.sleep(0.05)
    assert "\n" not in str(failure.value) and capfd.readouterr().err == ""
    assert checkpoints.latest == 1


def test_a_failure_in_orbaxs_thread_fails_the_next_save_and_leaves_the_last_one(tmp_path, monkeypatch, capfd):
    written(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, TrainConfig())
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _disk_is_full)
        patch.setattr(os, "replace", _disk_is_full)
        checkpoints.save(state(2), Position(20))
        with pytest.raises(RunError, match=r"No space left on device.*; step 1 is whole"):
            checkpoints.save(state(3), Position(30))
    assert capfd.readouterr().err == ""
    _settled(tmp_path)
    found, at, said = restored(tmp_path)
    assert (int(found.step), at, said) == (1, 10, [])
    assert steps_in(tmp_path) == [1]  # what was half-written is gone
    written(tmp_path, 2)
    assert restored(tmp_path)[0].step == 2


@pytest.mark.parametrize("times", [2, 1_000])
def test_what_a_failed_save_still_writes_is_removed_when_it_is_done(tmp_path, monkeypatch, times):
    """Files that come while the folder is emptied: `rmdir` finds it not empty."""
    written(tmp_path, 1)
    left = tmp_path / "checkpoints/2.orbax-checkpoint-tmp"
    left.mkdir()
    rmdir, refused = os.rmdir, []

    def rmdir_of_a_folder_still_written_to(path, **options):
        if str(path).endswith(left.name) and len(refused) < times:
            refused.append(path)
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir_of_a_folder_still_written_to)
    monkeypatch.setattr(checkpoint, "_STRAGGLERS_SECONDS", 0.5)
    if times == 2:
        assert restored(tmp_path)[0].step == 1
        assert steps_in(tmp_path) == [1] and len(refused) == 2
    else:
        with pytest.raises(RunError, match="cannot hold checkpoints: Directory not empty"):
            restored(tmp_path)


def _settled(folder: Path, seconds: float = 0.5) -> None:
    """Until the writers that the failed one left behind have ended: nothing changes any more."""
    listing = lambda: sorted((str(p), p.stat().st_size) for p in folder.rglob("*"))
    seen = None
    while seen != (now := listing()):
        seen = now
        time.sleep(seconds)


def _disk_is_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- damaged files ---------------------------------------------------------------------------------------------------


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "deleted": lambda step: largest(step / "params").unlink(),
    "truncated": lambda step: os.truncate(largest(step / "params"), 100),
    "empty": lambda step: os.truncate(largest(step / "optimizer"), 0),
    "garbage": lambda step: largest(step / "params").write_bytes(b"\xa5" * largest(step / "params").stat().st_size),
    "one bit": lambda step: flip(largest(step / "optimizer")),  # which Orbax does not notice
    "data gone": lambda step: shutil.rmtree(step / "data"),
    "other data": lambda step: (step / "data/metadata").write_text('{"was": "in another place"}'),
    "all gone": lambda step: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in step.iterdir()],
    "half copied": lambda step: [shutil.rmtree(step / name) for name in ("optimizer", "fingerprint")],
}


# What Python prints of failures in threads, pytest makes warnings of.
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", thinned(DAMAGES, 2))
def test_from_a_damaged_checkpoint_it_goes_back_to_the_one_before(tmp_path, damage, capfd):
    written(tmp_path, 1, 2, 3, keep=3)
    DAMAGES[damage](tmp_path / "checkpoints/3")
    found, at, said = restored(tmp_path, keep=3)
    assert_same(found, state(2))
    assert at == 20
    (line,) = said
    assert "\n" not in line and len(line) < 500
    assert "checkpoint 3 in" in line and "is damaged (" in line and line.endswith("going back to step 2")
    assert capfd.readouterr().err == ""
    # It was moved, not removed, and its step is free again.
    assert steps_in(tmp_path) == [1, 2] and (tmp_path / "damaged/3").is_dir()
    written(tmp_path, 3, keep=3)
    assert_same(restored(tmp_path)[0], state(3))


def test_a_half_written_folder_that_a_kill_left_is_removed(tmp_path):
    written(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "checkpoints/2", tmp_path / "checkpoints/3.orbax-checkpoint-tmp")
    found, _, said = restored(tmp_path)
    assert found.step == 2 and said == [] and steps_in(tmp_path) == [1, 2]


def test_of_several_damaged_ones_each_is_told_and_the_same_step_may_be_damaged_twice(tmp_path):
    written(tmp_path, 1, 2, 3, keep=3)
    for step in (2, 3):
        DAMAGES["empty"](tmp_path / f"checkpoints/{step}")
    found, _, said = restored(tmp_path, keep=3)
    assert found.step == 1 and [line.rpartition(" ")[2] for line in said] == ["2", "1"]
    written(tmp_path, 3, keep=3)
    DAMAGES["empty"](tmp_path / "checkpoints/3")
    assert restored(tmp_path)[0].step == 1
    assert sorted(p.name for p in (tmp_path / "damaged").iterdir()) == ["2", "3", "3.1"]


def test_where_none_is_whole_it_says_so_and_touches_nothing(tmp_path):
    written(tmp_path, 1, 2)
    for step in (1, 2):
        DAMAGES["truncated"](tmp_path / f"checkpoints/{step}")
    with pytest.raises(RunError, match=r"checkpoint 1 in .* is damaged .*, and so are all before it; nothing has been"):
        restored(tmp_path)
    assert steps_in(tmp_path) == [1, 2] and not (tmp_path / "damaged").exists()


def test_reading_parameters_alone_goes_back_too_and_moves_nothing(tmp_path):
    written(tmp_path, 1, 2)
    DAMAGES["garbage"](tmp_path / "checkpoints/2")
    said, checkpoints = [], Checkpoints(tmp_path)
    step, params = checkpoints.restore_params(abstract(state(0)).params, said.append)
    assert step == 1
    assert_same(params, state(1).params)
    checkpoints.close()
    assert len(said) == 1 and steps_in(tmp_path) == [1, 2]
    DAMAGES["all gone"](tmp_path / "checkpoints/2")
    DAMAGES["one bit"](tmp_path / "checkpoints/1")  # of the optimiser, which is not asked for
    checkpoints = Checkpoints(tmp_path)
    step, params = checkpoints.restore_params(abstract(state(0)).params, said.append)
    assert step == 1
    assert_same(params, state(1).params)
