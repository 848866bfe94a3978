"""Where a run's figures go: metrics.jsonl and TensorBoard always, Weights & Biases where it is installed.

    RUNS/NAME/metrics.jsonl   one object a line: step and figures
    RUNS/NAME/tensorboard/    event files, one a launch
    RUNS/NAME/wandb/          what W&B keeps on disk

What a resumed run is about to train again is forgotten first, so no step stands anywhere twice.
"""

import contextlib
import importlib.util
import inspect
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from gva_jax import config as configs
from gva_jax import distributed
from gva_jax.config import RunConfig, RunError
from gva_jax.data import needs_extra

SPEED = ("tokens_per_second", "mfu")
SPLITS = ("development", "heldout")


def tag(name: str) -> str:
    """A figure's name in TensorBoard and W&B: train/loss, speed/mfu, development/loss, heldout/perplexity."""
    split, _, rest = name.partition("_")
    if split in SPLITS:
        return f"{split}/{rest}"
    return f"{'speed' if name in SPEED else 'train'}/{name}"


class Log:
    """Takes figures to every place. Writes in process 0 only: in the others it does nothing."""

    def __init__(self, config: RunConfig, step: int, say: Callable[[str], None]):
        """`step` is where this launch starts: what was logged after it will be logged again."""
        self._lines = self._places = None
        if distributed.first():
            self._lines = JsonLines(config.folder / "metrics.jsonl", step)
            self._places = [TensorBoard(config.folder / "tensorboard", step), WeightsAndBiases(config, say)]

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Figures of one step; not again those that stand there already, of a finished run that is launched again."""
        if self._lines is None or not self._lines.write(step, figures):
            return
        for place in self._places:
            place.write(step, {tag(name): value for name, value in figures.items()})

    def has(self, step: int, name: str) -> bool:
        """Whether the figure `name` of this step stands there already; the same in all processes, which all ask."""
        return distributed.share(lambda: str((step, name) in self._lines.known)) == str(True)

    def close(self) -> None:
        for place in self._places or ():
            place.close()


class JsonLines:
    """metrics.jsonl up to `step`; each line is on its way to the disk when `write` returns."""

    def __init__(self, path: Path, step: int):
        self._path = path
        kept = [record for record in read(path) if record["step"] <= step]
        self.known = {(record["step"], name) for record in kept for name in record}
        if path.exists():
            partial = path.with_name(f".{path.name}.partial")
            with _told(path):
                partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
                partial.replace(path)

    def write(self, step: int, figures: dict[str, float]) -> bool:
        """Whether the figures are new."""
        names = {(step, name) for name in figures}
        if names <= self.known:
            return False
        self.known |= names
        append(self._path, {"step": step, **figures})
        return True


def append(path: Path, record: dict) -> None:
    """One line more in a file of JSON lines. What is not finite, which JSON does not have, is null there.

    Raises:
      RunError: it cannot be written.
    """
    record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    with _told(path), path.open("a") as file:
        file.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def read(path: Path) -> list[dict]:
    """The lines of such a file; what is none, such as a last one that a killed process left unfinished, is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


class TensorBoard:
    """Scalars in event files, without TensorFlow. A reader drops what stands after `step` in earlier files."""

    def __init__(self, folder: Path, step: int):
        again = {"purge_step": step + 1} if folder.exists() else {}
        # The suffix tells launches of the same second apart; a killed run loses what is newer than a second.
        suffix = f".{time.time_ns()}"
        writer = needs_extra("tensorboardX").SummaryWriter
        self._writer = writer(str(folder), filename_suffix=suffix, flush_secs=1, **again)

    def write(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            if math.isfinite(value):  # a curve has a gap there
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The same figures to W&B, where it is installed, logged in (or offline) and not disabled.

    No failure of it reaches the run: it is told in one line, and W&B left out from then on.
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None]):
        self._run, self._say = None, say
        self._run = self._safely(lambda: _start_wandb(config, say))

    def write(self, step: int, figures: dict[str, float]) -> None:
        if self._run is not None:
            self._safely(lambda: self._run.log(figures, step=step))

    def close(self) -> None:
        if self._run is not None:
            self._safely(lambda: self._run.finish())

    def _safely(self, call: Callable):
        try:
            return call()
        except Exception as error:
            self._run = None
            self._say(f"warning: Weights & Biases is left out: {type(error).__name__}: {' '.join(str(error).split())}")


def _start_wandb(config: RunConfig, say: Callable[[str], None]):
    """W&B's run, the same one for every launch of this run; None where it is not wanted."""
    found = importlib.util.find_spec("wandb")
    off = os.environ.get("WANDB_MODE") == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1")
    if off or found is None or found.origin is None:  # no origin: the folder that W&B leaves where it was used
        return None
    import wandb

    mode = wandb.setup().settings.mode  # of WANDB_MODE, or of the files that `wandb offline` and others write
    if mode == "disabled":
        return None
    if mode not in ("offline", "dryrun"):
        prompt = "prompt" in inspect.signature(wandb.login).parameters  # a run must not wait for someone to type
        if not wandb.login(**({"prompt": False} if prompt else {"timeout": 1})):
            say("Weights & Biases is installed but not logged in: `wandb login`, or WANDB_MODE=offline")
            return None
    known = config.folder / "wandb_id"
    if not known.exists():
        known.write_text(uuid.uuid4().hex[:8])
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "gva-jax"),
        name=config.name,
        id=known.read_text(),
        resume="allow",
        dir=str(config.folder),
        config=configs.to_dict(config),
    )
