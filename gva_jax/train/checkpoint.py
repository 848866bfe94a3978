"""Checkpoints of a run, on Orbax: written in the background, whole or not at all, and checked when they are read.

RUNS/NAME/checkpoints/STEP  params | optimizer (step, optimiser, random state) | data (position in the data)
                            fingerprint (of params and of optimizer) | metrics (development loss, if measured there)
RUNS/NAME/damaged/STEP      one that could not be read, moved here when an older one was gone back to
"""

import contextlib
import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from gva_jax import distributed
from gva_jax.config import ConfigError, RunError, TrainConfig
from gva_jax.data.tokenizer import Tokenizer
from gva_jax.model import Transformer
from gva_jax.train.failures import attempt, told
from gva_jax.train.fingerprint import fingerprint
from gva_jax.train.folder import read_config
from gva_jax.train.state import TrainState

_STRAGGLERS_SECONDS = 10
_CHANGED = "not the values that were saved"
_ITEMS = ("params", "optimizer", "data", "fingerprint")


class Checkpoints:
    """Saves and restores a run's whole state: parameters, optimiser, step, random state and position in the data.

    `train` says which checkpoints are kept: the newest `keep`, those at multiples of `keep_every`, and the `keep_best`
    with the lowest development loss. Without it nothing is written or tidied up.

    A checkpoint is written under a temporary name and renamed when it is complete; what an earlier process left
    half-written is removed. All processes call every method, at the same point of their work.

    Raises:
      RunError: the folder cannot be written.
    """

    def __init__(self, run: str | os.PathLike, train: TrainConfig | None = None):
        self._folder = (Path(run) / "checkpoints").resolve()
        if train is None:
            options = dict(read_only=True)
        else:
            options = dict(preservation_policy=_preservation(train))
            options |= dict(best_fn=_development_loss, best_mode="min")  # this makes Orbax write and read the metrics
        with told(lambda reason: f"{str(self._folder)!r} cannot hold checkpoints: {reason}"):
            if train is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                if not os.access(self._folder, os.W_OK):  # not only when the first one is due
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                if jax.process_index() == 0:  # at once: Orbax would do it later, in a thread
                    for left in self._folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}"):
                        _remove(left)
            self._manager = _Manager(self._folder, item_names=_ITEMS, options=ocp.CheckpointManagerOptions(**options))

    # ---- writing -----------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> int | None:
        """The newest step that is completely written, on disk."""
        return max(self._steps(), default=None)

    @property
    def steps(self) -> list[int]:
        """All complete steps, on disk."""
        return sorted(self._steps())

    def save(self, state: TrainState, iterator, development_loss: float | None = None) -> None:
        """Write in the background, under the state's step; `iterator` is the Grain iterator that feeds the run.

        Its state is the same in every process and one of them writes it, so that others, however many, can go on.
        A step that is there already is left as it is.

        Raises:
          RunError: this one cannot be written, or the one before it could not be.
        """
        step = int(state.step)
        self.wait()
        if step in self._manager.all_steps():
            return
        array, plain = ocp.args.StandardSave, ocp.args.JsonSave
        rest = _rest(state)
        prints = {"params": int(fingerprint(state.params)), "optimizer": int(fingerprint(rest))}
        items = {"params": array(state.params), "optimizer": array(rest), "data": plain(iterator.get_state()),
                 "fingerprint": plain(prints)}  # fmt: skip
        metrics = None if development_loss is None else {"development_loss": float(development_loss)}
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)

    def check(self) -> None:
        """Without waiting: raises what `wait` would, soon after it happened."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Until everything is written.

        Raises:
          RunError: something could not be written; checkpoints that were complete before still are.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """`wait`, and let go of threads."""
        with self._writing():
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        """Also when an error ends the run is a save that has begun completed; not when the user insists."""
        if kind is None:
            self.close()
        elif issubclass(kind, Exception):
            with contextlib.suppress(RunError):  # what ended the run is told
                self.close()

    def _writing(self):
        def message(reason):
            left = "there is no other yet" if self.latest is None else f"step {self.latest} is whole"
            return f"a checkpoint cannot be written to {str(self._folder)!r}: {reason}; {left}"

        return told(message)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def restore(self, abstract_state: TrainState, iterator, say: Callable[[str], None] = warnings.warn) -> TrainState:
        """The newest state that is whole, laid out as `abstract_state` declares, on whatever mesh that is.

        `iterator` is moved to where the run stood. What is damaged is told to `say` and moved out of the way, so that
        its step can be saved again; nothing is deleted.

        Raises:
          RunError: there is a checkpoint, but none that is whole. All are left where they are.
          ConfigError: an older version saved it, whose batches came in another order.
        """
        if any((self._folder / str(self.latest) / "data").glob("process_*")):
            told = "was saved by an older version, which read the text in another order: give another --name"
            raise ConfigError(f"{str(self._folder)!r} {told}")
        abstract = {"params": abstract_state.params, "optimizer": _rest(abstract_state)}

        def read(step: int) -> TrainState:
            restored, data = self._read(step, abstract, "data")
            iterator.set_state(data)
            return replace(abstract_state, params=restored["params"], **restored["optimizer"])

        state, damaged = self._newest_whole(read, say)
        if damaged:
            self._move_away(damaged)
        return state

    def restore_params(self, abstract_params, say: Callable[[str], None] = warnings.warn, step: int | None = None):
        """`(step, parameters)` of the newest checkpoint whose parameters are whole, or of that of `step`.

        Raises as `restore`; moves nothing.
        """
        read = lambda step: (step, self._read(step, {"params": abstract_params})[0]["params"])
        return self._newest_whole(read, say, None if step is None else [step])[0]

    def _read(self, step: int, abstract: dict, *plain: str) -> tuple:
        """What is saved of `abstract`'s items, and then the `plain` ones. Raises anything, if it is damaged."""
        array, plain_text = ocp.args.StandardRestore, ocp.args.JsonRestore
        items = {name: array(tree) for name, tree in abstract.items()}
        items |= {name: plain_text() for name in ("fingerprint", *plain)}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        for name in abstract:
            if int(fingerprint(restored[name])) != restored["fingerprint"][name]:
                raise ValueError(f"{name}: {_CHANGED}")
        return {name: restored[name] for name in abstract}, *(restored[name] for name in plain)

    def _newest_whole(
        self, read: Callable[[int], Any], say: Callable[[str], None], among: list[int] | None = None
    ) -> tuple[Any, list[int]]:
        """`read(step)` of the newest step where it succeeds in every process, and the newer steps where it did not."""
        damaged, steps = [], among or sorted(self.agreed(), reverse=True)
        for step, before in zip(steps, [*steps[1:], None], strict=True):
            found, reason = attempt(lambda step=step: read(step))
            if reason and _CHANGED not in reason and distributed.many():  # the others are elsewhere, in a collective
                told = f"checkpoint {step} in {str(self._folder)!r} is damaged ({reason})"
                raise RunError(f"{told}: continue once with one process, which goes back to the one before, or move it")
            if _everywhere(reason is None):
                return found, damaged
            damaged.append(step)
            reason = reason or "it cannot be read in another process"
            told = f"checkpoint {step} in {str(self._folder)!r} is damaged ({reason})"
            if before is None:
                others = ", and so are all before it" if len(steps) > 1 else ", and there is none before it"
                raise RunError(f"{told}{'' if among else others}; nothing has been removed")
            say(f"{told}: going back to step {before}")
        raise RunError(f"{str(self._folder)!r} holds no checkpoint")

    def _move_away(self, steps: list[int]) -> None:
        if jax.process_index() == 0:
            target = self._folder.with_name("damaged")
            target.mkdir(exist_ok=True)
            for step in steps:
                names = (str(step), *(f"{step}.{i}" for i in range(1, 1000)))
                free = next(name for name in names if not (target / name).exists())
                with told(lambda why, step=step: f"checkpoint {step} cannot be moved to {str(target)!r}: {why}"):
                    (self._folder / str(step)).rename(target / free)
        _everywhere(True)
        self._manager.reload()

    def agreed(self) -> list[int]:
        """All complete steps as the first process sees them; all processes ask."""
        return json.loads(distributed.share(lambda: json.dumps(self._steps())))

    def _steps(self) -> list[int]:
        """Of what is complete: what is being written has another name."""
        return [int(p.name) for p in self._folder.glob("*") if p.name.isdigit()] if self._folder.is_dir() else []


