"""`gva evaluate`: a run's checkpoint on a whole split, with its own config or with what may be swapped afterwards.

Weights fit any model with the same parameters: a value transform without parameters can be taken out or put in, another
activation dtype or mesh tried. What would change the parameters, the text or its layout is refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jax

from gva_jax import config as configs
from gva_jax import runtime, sharding
from gva_jax.config import ConfigError, RunConfig
from gva_jax.data.loader import evaluation_batches
from gva_jax.data.prepare import prepare
from gva_jax.display import Display
from gva_jax.model import Transformer
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.evaluation import Evaluation, evaluate
from gva_jax.train.folder import read_config
from gva_jax.train.step import make_eval_step

# What an evaluation may change: what computes, from which weights, and where the prepared text lies.
FREE_FIELDS = ("model.", "mesh.", "data.directory", "data.batch_size")


@dataclass(frozen=True)
class Result:
    """What was evaluated, and how it went."""

    run: str
    step: int
    split: str
    # Fields that differ from the run's config, as `path: old -> new`.
    changed: tuple[str, ...]
    evaluation: Evaluation

    def figures(self) -> dict:
        """Loss in nats per target, perplexity, bits per byte of text."""
        found = self.evaluation
        return {
            "run": self.run,
            "step": self.step,
            "split": self.split,
            "changed": list(self.changed),
            "loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            "targets": found.targets,
        }


def run(folder: str, config: RunConfig, split: str, step: int | None, display: Display) -> Result:
    """Evaluate the checkpoint of `step` (None: the newest) of the run in `folder` as `config` says.

    Raises:
      ConfigError: no such run or checkpoint, or a config that its weights or its text do not fit.
    """
    trained = read_config(folder)
    changed = configs.difference(trained, config)
    if strange := [line for line in changed if not line.startswith(FREE_FIELDS)]:
        right = "an evaluation may change model, mesh, data.directory and data.batch_size only"
        raise ConfigError(f"{strange[0]}: {right}")
    param_dtype = trained.model.param_dtype
    configs.require(config.model.param_dtype == param_dtype, "model.param_dtype", config.model.param_dtype,
                    f"must be {param_dtype!r}, as the checkpoint's")  # fmt: skip
    runtime.check_float64(config.model)
    mesh = sharding.make_mesh(config.mesh)
    sharding.check(config, mesh)
    model, abstract = _abstract(config, mesh)
    _check_parameters(_abstract(trained, mesh)[1].params, abstract.params, changed)
    checkpoints = Checkpoints(folder)
    try:
        _check_saved(checkpoints, folder, step)
        corpus = prepare(config.data, config.model.vocab_size, display)
        known = json.loads((Path(folder) / "run.json").read_text())["corpus_hash"]
        if known != corpus.hash:
            told = f"has hash {corpus.hash[:12]}, the run's had {known[:12]}"
            raise ConfigError(f"data.source = {config.data.source!r}: its corpus {told}")
        step, params = checkpoints.restore_params(abstract.params, display.say, step)
    finally:
        checkpoints.close()
    eval_step = make_eval_step(model, abstract, mesh, corpus.tokenizer.token_bytes())
    share = sharding.share(mesh, jax.process_index())
    processes = {"process_index": share.index, "process_count": share.count}
    found = evaluate(eval_step, params, evaluation_batches(corpus, split, config.data, **processes), mesh)
    return Result(folder, step, split, tuple(changed), found)


def _abstract(config: RunConfig, mesh) -> tuple[Transformer, states.TrainState]:
    model, optimizer = Transformer(config.model), optimizers.make(config.optimizer, config.train.steps)
    return model, states.abstract(model, optimizer, config.train.seed, mesh)


def _check_parameters(trained, wanted, changed: list[str]) -> None:
    """Refuses a model whose parameters are not those of the checkpoint."""
    shapes = lambda tree: {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    old, new = shapes(trained), shapes(wanted)
    if old == new:
        return
    name = min(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    told = lambda tree: f"has shape {tree[name]}" if name in tree else "is missing"
    why = f"parameter {name} {told(old)} in the checkpoint, {told(new)} in this model"
    raise ConfigError(f"{'; '.join(changed)}: {why}; only what leaves all parameters as they are can be swapped")


def _check_saved(checkpoints: Checkpoints, folder: str, step: int | None) -> None:
    """Refuses a step (None: any) of which there is no checkpoint."""
    if checkpoints.latest is None:
        raise ConfigError(f"run {folder!r} has no checkpoint yet: let `gva train` save one")
    if step is not None and step not in checkpoints.steps:
        raise ConfigError(f"step = {step}: saved are {', '.join(map(str, checkpoints.steps))}")


def show(result: Result, display: Display) -> None:
    """For a person."""
    for line in result.changed:
        display.say(f"changed: {line}")
    display.say(f"{result.run}, step {result.step:,}, {result.split}: {result.evaluation}")


def main(options) -> None:
    """Evaluate and print; `options` are `gva_jax.options.EvaluateOptions`."""
    from rich.console import Console

    display = Display(console=Console(stderr=True, highlight=False, soft_wrap=True)) if options.json else Display()
    runtime.start(display)
    result = run(options.run, options.config, options.split, options.step, display)
    if options.json:
        print(json.dumps(result.figures(), indent=2))
    else:
        show(result, display)
