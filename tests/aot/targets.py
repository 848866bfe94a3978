"""TPUs and NVIDIA GPUs that are not here, to compile for; compilation and its reports, not a measurement."""

import json
import os
import subprocess
import sys
from pathlib import Path

from gva_jax.plan.topologies import CARDS, Topology, gpus

ROOT = Path(__file__).parents[2]
TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def devices(target: str, count: int = 1):
    """Devices to compile for, of a name in TPUS (all of a small slice) or in CARDS."""
    from jax.experimental import topologies

    if target in TPUS:
        return topologies.get_topology_desc(TPUS[target], "tpu").devices
    return gpus(target, 1, count)


def abstract_mesh(target: str):
    """A mesh of one such device, to trace under: it tells the platform, and a card's compute capability."""
    from jax.sharding import AbstractDevice, AbstractMesh

    if target in TPUS:
        device = devices(target)[0]
        return AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device.device_kind, device.num_cores, "tpu"))
    card = CARDS[target]

    class Device(AbstractDevice):
        compute_capability = ".".join(map(str, card.capability))

    return AbstractMesh((1,), ("x",), abstract_device=Device(card.name, card.cores, "cuda"))


def missing(target: str) -> list[str]:
    """Distributions that compiling for it needs and that are not installed."""
    return Topology(target, "v5e" if target in TPUS else target, ()).missing()


def run(file: str, *args, **environment: str) -> list[dict]:
    """The lines of JSON that `python file *args` prints: a process of its own, for what is read when JAX starts, and
    since what does not compile may abort it.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",  # or JAX asks for a device
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join(str(ROOT / place) for place in (".", "tests", "tests/aot", "tests/kernels")),
    } | environment  # fmt: skip
    command = [sys.executable, file, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
