"""What a run tells while it goes on."""

import time

from gva_jax.train.folder import RunFolder
from gva_jax.train.guard import SkipLimit


class Meter:
    """Writes and shows each step's figures one step late, when its results are there anyway."""

    def __init__(self, folder: RunFolder, task, every: int, tokens: int, skips: SkipLimit):
        self._folder, self._task, self._every, self._tokens = folder, task, every, tokens
        self._skips = skips
        self._pending = None
        self.restart()

    def restart(self) -> None:
        """Leave what was done since the last report (an evaluation) out of the rate."""
        self._since, self._steps = time.monotonic(), 0

    def dispatched(self, step: int, metrics: dict) -> None:
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Report the pending step; waits for it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        self._steps += 1
        loss = float(metrics["loss"])
        rate = self._steps * self._tokens / max(time.monotonic() - self._since, 1e-9)
        self._task.advance(figures=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
        self._skips.check(step, metrics)
        if step % self._every == 0:
            figures = {name: float(value) for name, value in metrics.items()}
            self._folder.log({"step": step, **figures, "tokens_per_second": rate})
            self.restart()
