"""`--profile`: an xprof trace of a few steps, without compilation, into RUNS/NAME/profile."""

import contextlib
from collections.abc import Callable, Iterator

import jax

from gva_jax.config import RunConfig
from gva_jax.train.metrics import Meter

STEPS = 5  # traced, at most
WARM = 2  # steps of a launch that go before: the first one compiles, the second one takes its outputs
HORIZON = 1000  # steps of a launch among which the traced ones are looked for


def window(first: int, last: int, interrupted: Callable[[int], bool]) -> range:
    """The steps to trace in a launch that takes `first` to `last`: the longest row, of such the earliest.

    Nothing comes between them: `interrupted(step)` says whether an evaluation or a checkpoint follows that step.
    Empty if there are too few.
    """
    begin, end = first + WARM, min(last, first + HORIZON)
    for length in range(STEPS, 0, -1):
        for start in range(begin, end - length + 2):
            steps = range(start, start + length)
            if not any(map(interrupted, steps[:-1])):
                return steps
    return range(0)


class Profiler:
    """Context manager around a launch, of which every round goes into `round`. Traces nothing unless `plan` is called.

    Process 0 traces itself and its devices.
    """

    def __init__(self):
        self._steps, self._traced = range(0), range(0)

    def plan(self, config: RunConfig, step: int, meter: Meter, say: Callable[[str], None]) -> None:
        """Trace steps of a launch that starts at `step`."""
        if jax.process_index() != 0:
            return
        intervals = (config.train.eval_every, config.train.checkpoint_every)
        interrupted = lambda step: any(every and step % every == 0 for every in intervals)
        self._folder, self._meter, self._say = config.folder / "profile", meter, say
        self._steps = window(step + 1, config.train.steps, interrupted)
        if not self._steps:
            say("profile: too few steps are left to trace one that does not compile")

    @contextlib.contextmanager
    def round(self, step: int) -> Iterator[None]:
        """A round that dispatches `step`; it is marked in any trace, in one that was started elsewhere too."""
        if self._steps and step == self._steps[0]:
            with self._meter.paused():  # until the device is idle: the trace begins with this step
                jax.profiler.start_trace(self._folder)
        if step in self._steps:
            self._traced = range(self._steps[0], step + 1)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if self._steps and step == self._steps[-1]:
            with self._meter.paused():
                self._stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._traced:  # the run ended amid the steps
            self._stop()

    def _stop(self) -> None:
        first, last, self._traced = self._traced[0], self._traced[-1], range(0)
        jax.profiler.stop_trace()
        self._say(f"profile: steps {first:,} to {last:,} are in {self._folder}; to open it: pip install xprof, "
                  f"then xprof --logdir {self._folder}")  # fmt: skip
