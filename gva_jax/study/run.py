"""Run a study: whichever members have no record yet, in order, each from its newest checkpoint if it was begun.

DIR/members/NAME.json    the finished ones; nothing else is needed to go on
DIR/running/HASH         checkpoints of those that train now, gone when they have finished
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from gva_jax import __version__, runtime, sharding
from gva_jax.config import ConfigError, TrainConfig
from gva_jax.data.corpus import Corpus, check_fits
from gva_jax.data.loader import evaluation_batches, train_iterator
from gva_jax.data.prepare import prepare
from gva_jax.display import Display
from gva_jax.model import Transformer
from gva_jax.study import programs
from gva_jax.study.records import Records, kept
from gva_jax.study.spec import CONFIRM, Member, Study, changed, every, naming
from gva_jax.train import record
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.evaluation import evaluation
from gva_jax.train.stopping import StopRequest


@dataclass(frozen=True)
class Outcome:
    """How a run of a study ended. `stopped_by` is the signal that interrupted it, if one did."""

    complete: bool
    stopped_by: int | None = None


@dataclass
class _Limits:
    """When to stop for now: asked by a signal, out of time, or out of members."""

    stop: StopRequest
    deadline: float
    members: int | None

    def reached(self) -> bool:
        return self.stop.signum is not None or time.monotonic() >= self.deadline or self.members == 0


def run(
    study: Study,
    folder: Path,
    display: Display,
    *,
    together: int | None = None,
    limit_seconds: float | None = None,
    limit_members: int | None = None,
) -> Outcome:
    """Train what has not finished.

    Args:
      together: members of one program at most; None: what the study says, else what suits the device, see
        `programs.default_together`.
      limit_seconds, limit_members: stop, at a checkpoint, after so much time or so many members.

    Raises:
      ConfigError: anything that cannot work, or a record in `folder` of another study, before anything is written.
    """
    _check(study)
    records = Records(folder)
    records.of(study)
    corpus = prepare(study.base.data, study.base.model.vocab_size, display)
    for name in study.variants:
        check_fits(corpus, study.config(name).model.vocab_size)
    finished = [m for m in every(study, records.rates(study)) if records.get(m, corpus.hash) is not None]
    done = sum(member.steps for member in finished)
    display.say(f"study {study.name}: {len(finished)} members have finished, in {records.folder}")
    compiled = programs.Programs(corpus.tokenizer.token_bytes())
    deadline = math.inf if limit_seconds is None else time.monotonic() + limit_seconds
    title = ("updates", study.total_updates(), done)
    with _alone_in(folder), StopRequest() as stop, display.task(*title) as task:
        stop.defer()
        limits = _Limits(stop, deadline, limit_members)
        records = Records(folder)  # again: another process may have finished some before the lock was ours
        while pending := [m for m in every(study, records.rates(study)) if records.get(m) is None]:
            if limits.reached():
                break
            most = min(together or study.together or programs.default_together(), limits.members or len(pending))
            group = programs.group(pending, most)
            training = _Training(group, compiled.of(group), study, corpus, folder)
            if not training.finish(records, limits, task.advance, display):
                break
            if limits.members is not None:
                limits.members -= len(group)
        if not pending:
            shutil.rmtree(folder / "running", ignore_errors=True)  # of groups that did not go on as such
        return Outcome(not pending, stop.signum)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system lets go of when its process dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{str(folder)!r}: another process runs this study here; wait, or give another --out"
        ) from None
    except OSError as error:
        told = f"{error.strerror}: must be a folder that can be written to and locked"
        raise ConfigError(f"{str(folder)!r}: {told}") from error
    try:
        yield
    finally:
        os.close(lock)


def _check(study: Study) -> None:
    if jax.process_count() > 1:
        raise ConfigError(f"a study runs in one process, not in {jax.process_count()}; give each its own study")
    for name in study.variants:
        config = study.config(name)
        with naming(name):  # all of them, before the first is trained
            runtime.check_float64(config.model)
            Transformer(config.model)
            sharding.check(config, sharding.make_mesh(config.mesh))
    programs.check_swaps(study)


# ---- one program's training ------------------------------------------------------------------------------------------


class _Position:
    """Where a group's training stands beside its state; looks like a data iterator to `Checkpoints`."""

    def __init__(self, iterators: dict[int, object], members: int):
        self.iterators = iterators
        self.curve: list[tuple[int, list[float]]] = []
        self.diverged: list[int | None] = [None] * members
        self.seconds = 0.0

    def get_state(self) -> dict:
        data = {str(seed): iterator.get_state() for seed, iterator in self.iterators.items()}
        return {"data": data, "curve": self.curve, "diverged": self.diverged, "seconds": self.seconds}

    def set_state(self, state: dict) -> None:
        for seed, iterator in self.iterators.items():
            iterator.set_state(state["data"][str(seed)])
        self.curve, self.diverged, self.seconds = state["curve"], state["diverged"], state["seconds"]


