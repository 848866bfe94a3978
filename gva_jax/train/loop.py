"""The training loop: prepare, resume, then step, report, evaluate, save, in this order."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax

from gva_jax import distributed, runtime, sharding
from gva_jax.config import RunConfig
from gva_jax.data.corpus import Corpus
from gva_jax.data.loader import evaluation_batches, train_iterator
from gva_jax.display import Display
from gva_jax.model import Transformer
from gva_jax.train import optimizer as optimizers
from gva_jax.train import record
from gva_jax.train import state as states
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.evaluation import Evaluation, evaluate
from gva_jax.train.folder import RunFolder
from gva_jax.train.guard import SkipLimit
from gva_jax.train.metrics import Meter, Work
from gva_jax.train.profile import Profiler
from gva_jax.train.step import check_attention, make_eval_step, make_train_step, put
from gva_jax.train.stopping import StopRequest
from gva_jax.train.text import corpus_for_all
from gva_jax.train.writers import Log
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


def train(config: RunConfig, display: Display | None = None, profile: bool = False) -> Report:
    """Train `config` to its end, or continue it from its newest whole checkpoint; `profile` traces a few steps of it.

    Raises:
      ConfigError: anything that cannot work, before the run's folder is made.
      RunError: the run's folder cannot be written any more, or none of its checkpoints can be read.
      Interrupted: a signal came before the run had begun, or a second one after that.
      FloatingPointError: more than `train.max_skips` steps in a row had to be skipped.
    """
    display = display or Display(quiet=not distributed.first())
    with Watch(config.train.stall_seconds) as watch, StopRequest() as stop:
        return _train(config, display, watch, stop, profile)


def _train(config: RunConfig, display: Display, watch: Watch, stop: StopRequest, profile: bool) -> Report:
    runtime.check_float64(config.model)
    model = Transformer(config.model)
    mesh = sharding.make_mesh(config.mesh)
    sharding.check(config, mesh)
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)
    optimizer = optimizers.make(config.optimizer, config.train.steps)
    abstract = states.abstract(model, optimizer, config.train.seed, mesh)
    if config.model.attention.training_implementation is not None:
        shape = (config.data.batch_size // config.train.accumulation, config.data.context_length)
        check_attention(model, abstract, shape, mesh)
    share = sharding.share(mesh, jax.process_index())
    processes = {"process_index": share.index, "process_count": share.count}
    corpus = corpus_for_all(config, display)
    iterator = train_iterator(corpus, config.data, **processes)

    train_step = make_train_step(model, optimizer, schedule, abstract, mesh, config.train.accumulation)
    eval_step = make_eval_step(model, abstract, mesh, corpus.tokenizer.token_bytes())

    def measure(params, split: str, most: int = 0) -> Evaluation | None:
        batches = watch.each(f"batch of {split},", evaluation_batches(corpus, split, config.data, **processes))
        return evaluate(eval_step, params, batches, mesh, most, stop.requested)

    stop.defer(mesh)
    folder = distributed.first_then_all(lambda: RunFolder(config, corpus.hash, corpus.tokenizer), config.folder)
    checkpoints = Checkpoints(folder.path, config.train)
    saved = checkpoints.agreed()
    watch.reach("start at step", max(saved, default=0))
    if not saved:
        state, step = states.create(model, optimizer, config.train.seed, mesh), 0
    else:
        state = checkpoints.restore(abstract, iterator, display.say)
        step = int(state.step)
        display.say(f"resumed {folder.path} at step {step:,} of {config.train.steps:,}")
    log = Log(config, step, display.say)
    record.launch(folder.path, step, mesh)

    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    tokens = config.data.batch_size * config.data.context_length
    display.say(f"model: {parameters:,} parameters; mesh: {shape}; {tokens:,} tokens a step")
    for told in sharding.whole(abstract.params):
        display.say(told)

    development, options = None, config.train
    due = lambda every: every and step % every == 0 and step < options.steps
    with checkpoints, display.task("train", options.steps, start=step) as task, Profiler() as profiler:
        skips = SkipLimit(options.max_skips, checkpoints, display)
        meter = Meter(log, task, display, options.log_every, Work.of(config, mesh), skips)
        if profile:
            profiler.plan(config, step, meter, display.say)

        def develop() -> Evaluation | None:
            with meter.paused():
                found = measure(state.params, "development", options.eval_batches)
            if found:
                log.write(step, found.figures("development"))
                display.say(f"step {step:,}: development {found}")
            return found

        def save() -> None:
            watch.reach("save of step", step)
            with meter.paused():  # reports first: what a checkpoint holds has been logged
                checkpoints.save(state, iterator, development and development.loss)

        if step and due(options.eval_every) and not log.has(step, "development_loss"):
            development = develop()  # a signal broke this one off
        while step < options.steps and not stop.requested():
            with profiler.round(step + 1):
                # 1. Draw and dispatch: the device works while the rest of this round runs.
                batch = put(next(iterator), mesh)
                step += 1
                watch.reach("step", step)
                state, metrics = train_step(state, batch)
                stop.dispatched()
                # 2. Report the step before: never wait for the one that is running.
                meter.dispatched(step, metrics)
            # 3. Evaluate and save; only then is the next batch drawn, so a checkpoint holds exactly what was trained.
            checkpoints.check()
            development = develop() if due(options.eval_every) else None
            if due(options.checkpoint_every) and not stop.requested():
                save()
        meter.flush()
        if stop.requested():
            display.say(f"stopping at step {step:,}; a second signal ends at once")
        if step:
            save()
        checkpoints.wait()

    iterator.close()
    report = Report(folder.path, step, corpus, model, {"params": state.params})
    if step == options.steps and (development := measure(state.params, "development")):
        report = replace(report, development=development, heldout=measure(state.params, "heldout"))
    if report.heldout is None:
        done = f"step {step:,} of {options.steps:,}" + (f", saved in {folder.path}" if step else "")
        _close(log, watch, step)
        display.say(f"stopped at {done}; the same command continues")
        return replace(report, stopped_by=stop.signum)
    log.write(step, development.figures("development") | report.heldout.figures("heldout"))
    _close(log, watch, step)
    display.say(f"development: {development}")
    display.say(f"held-out:    {report.heldout}")
    return report


def _close(log: Log, watch: Watch, step: int) -> None:
    """The others wait, watched, while the first process, which alone has a log, writes its last."""
    watch.reach("end at step", step)
    log.close()
    distributed.wait_for_all()
