"""TPUs and NVIDIA GPUs that are not here, to compile for; compilation and its reports, not a measurement."""

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


class Card(NamedTuple):
    """An NVIDIA GPU: compute capability, name, multiprocessors, bytes of shared memory that a block can have."""

    capability: tuple[int, int]
    name: str
    cores: int
    shared: int


CARDS = {
    "a100": Card((8, 0), "NVIDIA A100-SXM4-80GB", 108, 166912),
    "h100": Card((9, 0), "NVIDIA H100 80GB HBM3", 132, 232448),
    "b200": Card((10, 0), "NVIDIA B200", 148, 232448),
    "rtx_pro_6000": Card((12, 0), "NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 101376),
}
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 84942979072  shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


def devices(target: str, gpus: int = 1):
    """Devices to compile for, of a name in TPUS (all of a small slice) or in CARDS."""
    from jax.experimental import topologies

    if target in TPUS:
        return topologies.get_topology_desc(TPUS[target], "tpu").devices
    card, shape = CARDS[target], f"1x1x{gpus}"
    major, minor = card.capability
    text = _GPU.format(
        cores=card.cores, shared=card.shared, major=major, minor=minor, name=card.name,
        features=" feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
    )  # fmt: skip
    return topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=text
    ).devices


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
    installed = {name for names in packages_distributions().values() for name in names}
    gpu = "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"
    return [name for name in (("libtpu",) if target in TPUS else gpu) if name not in installed]


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