class _Training:
    """Members of one program, from their first update to their records."""

    def __init__(self, members: Sequence[Member], program, study: Study, corpus: Corpus, folder: Path):
        self._members, self._program, self._study, self._corpus = members, program, study, corpus
        self._config = members[0].config
        told = json.dumps([corpus.hash, *([m.name, kept(m.config)] for m in members)], sort_keys=True)
        self._folder = folder / "running" / hashlib.sha256(told.encode()).hexdigest()[:16]
        seeds = dict.fromkeys(member.seed for member in members)
        order = lambda seed: train_iterator(corpus, replace(self._config.data, seed=seed))
        self._position = _Position({seed: order(seed) for seed in seeds}, len(members))
        self._evaluate = self._program.evaluator()

    def finish(self, records: Records, limits: _Limits, advance: Callable, display: Display) -> bool:
        """Train to the end and write the records; or, where a limit is reached, save and return False."""
        position, options, count = self._position, self._config.train, len(self._members)
        checkpoints = Checkpoints(self._folder, TrainConfig(keep=1))
        if checkpoints.latest is None:
            state, step = self._program.create(self._members), 0
        else:
            state = checkpoints.restore(self._program.abstract, position, display.say)
            step = int(state.step)
            display.say(f"{self._title}: resumed at step {step:,} of {options.steps:,}")
            advance(step * count)
        due = lambda every: every and step % every == 0
        before, stopped, pending, since = position.seconds, False, None, time.monotonic()
        while step < options.steps and not all(position.diverged) and not stopped:
            # As in the trainer: draw and dispatch, look at the step before, evaluate, save.
            state, metrics = self._program.step(state, self._batches())
            step += 1
            losses = self._read(step - 1, pending)
            pending = metrics
            figures = f"{self._title} {step:,}/{options.steps:,}"
            advance(count, figures if losses is None else f"{figures}  loss {losses.mean():.3f}")
            if due(options.eval_every) or step == options.steps:
                self._measure(step, state.params)
            position.seconds = before + time.monotonic() - since
            stopped = limits.reached() and step < options.steps
            if due(options.checkpoint_every) or stopped:
                self._read(step, pending)  # who resumes does not see it again
                pending = None
                checkpoints.save(state, position)
        self._read(step, pending)
        checkpoints.wait()
        checkpoints.close()
        if not stopped:
            advance((options.steps - step) * count)  # nothing unless all diverged
            self._write(records, step, state.params, display)
            shutil.rmtree(self._folder, ignore_errors=True)
        for iterator in position.iterators.values():
            iterator.close()
        return not stopped

    @property
    def _title(self) -> str:
        more = len(self._members) - 1
        return self._members[0].name + (f" and {more} more" if more else "")

    def _batches(self) -> list[dict]:
        """Each member's next batch; those of one seed read the same."""
        drawn = {seed: next(iterator) for seed, iterator in self._position.iterators.items()}
        return [drawn[member.seed] for member in self._members]

    def _read(self, step: int, metrics: dict | None) -> np.ndarray | None:
        """The losses of `step`, (M,); waits for them.

        Notes who diverged: more steps in a row than the trainer lets pass, or the last one, had to be skipped, because
        loss or gradients were not finite.
        """
        if metrics is None:
            return None
        losses, skipped = (np.atleast_1d(np.asarray(metrics[name])) for name in ("loss", "skipped_in_a_row"))
        options = self._config.train
        limit = options.max_skips if step < options.steps else 0
        for i, in_a_row in enumerate(skipped):
            if self._position.diverged[i] is None and in_a_row > limit:
                self._position.diverged[i] = step
        return losses

    def _measure(self, step: int, params) -> None:
        """A point of the curve: the first batches of the development split, the same at every step."""
        sums = self._evaluate(params, self._split("development"), self._config.train.eval_batches)
        self._position.curve.append((step, [float(nats / targets) for nats, targets, _ in sums]))

    def _split(self, name: str):
        return evaluation_batches(self._corpus, name, self._config.data)

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def _write(self, records: Records, step: int, params, display: Display) -> None:
        """Measure the trained members and keep them. Held-out text is read for confirmations only.

        All are measured before the first is kept: those of a group that a kill has parted from it train anew.
        """
        position, corpus, config = self._position, self._corpus, self._config
        whole = lambda split: self._evaluate(params, self._split(split))
        development = whole("development")
        heldout = whole("heldout") if self._members[0].phase == CONFIRM else None
        swapped = self._swapped(params)
        parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(self._program.abstract.params))
        per_member = parameters if len(self._members) == 1 else parameters // len(self._members)
        for i, member in enumerate(self._members):
            finite = math.isfinite(evaluation(development[i]).perplexity)
            alive = position.diverged[i] is None and finite
            measured = lambda sums, i=i, alive=alive: evaluation(sums[i]) if alive and sums is not None else None
            written = records.write(
                member,
                corpus={"hash": corpus.hash, **{name: vars(stats) for name, stats in corpus.splits.items()}},
                parameters=per_member,
                tokens=step * config.data.batch_size * config.data.context_length,
                curve=[(step, losses[i]) for step, losses in position.curve if math.isfinite(losses[i])],
                development=measured(development),
                heldout=measured(heldout),
                swapped=measured(swapped[i]),
                diverged_at=None if alive else position.diverged[i] or config.train.steps,
                seconds=round(position.seconds, 1),
                together=len(self._members),
                device=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
                versions={"python": platform.python_version(), "gva-jax": __version__} | record.versions(),
                revision=_revision(),
                finished=datetime.date.today().isoformat(),
            )
            display.say(f"{member.name}: {_summary(written)}")

    def _swapped(self, params) -> list:
        """By member: held-out sums of all, (M, 3), under its variant's swap, or None. Once for each model."""
        variants, found = self._study.variants, {}
        for member in self._members:
            swap = variants[member.variant].swap
            if swap is not None and member.phase == CONFIRM and member.variant not in found:
                evaluate = self._program.evaluator(changed(member.config, swap).model)
                found[member.variant] = evaluate(params, self._split("heldout"))
        return [found.get(member.variant) for member in self._members]


def _summary(record) -> str:
    if record.development is None:
        return f"diverged at step {record.diverged_at:,}"
    told = f"development perplexity {record.development.perplexity:.3f}"
    return told if record.heldout is None else f"{told}, held-out {record.heldout.perplexity:.3f}"


def _revision() -> str:
    """The commit of the checkout that this package lies in, "+" behind it if files differ from it; or "none"."""
    found = record.revision(Path(__file__).parents[2])
    return "none" if found is None else found["revision"][:12] + ("+" if found["dirty"] else "")
