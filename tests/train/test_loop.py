"""Whole runs at tiny size: exact resume, what a run folder holds, what is refused."""

import json
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_run as tiny

import gva_jax
from gva_jax.config import ConfigError, DataConfig, RunConfig, TrainConfig
from gva_jax.data.loader import evaluation_batches, train_iterator
from gva_jax.data.prepare import prepare
from gva_jax.display import Display
from gva_jax.model import Transformer
from gva_jax.train import state as states
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.evaluation import evaluate
from gva_jax.train.folder import read_config
from gva_jax.train.loop import train
from gva_jax.train.step import make_eval_step

QUIET = Display(quiet=True)


class Interrupting(Display):
    """Sends the process a signal when step `at` is reported."""

    def __init__(self, at: int, signum):
        super().__init__(quiet=True)
        self._at, self._signum = at, signum

    def task(self, title, total=None, start=0):
        context = super().task(title, total, start)
        display = self

        class Watched:
            def __enter__(self):
                task = context.__enter__()
                advance = task.advance

                def watch(count=1, figures=""):
                    advance(count, figures)
                    if title == "train" and task.done == display._at:
                        signal.raise_signal(display._signum)

                task.advance = watch
                return task

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Watched()


def tiny_run(folder) -> RunConfig:
    return replace(
        tiny.config(vocab_size=300, dropout=0.1),
        name="tiny",
        runs=str(folder / "runs"),
        data=DataConfig(source="docstrings:json,argparse", context_length=32, batch_size=8, holdout=0.1),
        train=TrainConfig(steps=20, log_every=5, checkpoint_every=7, eval_every=8, eval_batches=1),
    )


def attending(run: RunConfig, name: str) -> RunConfig:
    """`run` with this training attention."""
    attention = replace(run.model.attention, training_implementation=name)
    return replace(run, model=replace(run.model, attention=attention))


@pytest.fixture
def run(tmp_path) -> RunConfig:
    return tiny_run(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run that came to its end, and its report."""
    run = replace(tiny_run(tmp_path_factory.mktemp("finished")), train=TrainConfig(steps=3))
    return run, train(run, QUIET)


def saved(run: RunConfig) -> dict:
    """Everything in the newest checkpoint, and where its data stand: the next two batches."""
    it = tiny.Run(replace(run, data=replace(run.data, batch_size=8)))
    corpus = prepare(run.data, run.model.vocab_size, QUIET)
    iterator = train_iterator(corpus, run.data)
    checkpoints = Checkpoints(run.folder)
    state = checkpoints.restore(it.abstract, iterator)
    checkpoints.close()
    return {"state": jax.tree.map(np.asarray, state), "next": [next(iterator), next(iterator)]}


def logged(run: RunConfig) -> list[dict]:
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]


def test_interrupted_and_resumed_equals_undisturbed_bitwise(run):
    whole = replace(run, name="whole")
    train(whole, QUIET)
    stopped = train(run, Interrupting(9, signal.SIGTERM))
    assert stopped.stopped_by == signal.SIGTERM and stopped.step == 10 and stopped.heldout is None
    resumed = train(run, QUIET)
    assert resumed.step == 20 and resumed.stopped_by is None
    a, b = saved(whole), saved(run)
    assert a["state"].step == 20
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert logged(whole) == logged(run)
    assert [r["step"] for r in logged(run)] == [5, 8, 10, 15, 16, 20, 20]


def test_finished_run_is_reported_again_and_not_trained(finished):
    run, first = finished
    # How often one looks may change, and what computes.
    again = train(attending(replace(run, train=replace(run.train, log_every=1)), "chunked"), QUIET)
    assert again.step == 3
    assert again.heldout == first.heldout
    assert first.heldout.perplexity < 300  # better than the uniform model


def test_loaded_run_is_the_trained_one(finished):
    run, report = finished
    model, variables, tokenizer = gva_jax.load(run.folder)
    assert model == Transformer(run.model)
    trained = jax.tree.map(np.asarray, report.variables["params"])
    jax.tree.map(np.testing.assert_array_equal, variables["params"], trained)
    text = "Return the value."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert read_config(run.folder) == run


def test_another_run_in_the_folder_is_refused(finished):
    run, _ = finished
    for change, told in (
        (dict(model=replace(run.model, num_layers=3)), "model.num_layers: 2 -> 3"),
        (dict(train=replace(run.train, steps=4)), "train.steps: 3 -> 4"),
        (dict(data=replace(run.data, seed=5)), "data.seed: 0 -> 5"),
    ):
        with pytest.raises(ConfigError, match=told):
            train(replace(run, **change), QUIET)


def test_refused_runs_leave_nothing_behind(run, tmp_path):
    for bad in (
        replace(run, data=replace(run.data, batch_size=12)),
        replace(run, data=replace(run.data, source="docstrings:no_such_package")),
        replace(run, model=replace(run.model, dtype="float64")),
        attending(run, "splash"),  # on a CPU
    ):
        with pytest.raises(ConfigError):
            train(bad, QUIET)
    assert not (tmp_path / "runs").exists()


def test_folder_that_is_no_run_is_refused(run):
    run.folder.mkdir(parents=True)
    (run.folder / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        train(run, QUIET)
    assert [p.name for p in run.folder.iterdir()] == ["letter.txt"]


def test_perplexity_does_not_depend_on_how_a_split_is_batched(run):
    corpus = prepare(run.data, run.model.vocab_size, QUIET)
    found = []
    for batch_size, devices in ((8, None), (24, None), (5, jax.devices()[:1])):
        data = replace(run.data, batch_size=batch_size)
        it = tiny.Run(replace(run, data=data), devices)
        step = make_eval_step(it.model, it.abstract, it.mesh, corpus.tokenizer.token_bytes())
        found.append(evaluate(step, it.state.params, evaluation_batches(corpus, "heldout", data), it.mesh))
    stats = corpus.splits["heldout"]
    for one in found:
        assert one.targets == stats.tokens + stats.documents
        assert one.bytes == stats.bytes
        assert one.perplexity == pytest.approx(found[0].perplexity, rel=1e-5)
    assert 200 < found[0].perplexity < 400  # untrained, 300 tokens


def test_state_is_created_as_declared(run):
    it = tiny.Run(replace(run, data=replace(run.data, batch_size=8)))
    declared = states.shardings(it.abstract)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)), it.state, declared)
