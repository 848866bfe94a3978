"""Run folders and checkpoints, on Orbax.

    RUNS/NAME/config.json       what the run is             RUNS/NAME/tokenizer.json
    RUNS/NAME/run.json          corpus hash and versions    RUNS/NAME/metrics.jsonl
    RUNS/NAME/checkpoints/STEP  params | optimizer (step, optimiser, random state) | data (position in the data)
"""

import json
import os
import platform
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from gva_jax import config as configs
from gva_jax.config import ConfigError, RunConfig
from gva_jax.data import needs_extra
from gva_jax.data.tokenizer import Tokenizer
from gva_jax.model import Transformer
from gva_jax.train.state import TrainState

# What may change between the parts of one run: where things lie, what computes, how often one looks, what is sampled.
FREE_FIELDS = ("runs", "sample.", "mesh.", "model.attention.training_implementation", "data.directory",
               "train.log_every", "train.eval_", "train.checkpoint_every", "train.keep")  # fmt: skip


class RunFolder:
    """The folder of one run. Created whole or not at all; an existing one is checked to hold the same run.

    Raises:
      ConfigError: the folder holds another run (naming the fields that differ), another corpus, or no run at all.
    """

    def __init__(self, config: RunConfig, corpus_hash: str, tokenizer: Tokenizer):
        self.path = config.folder
        if self.path.exists():
            self._check(config, corpus_hash)
            return
        facts = {"corpus_hash": corpus_hash, "python": platform.python_version()}
        facts |= {name: version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint", "grain")}
        partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        try:
            partial.mkdir(parents=True)
            (partial / "config.json").write_text(json.dumps(configs.to_dict(config), indent=2) + "\n")
            (partial / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
            tokenizer.save(partial / "tokenizer.json")
            partial.rename(self.path)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(f"run folder {str(self.path)!r} cannot be made: {error.strerror}") from error

    def _check(self, config: RunConfig, corpus_hash: str) -> None:
        old = read_config(self.path)
        changed = [d for d in configs.difference(old, config) if not d.startswith(FREE_FIELDS)]
        advice = "give another --name, or remove the folder"
        if changed:
            raise ConfigError(f"{str(self.path)!r} holds another run ({'; '.join(changed)}): {advice}")
        known = json.loads((self.path / "run.json").read_text())["corpus_hash"]
        if known != corpus_hash:
            told = f"its corpus has hash {known[:12]}, the one at hand {corpus_hash[:12]}"
            raise ConfigError(f"{str(self.path)!r} was trained on other text ({told}): {advice}")

    def truncate_metrics(self, step: int) -> None:
        """Forget what was logged after `step`, which is about to be trained again."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
            _replace_text(path, "".join(line + "\n" for line in lines))

    def log(self, record: dict) -> None:
        """Append one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def read_config(run: str | os.PathLike) -> RunConfig:
    """The config of a run folder.

    Raises:
      ConfigError: there is no such folder, or no run in it.
    """
    path = Path(run)
    if not path.is_dir():
        raise ConfigError(f"run {str(run)!r}: no such folder; give the folder that `gva train` named at its end")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{str(run)!r} is not the folder of a run: it holds no config.json")
    return configs.from_dict(RunConfig, json.loads((path / "config.json").read_text()))


class Checkpoints:
    """Saves and restores a run's whole state: parameters, optimiser, step, random state and position in the data."""

    def __init__(self, run: str | os.PathLike, keep: int | None = None):
        self._ocp = needs_extra("orbax.checkpoint")
        options = self._ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=keep is not None)
        self._manager = self._ocp.CheckpointManager((Path(run) / "checkpoints").resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """The newest saved step."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """All saved steps."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, iterator) -> None:
        """Write in the background, under the state's step; `iterator` is the Grain iterator that feeds the run.

        Its state is the same in every process and one of them writes it, so that others, however many, can go on.
        """
        save = self._ocp.args.StandardSave
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        rest = {"step": state.step, "opt_state": state.opt_state, "rng": state.rng}
        data = self._ocp.args.JsonSave(iterator.get_state())
        items = {"params": save(state.params), "optimizer": save(rest), "data": data}
        self._manager.save(step, args=self._ocp.args.Composite(**items))

    def restore(self, abstract_state: TrainState, iterator) -> TrainState:
        """The newest state, laid out as `abstract_state` declares; `iterator` is moved to where the run stood.

        Raises:
          ConfigError: an older version saved it, whose batches came in another order.
        """
        if any((Path(self._manager.directory) / str(self.latest) / "data").glob("process_*")):
            told = "was saved by an older version, which read the text in another order: give another --name"
            raise ConfigError(f"{str(self._manager.directory)!r} {told}")
        restore = self._ocp.args.StandardRestore
        rest = {name: getattr(abstract_state, name) for name in ("step", "opt_state", "rng")}
        items = {"params": restore(abstract_state.params), "optimizer": restore(rest),
                 "data": self._ocp.args.JsonRestore()}  # fmt: skip
        restored = self._manager.restore(self.latest, args=self._ocp.args.Composite(**items))
        iterator.set_state(restored["data"])
        return replace(abstract_state, params=restored["params"], **restored["optimizer"])

    def restore_params(self, abstract_params, step: int | None = None):
        """Parameters only."""
        items = self._ocp.args.Composite(params=self._ocp.args.StandardRestore(abstract_params))
        return self._manager.restore(self.latest if step is None else step, args=items)["params"]

    def wait(self) -> None:
        """Until everything is written. Raises what a background write raised."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def load(run: str | os.PathLike) -> tuple[Transformer, dict, Tokenizer]:
    """A trained run as `(model, variables, tokenizer)`, parameters from its newest checkpoint on the default device.

    Raises:
      ConfigError: no such run, or no checkpoint in it yet.
    """
    config = read_config(run)
    checkpoints = Checkpoints(run)
    if checkpoints.latest is None:
        raise ConfigError(f"run {str(run)!r} has no checkpoint yet: let `gva train` save one")
    model = Transformer(config.model)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jax.numpy.zeros((1, 1), jax.numpy.int32))["params"])
    device = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    params = checkpoints.restore_params(shapes)
    checkpoints.close()
    return model, {"params": params}, Tokenizer.load(Path(run) / "tokenizer.json")
