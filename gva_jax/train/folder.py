"""The folder of a run: what it is and which text it reads.

    RUNS/NAME/config.json       what the run is             RUNS/NAME/tokenizer.json
    RUNS/NAME/run.json          corpus hash and versions    RUNS/NAME/metrics.jsonl, launches.jsonl, tensorboard/
    RUNS/NAME/checkpoints/STEP  see gva_jax.train.checkpoint
"""

import json
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

from gva_jax import config as configs
from gva_jax.config import ConfigError, RunConfig
from gva_jax.data.tokenizer import Tokenizer

# What may change between the parts of one run: where things lie, what computes, how often one looks, what is sampled.
FREE_FIELDS = ("runs", "sample.", "mesh.", "model.attention.training_implementation", "data.directory",
               "train.log_every", "train.eval_", "train.checkpoint_every", "train.keep", "train.max_skips",
               "train.stall_seconds")  # fmt: skip


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
