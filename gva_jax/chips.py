"""Memory bandwidth and bfloat16 peak of accelerators, from their makers' data sheets (dense, one chip)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """`bandwidth` in bytes/s of HBM, `flops` in bfloat16 FLOP/s; `kind` is how JAX's name of the device begins.

    `devices` is how many devices JAX makes of one chip.
    """

    name: str
    kind: str
    bandwidth: float
    flops: float
    devices: int = 1

    def bound(self, nbytes: float, flops: float) -> float:
        """Seconds below which work that reads `nbytes` and computes `flops` cannot be done."""
        return max(nbytes / self.bandwidth, flops / self.flops)


CHIPS = (
    Chip("TPU v5e", "TPU v5 lite", 819e9, 197e12),
    Chip("TPU v5p", "TPU v5", 2765e9, 459e12),
    Chip("TPU v6e", "TPU v6 lite", 1640e9, 918e12),
    Chip("TPU7x", "TPU7x", 7370e9, 2307e12, devices=2),
    Chip("A100 80GB", "NVIDIA A100", 2039e9, 312e12),
    Chip("H100 SXM", "NVIDIA H100", 3350e9, 989e12),
    Chip("H200", "NVIDIA H200", 4800e9, 989e12),
    Chip("B200", "NVIDIA B200", 8000e9, 2250e12),
)


def of(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`, None if it is not among `CHIPS`."""
    fitting = [chip for chip in CHIPS if device_kind.startswith(chip.kind)]
    return max(fitting, key=lambda chip: len(chip.kind), default=None)  # "TPU v5 lite" begins with "TPU v5" too