def load(run: str | os.PathLike, say: Callable[[str], None] = warnings.warn) -> tuple[Transformer, dict, Tokenizer]:
    """A trained run as `(model, variables, tokenizer)`, parameters from its newest checkpoint on the default device.

    Where that is damaged, which `say` is told, from the one before it.

    Raises:
      ConfigError: no such run, or no checkpoint in it yet.
      RunError: none of its checkpoints is whole.
    """
    config = read_config(run)
    checkpoints = Checkpoints(run)
    if checkpoints.latest is None:
        raise ConfigError(f"run {str(run)!r} has no checkpoint yet: let `gva train` save one")
    model = Transformer(config.model)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jax.numpy.zeros((1, 1), jax.numpy.int32))["params"])
    device = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    _, params = checkpoints.restore_params(shapes, say)
    checkpoints.close()
    return model, {"params": params}, Tokenizer.load(Path(run) / "tokenizer.json")


def _rest(state: TrainState) -> dict:
    return {name: getattr(state, name) for name in ("step", "opt_state", "rng")}


def _development_loss(metrics: dict) -> float:
    """For ranking: what is not finite comes last."""
    loss = metrics["development_loss"]
    return loss if np.isfinite(loss) else np.inf


def _preservation(train: TrainConfig) -> policies.PreservationPolicy:
    kept = [policies.LatestN(train.keep)]
    if train.keep_every:
        kept.append(policies.EveryNSteps(train.keep_every))
    if train.keep_best:
        best = dict(get_metric_fn=_development_loss, reverse=True, keep_checkpoints_without_metrics=False)
        kept.append(policies.BestN(n=train.keep_best, **best))
    return policies.AnyPreservationPolicy(kept)


class _Manager(ocp.CheckpointManager):
    """Orbax's, which does not start where the metrics of any checkpoint are garbage."""

    def metrics(self, step: int) -> dict | None:
        try:
            return super().metrics(step)
        except ValueError:
            return None  # not ranked


def _remove(folder: Path) -> None:
    """Also while a save that failed in this process still writes there: of several writers, Orbax awaits the first."""
    end = time.monotonic() + _STRAGGLERS_SECONDS
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _everywhere(here: bool) -> bool:
    """Whether it holds in every process; waits for all of them."""
    return here if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.array(here))))
