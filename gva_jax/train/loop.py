"""The training loop: prepare, resume, then step, report, evaluate, save, in this order."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax

from gva_jax import distributed, sharding
from gva_jax.config import ConfigError, RunConfig
from gva_jax.data.corpus import Corpus, open_corpus
from gva_jax.data.loader import evaluation_batches, train_iterator
from gva_jax.data.prepare import prepare
from gva_jax.display import Display
from gva_jax.model import Transformer
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.checkpoint import Checkpoints, RunFolder
from gva_jax.train.evaluation import Evaluation, evaluate
from gva_jax.train.metrics import Meter
from gva_jax.train.step import check_attention, make_eval_step, make_train_step, put
from gva_jax.train.stopping import StopRequest
from gva_jax.watch import Watch


@dataclass(frozen=True)
class Report:
    """How a run ended. `stopped_by` is the signal that interrupted it; the same command then continues it."""

    folder: Path
    step: int
    corpus: Corpus
    model: Transformer
    variables: dict
    development: Evaluation | None = None
    heldout: Evaluation | None = None
    stopped_by: int | None = None


def train(config: RunConfig, display: Display | None = None) -> Report:
    """Train `config` to its end, or continue it from its newest checkpoint.

    Raises:
      ConfigError: anything that cannot work, before the run's folder is made.
    """
    with Watch(config.train.stall_seconds) as watch:
        return _train(config, display or Display(quiet=not distributed.first()), watch)


def _train(config: RunConfig, display: Display, watch: Watch) -> Report:
    if "float64" in (config.model.dtype, config.model.param_dtype) and not jax.config.jax_enable_x64:
        raise ConfigError("model.dtype, model.param_dtype = 'float64': need the environment variable JAX_ENABLE_X64=1")
    model = Transformer(config.model)
    mesh = sharding.make_mesh(config.mesh)
    sharding.check(config, mesh)
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)
    optimizer = optimizers.make(config.optimizer, config.train.steps)
    abstract = states.abstract(model, optimizer, config.train.seed, mesh)
    if config.model.attention.training_implementation is not None:
        shape = (config.data.batch_size // config.train.accumulation, config.data.context_length)
        check_attention(model, abstract, shape, mesh)
    processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    corpus = _corpus(config, display)
    iterator = train_iterator(corpus, config.data, **processes)

    train_step = make_train_step(model, optimizer, schedule, abstract, mesh, config.train.accumulation)
    eval_step = make_eval_step(model, abstract, mesh, corpus.tokenizer.token_bytes())

    def measure(params, split: str, most: int = 0) -> Evaluation:
        batches = evaluation_batches(corpus, split, config.data, **processes)
        return evaluate(eval_step, params, watch.each(f"batch of {split},", batches), mesh, most)

    folder = distributed.first_then_all(lambda: RunFolder(config, corpus.hash, corpus.tokenizer), config.folder)
    checkpoints = Checkpoints(folder.path, config.train.keep)
    watch.reach("start at step", checkpoints.latest or 0)
    if checkpoints.latest is None:
        state, step = states.create(model, optimizer, config.train.seed, mesh), 0
    else:
        state, step = checkpoints.restore(abstract, iterator), checkpoints.latest
        display.say(f"resumed {folder.path} at step {step:,} of {config.train.steps:,}")
    folder.truncate_metrics(step)

    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    tokens = config.data.batch_size * config.data.context_length
    display.say(f"model: {parameters:,} parameters; mesh: {shape}; {tokens:,} tokens a step")

    development, options = None, config.train
    due = lambda every: every and step % every == 0
    with StopRequest(mesh) as stop, display.task("train", options.steps, start=step) as task:
        meter = Meter(folder, task, options.log_every, tokens)
        while step < options.steps and stop.signum is None:
            # 1. Draw and dispatch: the device works while the rest of this round runs.
            batch = put(next(iterator), mesh)
            step += 1
            watch.reach("step", step)
            state, metrics = train_step(state, batch)
            stop.dispatched()
            # 2. Report the step before: never wait for the one that is running.
            meter.dispatched(step, metrics)
            # 3. Evaluate and save; only then is the next batch drawn, so a checkpoint holds exactly what was trained.
            if due(options.eval_every) and step < options.steps:
                meter.flush()
                development = measure(state.params, "development", options.eval_batches)
                folder.log({"step": step, **development.figures("development")})
                display.say(f"step {step:,}: development {development}")
                meter.restart()
            if due(options.checkpoint_every) and step < options.steps:
                watch.reach("save of step", step)
                checkpoints.save(state, iterator)
        meter.flush()
        watch.reach("save of step", step)
        checkpoints.save(state, iterator)
        checkpoints.wait()
        stopped_by = stop.signum

    checkpoints.close()
    iterator.close()
    report = Report(folder.path, step, corpus, model, {"params": state.params}, stopped_by=stopped_by)
    if stopped_by is not None and step < options.steps:
        done = f"step {step:,} of {options.steps:,}"
        display.say(f"stopped at {done}, saved in {folder.path}; the same command continues")
        return report
    development, heldout = measure(state.params, "development"), measure(state.params, "heldout")
    folder.log({"step": step, **development.figures("development"), **heldout.figures("heldout")})
    display.say(f"development: {development}")
    display.say(f"held-out:    {heldout}")
    return Report(folder.path, step, corpus, model, {"params": state.params}, development, heldout)


def _corpus(config: RunConfig, display: Display) -> Corpus:
    """What the first process prepares, and the others then read: the same folder, or one that holds the same."""
    make = lambda: prepare(config.data, config.model.vocab_size, display)
    if not distributed.many():
        return make()
    made = []

    def folder_and_hash() -> str:
        display.say("the corpus is looked for, or made, by process 0; the others wait for it")
        made.append(make())
        return json.dumps([str(made[0].folder.resolve()), made[0].hash])

    folder, corpus_hash = json.loads(distributed.share(folder_and_hash))
    if made:
        return made[0]
    try:
        corpus = open_corpus(Path(folder))
        told = "is another one"
    except ConfigError as error:
        corpus, told = None, f"cannot be read ({error})"
    if corpus is None or corpus.hash != corpus_hash:
        right = "all must see the same: put data.directory or GVA_JAX_CACHE on a file system that they share"
        raise ConfigError(f"corpus {folder!r} of process 0 {told} in {distributed.here()}: {right}")
    return corpus
