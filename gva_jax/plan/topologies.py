"""TPU slices and GPU hosts that are not here, by name, to compile for: `v5e:16x16`, `v5p:4x4x8`, `h100:8x8`.

A TPU slice is named by its torus in chips; of GPUs, hosts x GPUs a host.
"""

import math
import re
from dataclasses import dataclass
from importlib.metadata import packages_distributions

import numpy as np

from gva_jax import chips
from gva_jax.config import ConfigError, require


@dataclass(frozen=True)
class Card:
    """An NVIDIA GPU: compute capability, name, multiprocessors, bytes of shared memory that a block can have."""

    capability: tuple[int, int]
    name: str
    cores: int
    shared: int


CARDS = {
    "a100": Card((8, 0), "NVIDIA A100-SXM4-80GB", 108, 166912),
    "h100": Card((9, 0), "NVIDIA H100 80GB HBM3", 132, 232448),
    "h200": Card((9, 0), "NVIDIA H200", 132, 232448),
    "b200": Card((10, 0), "NVIDIA B200", 148, 232448),
    "rtx_pro_6000": Card((12, 0), "NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 101376),
}
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: {memory:.0f}  shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""

# Kind of slice -> JAX's name of its devices, axes of its torus, most chips along one.
_TPUS = {
    "v5e": ("TPU v5 lite", 2, 16),
    "v6e": ("TPU v6 lite", 2, 16),
    "v5p": ("TPU v5", 3, 24),
    "tpu7x": ("TPU7x", 3, 24),
}
_GPUS_A_HOST = 8
KINDS = (*_TPUS, "a100", "h100", "h200", "b200")


@dataclass(frozen=True)
class Topology:
    """Where a program is to run. `shape`: chips along each axis of the torus, or (hosts, GPUs a host)."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def is_tpu(self) -> bool:
        return self.kind in _TPUS

    @property
    def size(self) -> int:
        """Devices in all; JAX makes two of a TPU7x."""
        return math.prod(self.shape) * self._whole_chip.devices

    @property
    def chip(self) -> chips.Chip:
        """What one device has."""
        return self._whole_chip.device()

    @property
    def _whole_chip(self) -> chips.Chip:
        return chips.of(_TPUS[self.kind][0] if self.is_tpu else CARDS[self.kind].name)

    def missing(self) -> list[str]:
        """Distributions that compiling for it needs and that are not installed."""
        installed = {name for names in packages_distributions().values() for name in names}
        gpu = "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"
        return [name for name in (("libtpu",) if self.is_tpu else gpu) if name not in installed]

    def devices(self) -> list:
        """Devices to compile for.

        Raises:
          ConfigError: the compiler knows no such slice, or is not installed.
        """
        if absent := self.missing():
            raise ConfigError(f"topology = {self.name!r}: needs {', '.join(absent)}; pip install 'gva-jax[aot]'")
        if not self.is_tpu:
            return gpus(self.kind, *self.shape)
        from jax.experimental import topologies

        try:
            return list(topologies.get_topology_desc(self.name, "tpu").devices)
        except Exception as error:  # of several types, and in many lines
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"topology = {self.name!r}: its compiler refuses it: {reason}") from error

    def seconds(self, nbytes: float, members: list, gathered: int) -> float:
        """Least time for each of `members`, devices that differ along one mesh axis, to receive `nbytes`.

        A torus axis that closes to a ring has two links into each chip, an open line one at its ends. Between GPU hosts
        what comes from other hosts enters once through the adapters of all members there. `gathered`: how many work
        together, of which each receives all but its own share.
        """
        if not nbytes:
            return 0.0
        if self.is_tpu:
            places = np.array([device.coords[: len(self.shape)] for device in members])
            along = [axis for axis in range(places.shape[1]) if len(set(places[:, axis])) > 1]
            links = sum(2 if self._closes(axis, len(set(places[:, axis]))) else 1 for axis in along)
            return nbytes / (max(links, 1) * self.chip.link)
        hosts = [device.id // self.shape[1] for device in members]
        count = len(set(hosts))
        if count == 1:
            return nbytes / self.chip.link
        together = len(hosts) // count
        foreign = nbytes * gathered / (gathered - 1) * (count - 1) / count / together
        return max(foreign / self.chip.network, (nbytes - foreign) / self.chip.link)

    def _closes(self, axis: int, covered: int) -> bool:
        """Whether that many chips along an axis of the torus form a ring."""
        if covered < self.shape[axis]:
            return False
        flat = len(self.shape) == 2
        return self.shape[axis] == 16 if flat else all(size % 4 == 0 for size in self.shape)


def parse(name: str) -> Topology:
    """The topology of a name such as `v5e:16x16`.

    Raises:
      ConfigError: naming what would be right.
    """
    kind, _, sizes = name.strip().lower().partition(":")
    example = "such as v5e:16x16, v6e:16x16, v5p:4x4x8, tpu7x:4x4x4 or h100:8x8 (hosts x GPUs a host)"
    known = kind in KINDS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes)
    require(bool(known), "topology", name, f"must be KIND:SIZES, {example}; kinds are {', '.join(KINDS)}")
    shape = tuple(int(size) for size in sizes.split("x"))
    if kind in _TPUS:
        _, axes, most = _TPUS[kind]
        require(len(shape) == axes, "topology", name, f"a {kind} slice has {axes} axes, {example}")
        require(max(shape) <= most, "topology", name, f"a {kind} slice has at most {most} chips along an axis")
    else:
        require(len(shape) == 2, "topology", name, f"GPUs are named by hosts x GPUs a host, {example}")
        right = f"a host has at most {_GPUS_A_HOST} GPUs: hosts x GPUs a host, {example}"
        require(shape[1] <= _GPUS_A_HOST, "topology", name, right)
    return Topology(f"{kind}:{sizes}", kind, shape)


def gpus(kind: str, hosts: int, each: int) -> list:
    """GPUs of a card in `CARDS` to compile for."""
    from jax.experimental import topologies

    card, shape = CARDS[kind], f"1x{hosts}x{each}"
    major, minor = card.capability
    facts = chips.of(card.name) or chips.of(CARDS["h100"].name)
    text = _GPU.format(
        cores=card.cores, shared=card.shared, major=major, minor=minor, name=card.name,
        bandwidth=facts.bandwidth, memory=facts.memory,
        features=" feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
    )  # fmt: skip
    description = topologies.get_topology_desc(platform="cuda", topology_name=shape, topology=shape, target_config=text)
    return list(description.devices)
