"""The launch files, with stand-ins for the clusters: what they start joins, stops, and is started again."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from processes import HERE, environment

LAUNCH = HERE.parent.parent / "scripts/launch"

# Runs the command here. A real ssh starts a login shell in the home folder, with no environment of its own.
SSH = """#!/bin/sh
[ "$1 $2" = "-o BatchMode=yes" ] || exit 99
echo "$3" >> ssh_hosts
shift 3
cd / && exec env -u GVA_JAX_CACHE sh -c "$*"
"""
# Starts two tasks as a step would, and gives the largest exit code.
SRUN = """#!/bin/sh
[ "$1" = "--kill-on-bad-exit=1" ] || exit 99
shift
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & a=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & b=$!
trap 'kill -TERM $a $b' USR1
code=0
for pid in $a $b; do
  while true; do wait $pid; c=$?; kill -0 $pid 2>/dev/null || break; done
  [ $c -gt $code ] && code=$c
done
exit $code
"""
SCONTROL = """#!/bin/sh
echo "$*" >> scontrol_calls
"""


@pytest.fixture
def place(tmp_path):
    """A folder with stand-ins on PATH, and an environment that says where `gva` is."""
    (tmp_path / "bin").mkdir()
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    variables = environment(tmp_path, devices=1, GVA=f"{sys.executable} {HERE / 'launched_process.py'}")
    variables["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    del variables["GVA_JAX_CACHE"]
    return tmp_path, variables


def launched(place, *command: str, stop=None, **more: str) -> tuple[int, list[dict], str]:
    """Exit code, what the processes told, and everything else that was printed. `stop`: the signal to end it with."""
    folder, variables = place
    with subprocess.Popen(
        [str(part) for part in command], cwd=folder, env=variables | more, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        if stop is not None:
            deadline = time.monotonic() + 60
            while not all((folder / f"started{i}").exists() for i in range(2)):
                assert time.monotonic() < deadline and process.poll() is None, process.communicate(timeout=10)
                time.sleep(0.05)
            stop(process)
        out, _ = process.communicate(timeout=100)
    lines = out.splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    rest = [line for line in lines if not line.startswith("{")]
    return process.returncode, sorted(told, key=lambda t: t["index"]), "\n".join(rest)


def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_ssh_starts_one_process_a_machine_and_stops_all_when_it_is_stopped(place):
    command = (LAUNCH / "ssh.sh", "localhost,other", "my config", "--until-stopped", "--name", "a 'b' $c")
    terminate = lambda process: process.send_signal(signal.SIGTERM)
    code, told, rest = launched(place, *command, PORT=port(), stop=terminate)
    assert code == 143 and rest == "", rest
    assert [(t["index"], t["count"], t["code"]) for t in told] == [(0, 2, 143), (1, 2, 143)]
    assert told[0]["together"] == told[1]["together"]
    for t in told:
        assert t["args"] == ["my config", "--until-stopped", "--name", "a 'b' $c"]
        assert t["folder"] == str(place[0]) and t["cache"] == str(place[0] / "cache")
    assert sorted((place[0] / "ssh_hosts").read_text().split()) == ["localhost", "other"]


# In place of `gva`: counts its starts, and fails with $CODE in the first $FAILURES of them.
FAILING = """#!/bin/sh
echo x >> "starts$GVA_JAX_PROCESS_ID"
[ "$(wc -l < "starts$GVA_JAX_PROCESS_ID")" -gt "$FAILURES" ] || exit "$CODE"
"""


@pytest.mark.parametrize(
    ("fails", "times", "starts", "code"), [("70", 1, 2, 0), ("134", 9, 4, 134), ("2", 9, 1, 2)]
)  # fmt: skip
def test_ssh_starts_all_again_some_times_but_for_a_mistake(place, fails, times, starts, code):
    folder, _ = place
    (folder / "gva").write_text(FAILING)
    (folder / "gva").chmod(0o755)
    command = (LAUNCH / "ssh.sh", "localhost,other", "config")
    found, _, rest = launched(place, *command, GVA=str(folder / "gva"), CODE=fails, FAILURES=str(times))
    assert found == code, rest
    assert (folder / "starts0").read_text() == (folder / "starts1").read_text() == "x\n" * starts
    assert rest.count(f"ended with {fails}; started again") == starts - 1


def slurm_job() -> dict[str, str]:
    """Variables of a batch script: JAX derives the coordinator's port from the job's number."""
    while True:
        job = random.randrange(2**20)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", job % 2**12 + 65535 - 2**12 + 1))
                return {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "2"}
            except OSError:
                continue


def test_slurm_tasks_join_and_a_stopped_job_is_queued_again(place):
    def limit_ahead(process):  # as --signal=TERM@300: to the step, not to the script
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGUSR1)

    job = slurm_job()
    command = ("bash", LAUNCH / "slurm.sbatch", "config", "--until-stopped")
    code, told, rest = launched(place, *command, stop=limit_ahead, **job)
    assert code == 0, rest
    assert [(t["index"], t["count"], t["code"]) for t in told] == [(0, 2, 143), (1, 2, 143)]
    assert told[0]["together"] == told[1]["together"]
    assert (place[0] / "scontrol_calls").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    assert "ended with 143; queued again" in rest


def test_slurm_jobs_are_not_queued_for_ever_nor_after_a_mistake(place):
    """One process's worth of stand-in suffices: the codes are what matters."""
    (place[0] / "bin/srun").write_text('#!/bin/sh\nexit "$CODE"\n')
    script = ("bash", LAUNCH / "slurm.sbatch", "config")
    job = slurm_job()
    assert launched(place, *script, CODE="0", **job)[0] == 0
    assert launched(place, *script, CODE="2", **job)[0] == 2
    assert launched(place, *script, CODE="70", SLURM_RESTART_COUNT="20", **job)[0] == 70
    assert not (place[0] / "scontrol_calls").exists()
    assert launched(place, *script, CODE="134", SLURM_RESTART_COUNT="19", **job)[0] == 0
    assert (place[0] / "scontrol_calls").exists()


def test_sbatch_options_are_all_read():
    """SLURM reads them up to the first command; one that stands below is silently ignored."""
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert options["signal"] == "TERM@300" and "requeue" in options and options["open-mode"] == "append"
    assert options["ntasks-per-node"] == options["gres"].partition(":")[2]


def test_the_jobset_is_whole():
    described = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert (described["apiVersion"], described["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert described["spec"]["failurePolicy"]["maxRestarts"] > 0
    (rule,) = described["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    (job,) = described["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"] == 4
    assert spec["backoffLimit"] == 0  # one failed pod ends the job: its processes cannot go on without it
    (rule,) = spec["podFailurePolicy"]["rules"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    # Chips of a host x hosts = chips of the topology.
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert chips * spec["parallelism"] == int(topology[0]) * int(topology[1])
    assert container["command"][:2] == ["gva", "train"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    cache = {variable["name"]: variable.get("value") for variable in container["env"]}["GVA_JAX_CACHE"]
    assert cache.startswith(container["volumeMounts"][0]["mountPath"])
