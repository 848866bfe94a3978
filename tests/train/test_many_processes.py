"""Several processes: how they are told of each other, that they train like one, and how they end together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny_run as tiny
from processes import HERE, Job, environment, free_address

from gva_jax import cli, compat, distributed
from gva_jax import cluster as cluster_module
from gva_jax.cluster import Place
from gva_jax.config import ConfigError, MeshConfig, TrainConfig
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.watch import Beat, judge

# ---- who the others are ----------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch):
    """Sets environment variables; collects what is asked of JAX and with what it is joined."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "GVA_JAX_N", "GVA_JAX_P", "GVA_JAX_CO", "TPU_", "JOB_", "JAX_LOCAL")):
            monkeypatch.delenv(name)
    asked, joined = [], []
    monkeypatch.setattr(distributed, "_join", lambda place, seconds: joined.append(place))
    monkeypatch.setattr(distributed, "listen", lambda: None)
    detect = compat.detect_cluster

    def detecting(*args):
        asked.append(args)
        return detect(*args)

    monkeypatch.setattr(compat, "detect_cluster", detecting)

    def start(variables=None, coordinator=None, num_processes=None, process_id=None):
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)
        distributed.start(coordinator, num_processes, process_id, 5)
        return joined[-1] if joined else None

    start.asked = asked
    return start


SLURM = {
    "SLURM_JOB_ID": "4000", "SLURM_STEP_NODELIST": "node[07-09]", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_VERSION": "4.1.6",
}  # fmt: skip


def test_alone_without_flags_and_variables(cluster):
    assert cluster() is None and cluster.asked == []


def test_slurm_is_read_by_jax(cluster):
    place = cluster(SLURM)
    assert place.coordinator.startswith("node07:") and (place.count, place.index) == (6, 5)
    assert place.local_devices == [1]


def test_open_mpi_is_read_by_jax(cluster):
    place = cluster(OPEN_MPI)
    assert place.coordinator.startswith("10.96.0.1:") and (place.count, place.index) == (4, 3)


@pytest.mark.parametrize(
    "variables",
    [
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --ntasks 1
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # a shell or a notebook on a node of a larger job
        {name: SLURM[name] for name in SLURM if "STEP" not in name},  # the batch script itself
        {"SLURM_JOB_ID": "4000", "SLURM_NTASKS": "6"},  # a login node's allocation
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # any pod
    ],
)
def test_one_task_stays_alone(cluster, variables):
    assert cluster(variables) is None and cluster.asked == []


def test_a_tpu_machine_asks_jax_for_its_pod(cluster, monkeypatch):
    monkeypatch.setattr(compat, "has_tpu_chips", lambda: True)
    assert cluster() is None and cluster.asked == []  # JAX runs on the CPU here
    monkeypatch.setattr(cluster_module, "_on_tpu", lambda: True)
    monkeypatch.setattr(compat, "detect_cluster", lambda *_: ("10.0.0.2:8482", 16, 3, None))
    assert cluster() == Place("10.0.0.2:8482", 16, 3)


def test_a_pod_of_one_host_stays_alone(cluster, monkeypatch):
    monkeypatch.setattr(cluster_module, "_on_tpu", lambda: True)
    monkeypatch.setattr(compat, "detect_cluster", lambda *_: ("10.0.0.2:8482", 1, 0, None))
    assert cluster() is None


