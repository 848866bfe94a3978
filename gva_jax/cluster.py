"""Who the other processes are: from flags, from variables, or from what JAX reads off a cluster's environment."""

import os
from dataclasses import dataclass

import jax

from gva_jax import compat
from gva_jax.config import ConfigError, require

# The flags' other names, for launchers that set the environment.
VARIABLES = {
    "coordinator": "GVA_JAX_COORDINATOR",
    "num_processes": "GVA_JAX_NUM_PROCESSES",
    "process_id": "GVA_JAX_PROCESS_ID",
}


@dataclass(frozen=True)
class Place:
    """Where one process stands among all."""

    coordinator: str
    count: int
    index: int
    # Devices of this machine that are its own. None: all.
    local_devices: list[int] | None = None


def find(coordinator: str | None, num_processes: int | None, process_id: int | None, seconds: float) -> Place | None:
    """The place of this process; None where it is alone.

    What is None comes from `VARIABLES`; if there is nothing in these either, from what JAX detects in a SLURM step,
    under Open MPI, in an indexed Kubernetes job and on TPU machines, for which it may take so many seconds.

    Raises:
      ConfigError: the three do not fit together, or the cluster says too little.
    """
    return _given(coordinator, num_processes, process_id) or _detected(seconds)


def _given(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Place | None:
    """The place that flags and variables name."""
    flags = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    given = {name: os.environ.get(VARIABLES[name]) if flag is None else flag for name, flag in flags.items()}
    if not any(value not in (None, "") for value in given.values()):
        return None
    for name, value in given.items():
        others = ", ".join(f"--{other} ({VARIABLES[other]})" for other in given if other != name)
        require(value not in (None, ""), name, value, f"must be given with {others}, as --{name} or {VARIABLES[name]}")
    count, index = (_whole(name, given[name]) for name in ("num_processes", "process_id"))
    require(count >= 1, "num_processes", count, "must be 1 or more")
    require(0 <= index < count, "process_id", index, f"must be 0 or more and below num_processes = {count}")
    address = str(given["coordinator"])
    host, _, port = address.rpartition(":")
    plain = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
    require(plain, "coordinator", address, "must be HOST:PORT, where process 0 runs and a free port there")
    ids = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    return Place(address, count, index, [int(i) for i in ids.split(",")] if ids else None)


def _whole(name: str, value) -> int:
    require(str(value).strip().lstrip("-").isdecimal(), name, value, "must be a whole number")
    return int(value)


def _detected(seconds: float) -> Place | None:
    """The place that JAX reads off a cluster's environment; None where that speaks of one process, or of none."""
    environment = os.environ
    number = lambda *names: next((int(environment[n]) for n in names if environment.get(n, "").isdecimal()), 0)
    count = method = None
    if "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        # The step's own count: the job's is larger where someone looks at a node of it by hand, alone.
        method, count = "slurm", number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    elif "OMPI_COMM_WORLD_SIZE" in environment:
        method, count = "ompi", number("OMPI_COMM_WORLD_SIZE")
    elif not (_on_tpu() or "JOB_COMPLETION_INDEX" in environment):
        return None
    if count in (0, 1):
        return None
    try:
        found = compat.detect_cluster(count, method, round(seconds))
    except Exception as error:
        told = " ".join(str(error).split()) or type(error).__name__
        right = "give --coordinator HOST:PORT --num_processes N --process_id I (1 and 0 for this process alone)"
        raise ConfigError(f"the other processes cannot be found in the environment ({told}): {right}") from error
    return None if None in found[:3] else Place(*found)


def _on_tpu() -> bool:
    platforms = jax.config.jax_platforms
    return compat.has_tpu_chips() and (not platforms or "tpu" in platforms)
