"""Memory bandwidth and bfloat16 peak of accelerators, from their makers' data sheets (dense, one chip)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """`bandwidth` in bytes/s of HBM, `flops` in bfloat16 FLOP/s."""

    name: str
    bandwidth: float
    flops: float

    def bound(self, nbytes: float, flops: float) -> float:
        """Seconds below which work that reads `nbytes` and computes `flops` cannot be done."""
        return max(nbytes / self.bandwidth, flops / self.flops)


CHIPS = (
    Chip("TPU v5e", 819e9, 197e12),
    Chip("TPU v5p", 2765e9, 459e12),
    Chip("TPU v6e", 1640e9, 918e12),
    Chip("TPU7x", 7370e9, 2307e12),
    Chip("A100 80GB", 2039e9, 312e12),
    Chip("H100 SXM", 3350e9, 989e12),
    Chip("H200", 4800e9, 989e12),
    Chip("B200", 8000e9, 2250e12),
)