def test_a_cluster_that_says_too_little_is_told(cluster, monkeypatch):
    def fails(*_):
        raise KeyError("job-name")

    monkeypatch.setattr(compat, "detect_cluster", fails)
    with pytest.raises(ConfigError, match=r"cannot be found in the environment \('job-name'\): give --coordinator"):
        cluster({"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_flags_complete_variables_and_go_before_them(cluster):
    variables = {"GVA_JAX_COORDINATOR": "a:1234", "GVA_JAX_NUM_PROCESSES": "8", "JAX_LOCAL_DEVICE_IDS": "2,3"}
    assert cluster({**SLURM, **variables}, process_id=7) == Place("a:1234", 8, 7, [2, 3])
    assert cluster(variables, "b:1", 4, 0) == Place("b:1", 4, 0, [2, 3])
    assert cluster.asked == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("a:1", None, None), "num_processes = None: must be given with --coordinator (GVA_JAX_COORDINATOR)"),
        ((None, 2, 0), "coordinator = None: must be given with"),
        (("a:1", 2, 2), "process_id = 2: must be 0 or more and below num_processes = 2"),
        (("a:1", 2, -1), "process_id = -1: must be 0 or more"),
        (("a:1", 0, 0), "num_processes = 0: must be 1 or more"),
        (("a", 2, 0), "coordinator = 'a': must be HOST:PORT"),
        (("a:x", 2, 0), "coordinator = 'a:x': must be HOST:PORT"),
        (("a:70000", 2, 0), "coordinator = 'a:70000': must be HOST:PORT"),
        (("a:1", "two", 0), "num_processes = 'two': must be a whole number"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(cluster, flags, told):
    with pytest.raises(ConfigError) as error:
        cluster(None, *flags)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_one_process_by_flags_is_alone(cluster):
    assert cluster(None, "a:1", 1, 0) is None


def test_a_coordinator_that_cannot_be_reached_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = free_address()
    joined = ["--coordinator", address, "--num_processes", "2", "--process_id", "1", "--connect_seconds", "0.6"]
    since = time.monotonic()
    code = cli.main(["train", "quickstart", *joined])
    told = f"error: coordinator {address} cannot be reached within 0.6 s (--connect_seconds): Connection refused"
    err = capsys.readouterr().err
    assert code == distributed.LOST and err.startswith(told) and err.count("\n") == 1
    assert time.monotonic() - since < 5 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("taken", "code", "told"),
    [
        (False, distributed.LOST, "error: not all of the 2 processes have come to the coordinator {} within 1.5 s"),
        (True, 2, "error: coordinator = '{}': must have a free port of this machine, where process 0 runs"),
    ],
    ids=["nobody comes", "port taken"],
)
def test_a_first_process_that_cannot_begin_says_so(tmp_path, taken, code, told):
    gva = "import sys; from gva_jax.cli import main; sys.exit(main())"
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if not taken:
            server.close()
        joined = ["--coordinator", address, "--num_processes", "2", "--process_id", "0", "--connect_seconds", "1.5"]
        with Job(tmp_path, ["-c", gva, "train", "quickstart", *joined]) as job:
            (ended,) = job.end()
    assert ended.code == code and len(ended.errors) == 1, ended
    assert ended.errors[0].startswith(told.format(address))


# ---- who has stalled -------------------------------------------------------------------------------------------------


def beat(index, reached, ago, limit=10.0, what="step 12"):
    return Beat(f"process {index} (node-{index})", reached, what, ago, limit, number=1)


def test_the_one_behind_is_named_when_all_are_over_their_time():
    beats = {0: beat(0, 13, 11, what="step 13"), 1: beat(1, 12, 14), 2: beat(2, 13, 11, what="step 13")}
    culprits, message = judge(beats, set())
    assert culprits == {1}
    assert message.startswith("process 1 (node-1) has not reached step 13 (last: step 12, 14.0 s ago)")
    assert "\n" not in message and "checkpoint stays" in message
    # It may compile its first step for longer.
    assert judge({**beats, 1: beat(1, 12, 14, limit=60)}, set()) is None
    assert judge({**beats, 0: beat(0, 13, 9)}, set()) is None
    assert judge(beats, set(), patient=True) is None


def test_one_without_a_sign_of_life_is_named_at_once():
    beats = {0: beat(0, 13, 5), 1: beat(1, 12, 6)}
    one = "process 1 (node-1) shows no sign of life (last: step 12, at least 6.0 s ago)"
    two = "process 2 shows no sign of life (it has never shown any)"
    for patient in (False, True):
        culprits, message = judge(beats, {1, 2}, patient)
        assert culprits == {1, 2} and message.startswith(f"{one}; {two}; ")


def test_nobody_is_accused_where_all_wait():
    culprits, message = judge({0: beat(0, 13, 11), 1: beat(1, 13, 12)}, set())
    assert culprits == set() and "all 2 processes have reached step 12" in message and "network" in message


def test_a_message_names_some_and_counts_the_rest():
    beats = {i: beat(i, 13 if i == 0 else 12, 20) for i in range(100)}
    culprits, message = judge(beats, set())
    assert len(culprits) == 99 and "process 8 " in message and "process 9 " not in message and "and 91 more" in message


# ---- two processes without a model -----------------------------------------------------------------------------------


def light(folder, *deed: str) -> Job:
    address = free_address()
    commands = ([str(HERE / "light_process.py"), address, str(i), *deed] for i in range(2))
    return Job(folder, *commands, devices=2)


def test_what_is_shared_and_a_mistake_of_all_is_told_once(tmp_path):
    with light(tmp_path, "share", str(tmp_path / "made")) as job:
        ends = job.end()
        pid = job.processes[0].pid
    assert [e.out.splitlines() for e in ends] == [[f"from {pid} 0 7", "made"], [f"from {pid} 0 7", "saw"]]
    assert list((tmp_path / "made").iterdir()) == []
    assert [e.code for e in ends] == [2, 2]
    assert [line for e in ends for line in e.errors] == ["error: name = 'x': is not right"]


def test_a_folder_that_one_does_not_see_ends_all_and_is_told_by_it_and_by_the_first(tmp_path):
    with light(tmp_path, "apart", str(tmp_path)) as job:
        first, second = job.end()
    assert (first.code, second.code) == (2, 2)
    (told,) = second.errors
    assert "of process 0 is not seen by process 1 (" in told and "file system" in told
    (again,) = first.errors
    assert again.startswith("error: process 1 (") and again.endswith(told.removeprefix("error: "))


def test_a_process_that_sleeps_is_named_and_all_end(tmp_path):
    with light(tmp_path, "sleep") as job:
        job.wait_for("asleep", 1)
        since = time.monotonic()
        ends = job.end(seconds=200)
    assert time.monotonic() - since < 30
    for ended in ends:
        assert ended.code == distributed.LOST and len(ended.errors) == 1, ended
        assert " has not reached step 4 (last: step 3, " in ended.errors[0]
        assert ended.errors[0].startswith("error: process 1 (")


@pytest.mark.parametrize("frozen", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_process_that_is_frozen_is_named(tmp_path, frozen):
    """SIGSTOP stops all its threads. Where it is process 0, the store that it serves does not answer either."""
    with light(tmp_path, "march") as job:
        job.wait_for("step 60\n", 1)
        job.kill(frozen, signal.SIGSTOP)
        (ended,) = job.end(1 - frozen, seconds=200)
        job.kill(frozen, signal.SIGCONT)
        (other,) = job.end(frozen, seconds=200)
    assert ended.code == distributed.LOST and len(ended.errors) == 1, ended
    assert ended.errors[0].startswith(f"error: process {frozen}") and " shows no sign of life (" in ended.errors[0]
    assert "step " in ended.errors[0] and other.code == distributed.LOST


def test_the_death_of_the_first_is_told(tmp_path):
    with light(tmp_path, "march") as job:
        job.wait_for("step 3", 1)
        job.kill(0)
        (ended,) = job.end(1, seconds=200)
    assert ended.code == distributed.LOST, ended
    told = ended.errors[0].removeprefix("error: process 0, the coordinator, ")
    assert told.startswith(("is gone (", "shows no sign of life ("))


# ---- two processes train like one ------------------------------------------------------------------------------------


class _Position:
    """Stands for the iterator that a checkpoint also holds."""

    def get_state(self):
        return {}

    def set_state(self, _):
        pass


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "steps", "within"),
    [("float64", 20, 1e-12), ("float32", 1, 1e-6)],
)
def test_two_processes_of_four_devices_equal_one_of_eight(tmp_path, dtype, steps, within):
    """Losses of the quickstart's model, which on this mesh are those of one device (test_sharding.py); and checkpoints
    both ways: the processes begin with what one process saved, and save what it restores."""
    run = tiny.quickstart(MeshConfig(data=2, fsdp=2, tensor=2), dtype)
    with jax.enable_x64(dtype == "float64"):
        it = tiny.Run(run).optimised()
        begin = Checkpoints(tmp_path, TrainConfig(keep=2))
        begin.save(it.state, _Position())
        begin.wait()
        begin.close()
        losses = [m["loss"] for m in it.advance(steps)]

        address = free_address()
        commands = ([str(HERE / "equal_process.py"), address, str(i), str(tmp_path), dtype, str(steps)] for i in (0, 1))
        with Job(tmp_path, *commands, JAX_ENABLE_X64=str(int(dtype == "float64"))) as job:
            ends = job.end()
        assert [e.code for e in ends] == [0, 0], ends
        for ended in ends:
            np.testing.assert_allclose(json.loads(ended.out.splitlines()[-1]), losses, rtol=within, atol=0)
        assert steps == 1 or losses[-1] < losses[0] - 0.4  # it has learnt, so the comparison is not one of constants

        theirs = Checkpoints(tmp_path)
        assert theirs.latest == steps
        restored = theirs.restore(it.abstract, _Position())
        theirs.close()
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=100 * within, atol=10 * within)
    jax.tree.map(close, jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, it.state))


