"""What a run tells while it goes on: one line every `train.log_every` steps, on the screen and in the log.

Model FLOPs utilisation, MFU, is the share of the chips' bfloat16 peak that the model's own arithmetic takes up:

    MFU = training FLOPs per token (`gva_jax.info`; recomputation by remat or flash attention is left out)
          x tokens per second / (devices x peak FLOP/s of a device)

The peak is that of `gva_jax.chips`, in bfloat16 whatever the run computes in; on a chip that is not there, and on CPUs,
MFU is left out. Tokens are all places of a batch, padding included.

Rates are those of steps that followed one another: the first step of a launch, which compiles, and evaluations,
checkpoints and profiles do not count.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import Mesh

from gva_jax import chips, info
from gva_jax.config import RunConfig
from gva_jax.display import Display, Task
from gva_jax.train.guard import SkipLimit
from gva_jax.train.writers import Log


@dataclass(frozen=True)
class Work:
    """What a step does: tokens, FLOPs per token; and the peak of all its devices in FLOP/s, None if not known."""

    tokens: int
    flops_per_token: int
    peak: float | None

    @classmethod
    def of(cls, config: RunConfig, mesh: Mesh) -> "Work":
        found = [chips.of(device.device_kind) for device in mesh.devices.flat]
        peak = sum(chip.flops / chip.devices for chip in found) if all(found) else None
        return cls(config.data.batch_size * config.data.context_length, info.training_flops(config), peak)

    def rates(self, steps: int, seconds: float) -> dict[str, float]:
        """`tokens_per_second`, and `mfu` (0 to 1) where the peak is known; nothing for no steps."""
        if not steps:
            return {}
        rate = steps * self.tokens / max(seconds, 1e-9)
        return {"tokens_per_second": rate} | ({"mfu": rate * self.flops_per_token / self.peak} if self.peak else {})


class Meter:
    """Writes and shows each step's figures one step late, when its results are there anyway."""

    def __init__(self, log: Log, task: Task, display: Display, every: int, work: Work, skips: SkipLimit):
        self._log, self._task, self._display, self._every, self._work = log, task, display, every, work
        self._skips = skips
        self._pending = self._since = None
        self._steps = 0
        task.lines = False  # the meter has its own

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Report what is pending (which waits for it), and leave what is done meanwhile out of the rates."""
        self.flush()
        begun = time.monotonic()
        yield
        if self._since is not None:
            self._since += time.monotonic() - begun

    def dispatched(self, step: int, metrics: dict) -> None:
        """`step` is on its way to the device, and will give `metrics`; report the step before it."""
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Report the pending step; waits for it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        loss = float(metrics["loss"])  # waits
        now = time.monotonic()
        if self._since is None:
            self._since = now  # the first step of this launch compiled
        else:
            self._steps += 1
        rates = self._work.rates(self._steps, now - self._since)
        self._task.advance(figures="  ".join(_words({"loss": loss, **rates})))
        self._skips.check(step, metrics)
        if step % self._every == 0:
            figures = {name: float(value) for name, value in metrics.items()} | rates
            self._log.write(step, figures)
            count = f"step {step:,}/{self._task.total:,}"
            self._display.say("  ".join(filter(None, [count, *_words(figures), self._task.left()])))
            self._since, self._steps = now, 0


_WORDS = {
    "loss": "loss {:.4f}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "gradient {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
}


def _words(figures: dict[str, float]) -> list[str]:
    """Figures for a person, in this order; what has no words of its own is told under its name."""
    figures = {name: value for name, value in figures.items() if value or not name.startswith("skipped")}
    names = [*(name for name in _WORDS if name in figures), *(name for name in figures if name not in _WORDS)]
    return [_WORDS.get(name, name + " {:.4g}").format(figures[name]) for name in names]
