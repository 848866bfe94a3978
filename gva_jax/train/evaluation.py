"""Loss, perplexity and bits per byte over a whole split."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from gva_jax.train.step import put


def perplexity(loss: float) -> float:
    """Infinite where it is too large for a float."""
    return math.inf if loss >= 700 else math.exp(loss)


@dataclass(frozen=True)
class Evaluation:
    """Sums over a split; what is read off them does not depend on how it was batched."""

    nats: float
    targets: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nats / self.targets

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers: the cost of the targets, ends of text included, per byte of text."""
        return self.nats / math.log(2) / self.bytes

    def figures(self, split: str) -> dict[str, float]:
        """For a log: `split_loss`, `split_perplexity`, `split_bits_per_byte`."""
        names = ("loss", "perplexity", "bits_per_byte")
        return {f"{split}_{name}": getattr(self, name) for name in names}

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, {self.bits_per_byte:.4f} bits per byte"


def evaluate(
    eval_step: Callable,
    params,
    batches: Iterable[dict[str, np.ndarray]],
    mesh: Mesh,
    most: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Run `eval_step` over `batches` (the first `most` of them, if given). None if it was `stopped()` between two."""
    sums = totals(eval_step, params, batches, lambda batch: put(batch, mesh), most, stopped)
    return None if sums is None else evaluation(sums)


def totals(
    eval_step: Callable, params, batches: Iterable, put: Callable, most: int = 0, stopped: Callable = lambda: False
) -> np.ndarray | None:
    """The sum of what `eval_step(params, put(batch))` returns, in float64; None if it was stopped."""
    sums, pending = np.zeros(3, np.float64), None
    for i, batch in enumerate(batches):
        if most and i == most:
            break
        if stopped():
            return None
        current = eval_step(params, put(batch))
        if pending is not None:
            sums = sums + np.asarray(pending, np.float64)  # while the device works on the current one
        pending = current
    return sums if pending is None else sums + np.asarray(pending, np.float64)


def evaluation(sums: np.ndarray) -> Evaluation:
    """From `totals` of one model, (3,)."""
    return Evaluation(nats=float(sums[0]), targets=round(sums[1]), bytes=round(sums[2]))