# ---- a whole run, disturbed ------------------------------------------------------------------------------------------

CONFIG = """
from dataclasses import replace
import tiny_run as tiny
from gva_jax.config import DataConfig, TrainConfig

def config():
    return replace(
        tiny.float64(tiny.config(vocab_size=300)), name="disturbed",
        data=DataConfig(source="docstrings:json,argparse", context_length=32, batch_size=8, holdout=0.1),
        train=TrainConfig(steps=20, log_every=1, checkpoint_every=4, eval_every=7, eval_batches=1, stall_seconds=8),
    )
"""
# Steps that take long enough to be disturbed.
SLOW = """
import sys, time
from gva_jax import cli
from gva_jax.train import loop
put = loop.put
loop.put = lambda *args: (time.sleep(0.3), put(*args))[1]
sys.exit(cli.main())
"""
ALONE = "import sys; from gva_jax.cli import main; sys.exit(main(sys.argv[1:] + ['--name', 'whole']) or main())"


def logged(folder) -> dict[int, float]:
    """The loss of each step in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def steps_saved(folder) -> list[int]:
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())


def disturbed(folder, step: int, signum: int, index: int = 1):
    """Two processes of `gva train`, of which one gets a signal when `step` is in the log; how they ended."""
    address = free_address()
    joined = ["--coordinator", address, "--num_processes", "2", "--process_id"]
    run = folder / "runs/disturbed"
    commands = (["-c", SLOW, "train", "config.py", *joined, str(i)] for i in range(2))
    with Job(folder, *commands, JAX_ENABLE_X64="1") as job:
        deadline = time.monotonic() + 300
        while max(logged(run), default=0) < step and time.monotonic() < deadline:
            assert all(process.poll() is None for process in job.processes), job.end(seconds=30)
            time.sleep(0.05)
        job.kill(index, signum)
        return job.end(seconds=100)


@pytest.mark.long
def test_a_run_stopped_then_killed_and_resumed_alone_goes_on_exactly(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    run = tmp_path / "runs/disturbed"

    # SIGTERM to one of them: both stop after the same step, with one checkpoint.
    first, second = disturbed(tmp_path, 3, signal.SIGTERM)
    stopped = max(logged(run))
    assert (first.code, second.code) == (128 + signal.SIGTERM,) * 2, (first, second)
    assert f"stopped at step {stopped} of 20" in first.out and first.errors == second.errors == []
    assert second.out == ""  # only process 0 speaks
    assert steps_saved(run)[-1] == stopped < 20
    assert sorted(logged(run)) == list(range(1, stopped + 1))

    # SIGKILL of one: the other names it and leaves what is saved.
    first, second = disturbed(tmp_path, stopped + 5, signal.SIGKILL)
    assert f"resumed runs/disturbed at step {stopped} of 20" in first.out
    assert (first.code, second.code) == (distributed.LOST, -signal.SIGKILL), (first, second)
    assert len(first.errors) == 1 and " shows no sign of life (last: step " in first.errors[0]
    assert first.errors[0].startswith("error: process 1 (")

    # One process with all devices goes on, to the losses of a run that it makes undisturbed.
    alone = subprocess.run(
        [sys.executable, "-c", ALONE, "train", "config.py"], cwd=tmp_path, text=True, capture_output=True, timeout=600,
        env=environment(tmp_path, devices=8, JAX_ENABLE_X64="1"),
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert "resumed runs/disturbed at step" in alone.stdout
    whole, found = logged(tmp_path / "runs/whole"), logged(run)
    assert list(found) == list(whole) == list(range(1, 21))
    np.testing.assert_allclose(list(found.values()), list(whole.values()), rtol=1e-9, atol=0)
    assert whole[20] < whole[1]
