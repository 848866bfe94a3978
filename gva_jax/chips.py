"""Accelerators: memory, bfloat16 peak (dense) and links of one chip.

TPUs: cloud.google.com/tpu/docs, the page of each version. Their "ICI bandwidth per chip" is that of all links one way
(v5e: 1600 Gb/s over 4). GPUs: NVIDIA's data sheets; NVLink's figure there is both ways. Networks between hosts are
those of NVIDIA's own DGX systems, one adapter a GPU: 200 Gb/s (A100), 400 Gb/s (others).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chip:
    """`bandwidth` in bytes/s of HBM, `flops` in bfloat16 FLOP/s; `kind` is how JAX's name of the device begins.

    `memory` in bytes of HBM. `link` in bytes/s one way: of one ICI link of a TPU, of a GPU's NVLink in all; `network`
    likewise, between hosts, a GPU. `devices` is how many devices JAX makes of one chip.
    """

    name: str
    kind: str
    bandwidth: float
    flops: float
    memory: float
    link: float
    network: float | None = None
    devices: int = 1

    def bound(self, nbytes: float, flops: float) -> float:
        """Seconds below which work that reads `nbytes` and computes `flops` cannot be done."""
        return max(nbytes / self.bandwidth, flops / self.flops)

    def device(self) -> "Chip":
        """The share of one of its devices."""
        rates = {name: getattr(self, name) / self.devices for name in ("bandwidth", "flops", "memory", "link")}
        return replace(self, **rates, devices=1)


CHIPS = (
    Chip("TPU v5e", "TPU v5 lite", 819e9, 197e12, 16e9, 50e9),
    Chip("TPU v5p", "TPU v5", 2765e9, 459e12, 95e9, 100e9),
    Chip("TPU v6e", "TPU v6 lite", 1640e9, 918e12, 32e9, 100e9),
    Chip("TPU7x", "TPU7x", 7370e9, 2307e12, 192e9, 100e9, devices=2),
    Chip("A100 80GB", "NVIDIA A100", 2039e9, 312e12, 80e9, 300e9, 25e9),
    Chip("H100 SXM", "NVIDIA H100", 3350e9, 989e12, 80e9, 450e9, 50e9),
    Chip("H200", "NVIDIA H200", 4800e9, 989e12, 141e9, 450e9, 50e9),
    Chip("B200", "NVIDIA B200", 8000e9, 2250e12, 180e9, 900e9, 50e9),
)


def of(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`, None if it is not among `CHIPS`."""
    fitting = [chip for chip in CHIPS if device_kind.startswith(chip.kind)]
    return max(fitting, key=lambda chip: len(chip.kind), default=None)  # "TPU v5 lite" begins with "TPU v5" too
