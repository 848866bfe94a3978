"""Bad steps are skipped, spikes clipped or skipped as documented, and a run that skips too often ends."""

import contextlib
import functools
import json
import re
import shutil
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run as tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_loop import QUIET, tiny_run

from gva_jax import cli, sharding
from gva_jax.config import ConfigError, MeshConfig, OptimizerConfig, RunConfig, TrainConfig
from gva_jax.data.corpus import Corpus
from gva_jax.data.prepare import prepare
from gva_jax.display import Display
from gva_jax.model import Transformer
from gva_jax.train import guard, loop, step, zclip
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.loop import train
from gva_jax.train.step import put

MARK, SPIKE = 99, 100  # segment ids whose targets weigh inf and 1000
EIGHT = dict(mesh=MeshConfig(data=2, fsdp=2, tensor=2), accumulation=2)


def mark_losses(patch: pytest.MonkeyPatch) -> None:
    """Training steps traced from now on heed MARK and SPIKE."""

    def summed_loss(model, params, batch, rngs=None):
        segments, positions = batch["segment_ids"], batch["positions"]
        inputs = dict(positions=positions, segment_ids=segments, rngs=rngs)
        logits = model.apply({"params": params}, batch["inputs"], **inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        weight = jnp.where(segments == MARK, jnp.inf, jnp.where(segments == SPIKE, 1e3, 1))
        return (jnp.where(segments > 0, losses, 0) * weight).sum()

    patch.setattr(step, "summed_loss", summed_loss)


def marked(batch: dict, mark: int = MARK) -> dict:
    """One target, in the last row: on one shard, in one micro-batch."""
    segments = batch["segment_ids"].copy()
    segments[-1, -1] = mark
    return batch | {"segment_ids": segments}


def skipping(**fields) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=3e-3, **fields)


def by_path(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.array(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


GUARDED = dict(clip="zclip", skip_spikes=6.0)
RUNS = {
    "default": replace(tiny.config(), optimizer=skipping(warmup=0.0, final_ratio=1.0)),
    "float64": tiny.float64(replace(tiny.config(), optimizer=skipping(**GUARDED))),
    "eight devices": tiny.float64(replace(tiny.config(**EIGHT), optimizer=skipping(**GUARDED))),
}


@functools.cache
def traced(name: str) -> tiny.Run:
    """The run, compiled once for all tests; ZClip warms up for 3 steps only."""
    run = tiny.Run(RUNS[name]) if name == "eight devices" else tiny.one_device(RUNS[name])
    with pytest.MonkeyPatch.context() as patch:
        mark_losses(patch)
        patch.setattr(zclip, "WARMUP", 3)
        run.advance(1)
    return run


@pytest.fixture
def begin():
    """`begin(name)`: that run at step 0, in its precision until the test ends."""
    with contextlib.ExitStack() as stack:

        def start(name):
            stack.enter_context(jax.enable_x64(RUNS[name].model.dtype == "float64"))
            run = traced(name)
            run.state = jax.device_put(tiny.initial_state(run.config), states.shardings(run.abstract))
            return run

        yield start


def advance(run: tiny.Run, steps: range, bad: dict[int, int] | None = None) -> list[dict[str, float]]:
    """Take the steps; `bad` says which have a mark in their batch."""
    metrics = []
    for i in steps:
        batch = tiny.batch(i, run.config)
        batch = marked(batch, bad[i]) if bad and i in bad else batch
        run.state, m = run.step(run.state, put(batch, run.mesh))
        metrics.append({name: float(x) for name, x in m.items()})
    return metrics


# ---- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_a_step_that_is_not_finite_changes_nothing_but_the_step(name, begin):
    run = begin(name)
    advance(run, range(2))
    before = by_path(run.state)
    (bad,) = advance(run, range(2, 3), {2: MARK})
    after = by_path(run.state)
    assert not np.isfinite(bad["loss"]) and not np.isfinite(bad["grad_norm"])
    assert bad["skipped"] == bad["skipped_in_a_row"] == 1
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    schedule = {name for name in changed if "inner" in name and name.endswith(".count")}
    assert changed == {".step", ".opt_state.skipped", ".opt_state.in_a_row", *schedule}
    assert len(schedule) == 1 and after[schedule.pop()] == 3  # the learning rate's; Adam's counts what it has averaged
    (good,) = advance(run, range(3, 4))
    assert good["skipped"] == 1 and good["skipped_in_a_row"] == 0
    assert good["learning_rate"] == pytest.approx(float(run.schedule(3)))
    last = by_path(run.state)
    assert all(np.isfinite(x).all() for x in last.values())
    assert all((last[name] != x).any() for name, x in after.items() if name.startswith(".params"))


def test_training_goes_on_as_if_the_skipped_batch_had_not_been_there(begin):
    run = begin("default")  # at a constant rate
    seen = advance(run, range(6), {2: MARK})
    run = begin("default")
    spared = advance(run, range(2)) + advance(run, range(3, 6))
    assert [m["loss"] for m in seen[:2] + seen[3:]] == [m["loss"] for m in spared]


def test_the_learning_rate_that_is_applied_is_the_one_of_the_step():
    plan = skipping(warmup=0.5, clip_norm=None, weight_decay=0.0)
    optimizer, rate = optimizers.make(plan, 10), optimizers.learning_rate(plan, 10)
    params = {"kernel": jnp.ones(())}
    state = optimizer.init(params)
    for i in range(6):
        gradient = {"kernel": jnp.asarray(jnp.nan if i in (1, 2) else 1.0)}
        updates, state = optimizer.update(gradient, state, params)
        if i not in (1, 2):  # equal gradients: Adam's step is the learning rate
            np.testing.assert_allclose(updates["kernel"], -rate(i), rtol=1e-5)


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradients_are():
    optimizer = optimizers.make(skipping(), 10)
    params = {"kernel": jnp.ones(3)}
    for loss, skipped in ((1.0, 0), (jnp.nan, 1), (jnp.inf, 1)):
        updates, state = optimizer.update(params, optimizer.init(params), params, loss=jnp.asarray(loss))
        assert int(state.skipped) == skipped
        kept = guard.apply_updates(params, updates, state)["kernel"]
        assert (np.asarray(kept) == 1).all() == bool(skipped)


def test_meshes_and_accumulation_skip_and_clip_alike_in_float64(begin):
    bad = {2: MARK, 5: SPIKE, 7: MARK}
    one, many = (advance(begin(name), range(9), bad) for name in ("float64", "eight devices"))
    for a, b in zip(one, many, strict=True):
        assert b == pytest.approx(a, rel=1e-9, nan_ok=True)
    assert [m["skipped"] for m in one] == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert np.isfinite(one[5]["grad_norm"]) and one[5]["grad_norm"] > 10 * one[4]["grad_norm"]


def test_the_guard_needs_no_collective_of_its_own():
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=8))
    split = NamedSharding(mesh, P("fsdp"))
    params = {"kernel": jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=split)}

    def collectives(plan, bare):
        optimizer = optimizers.make(plan, 10)
        state = jax.eval_shape(optimizer.init, params)
        lie = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if x.ndim else NamedSharding(mesh, P()))
        state = jax.tree.map(lie, state)

        def guarded(params, grads, state):
            updates, state = optimizer.update(grads, state, params, loss=jnp.zeros(()))
            return guard.apply_updates(params, updates, state), state, optax.tree.norm(grads)

        def without(params, grads, state):
            inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
            updates, _ = inner.update(grads, inner.init(params), params)
            return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

        text = jax.jit(without if bare else guarded).lower(params, params, state).compile().as_text()
        return len(re.findall(r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|permute)(?:-start)?\(", text))

    assert collectives(skipping(), bare=True) == 1  # of the norm
    assert collectives(skipping(), bare=False) == 1
    assert collectives(skipping(**GUARDED), bare=False) == 1


# ---- spikes ----------------------------------------------------------------------------------------------------------

FIRST = [1.0, 3.0] * 12 + [1.0]  # 25 norms: mean 1.96, variance 0.9984


def fed(transformation, norms, state=None):
    """Gradients of these norms through a transformation; the norms that come out, and its last state."""
    direction = jnp.asarray([0.6, 0.8])
    state = transformation.init({"kernel": direction}) if state is None else state
    found = []
    for norm in norms:
        updates, state = transformation.update({"kernel": norm * direction}, state)
        found.append(float(optax.tree.norm(updates)))
    return found, state


def test_zclip_puts_a_spike_where_the_paper_does():
    found, seen = fed(zclip.zclip(), FIRST)
    np.testing.assert_allclose(found, FIRST, rtol=1e-6)  # the warm-up clips nothing
    assert float(seen.mean) == pytest.approx(1.96) and float(seen.variance) == pytest.approx(0.9984, rel=1e-5)
    # s = 0.99920; 20 has the score 18.05446; 1.96 + 0.99920 * 2.5^2 / 18.05446 = 2.30590.
    (clipped,), after = fed(zclip.zclip(), [20.0], seen)
    assert clipped == pytest.approx(2.30590, rel=1e-5)
    # 0.97 * 1.96 + 0.03 * 2.30590 = 1.970377; 0.97 * 0.9984 + 0.03 * (2.30590 - 1.970377)^2 = 0.9718253.
    assert float(after.mean) == pytest.approx(1.970377, rel=1e-6)
    assert float(after.variance) == pytest.approx(0.9718253, rel=1e-6)
    # 4.4 has the score 2.442 and stays, 4.6 has 2.642: 1.96 + 0.99920 * 6.25 / 2.64211 = 4.32363.
    assert fed(zclip.zclip(), [4.4], seen)[0] == pytest.approx([4.4])
    assert fed(zclip.zclip(), [4.6], seen)[0] == pytest.approx([4.32363], rel=1e-5)


def test_zclip_follows_the_algorithm_over_a_long_sequence():
    rng = np.random.default_rng(0)
    norms = np.abs(rng.normal(1, 0.2, 120)) * np.where(rng.random(120) < 0.1, 10, 1)
    with jax.enable_x64(True):
        found, seen = fed(zclip.zclip(), norms)
    expected, mean, variance = list(norms[:25]), norms[:25].mean(), norms[:25].var()
    for norm in norms[25:]:
        z = (norm - mean) / (variance**0.5 + 1e-6)
        applied = mean + 2.5**2 / z * variance**0.5 if z > 2.5 else norm
        expected.append(applied)
        mean = 0.97 * mean + 0.03 * applied
        variance = 0.97 * variance + 0.03 * (applied - mean) ** 2
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose([seen.mean, seen.variance], [mean, variance], rtol=1e-9)
    assert 5 < (np.asarray(found) < 0.999 * norms).sum() < 30


def test_zclip_keeps_below_clip_norm_without_letting_the_statistics_see_it():
    bounded, seen = fed(zclip.zclip(clip_norm=2.0), FIRST)
    np.testing.assert_allclose(bounded, np.minimum(FIRST, 2.0), rtol=1e-6)  # in the warm-up too
    assert float(seen.mean) == pytest.approx(1.96)
    assert fed(zclip.zclip(clip_norm=2.0), [20.0], seen)[0] == pytest.approx([2.0])


def test_zclips_statistics_survive_what_is_not_finite():
    _, seen = fed(zclip.zclip(), FIRST)
    for bad in (np.nan, np.inf):
        _, after = fed(zclip.zclip(), [bad], seen)
        jax.tree.map(np.testing.assert_array_equal, after, seen)


def test_a_skipped_spike_enters_the_statistics_as_what_it_would_be_clipped_to():
    watch = guard.guarded(optax.identity(), skip_spikes=2.5)
    _, state = fed(watch, [*FIRST[:24], 100.0])  # nothing is skipped in the warm-up
    assert int(state.skipped) == 0
    _, state = fed(watch, FIRST)
    _, state = fed(watch, [20.0], state)
    assert int(state.skipped) == int(state.in_a_row) == 1
    assert float(state.norms.mean) == pytest.approx(1.970377, rel=1e-6)  # as in the test of ZClip
    _, state = fed(watch, [np.inf, 2.0], state)
    assert int(state.skipped) == 2 and int(state.in_a_row) == 0 and int(state.norms.count) == 27
    # A lasting moderate rise is usual after a while.
    _, state = fed(watch, [5.0] * 20, state)
    assert int(state.in_a_row) == 0 and 2 < int(state.skipped) < 10


def test_zclip_is_what_the_config_asks_for():
    params = {"kernel": jnp.zeros(2)}
    for plan, expected in (
        (skipping(clip="zclip", clip_norm=None), 2.30590),
        (skipping(clip="zclip", clip_norm=None, clip_z=1.0), 1.96 + 0.99920 / 18.05446),
        (skipping(clip="zclip"), 1.0),
        (skipping(), 1.0),
        (skipping(clip_norm=None), 20.0),
    ):
        optimizer = optimizers.make(replace(plan, b1=0.0), 100)  # Adam's mean is then the clipped gradient
        state = optimizer.init(params)
        for norm in [*FIRST, 20.0]:
            _, state = optimizer.update({"kernel": norm * jnp.asarray([0.6, 0.8])}, state, params)
        (mu,) = [x for name, x in by_path(state).items() if ".mu" in name]
        assert np.linalg.norm(mu) == pytest.approx(expected, rel=1e-4), plan


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip", "adaptive"), ("clip_z", 0.0), ("skip_spikes", 0.0), ("skip_spikes", -1.0)],
)
def test_settings_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"optimizer.{field} = "):
        OptimizerConfig(**{field: value})
    with pytest.raises(ConfigError, match=r"train\.max_skips = -1"):
        TrainConfig(max_skips=-1)


# ---- whole runs ------------------------------------------------------------------------------------------------------


class Telling(Display):
    def __init__(self):
        super().__init__(quiet=True)
        self.said = []

    def say(self, message=""):
        self.said.append(message)


@pytest.fixture
def poisoned(monkeypatch):
    """`poisoned(first, bad)`: in the run that starts at step `first`, the batches of the steps in `bad` have a mark."""
    mark_losses(monkeypatch)

    def poison(first, bad):
        steps = iter(range(first + 1, 1000))
        monkeypatch.setattr(loop, "put", lambda batch, mesh: put(marked(batch) if next(steps) in bad else batch, mesh))

    return poison


def saved_states(run: RunConfig, steps) -> list[dict[str, np.ndarray]]:
    """What the run's checkpoints hold."""
    mesh = sharding.make_mesh(run.mesh)
    abstract = states.abstract(Transformer(run.model), optimizers.make(run.optimizer, run.train.steps), 0, mesh)
    found = []
    for at in steps:
        checkpoints = Checkpoints(run.folder)
        with mock.patch.object(Checkpoints, "_steps", lambda _, at=at: [at]):
            found.append(by_path(checkpoints.restore(abstract, mock.Mock())))
        checkpoints.close()
    return found


def records(run: RunConfig) -> list[dict]:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_run_ends_after_too_many_skips_and_goes_on_from_its_last_good_checkpoint(
    tmp_path, poisoned, monkeypatch, capsys
):
    plan = TrainConfig(steps=8, log_every=1, checkpoint_every=2, keep=4, max_skips=2)
    run, display = replace(tiny_run(tmp_path), train=plan, optimizer=skipping(**GUARDED)), Telling()
    poisoned(0, {4, 5, 6, 7})
    monkeypatch.setitem(cli.COMMANDS, "train", lambda args: train(run, display))
    assert cli.main(["train"]) == 1
    told = r"error: step 6 at learning rate \S+: loss (nan|inf), gradient norm (nan|inf); 3 skipped in a row, " \
           r"train\.max_skips = 2; last good checkpoint: step 4\n"  # fmt: skip
    error = capsys.readouterr().err
    assert re.fullmatch(told, error), error
    assert [line[:14] for line in display.said if line.startswith("skipped")] == ["skipped step 4", "skipped step 5"]
    assert records(run)[3]["loss"] is None and records(run)[3]["skipped"] == 1
    # Saved in the middle of it: what step 3 had come to, which step 2 had not.
    two, four = saved_states(run, (2, 4))
    parameters = [name for name in two if name.startswith(".params")]
    assert not [name for name in parameters if (two[name] == four[name]).all()]
    assert all(np.isfinite(four[name]).all() for name in four)
    # The counters and ZClip's statistics go on where they stood; the limit may change.
    poisoned(4, {5, 6, 7})
    train(replace(run, train=replace(plan, max_skips=5)), display)
    assert display.said[-1].startswith("held-out:")
    assert any(re.search(r"^skipped step 7 .* \(4 in a row, 4 in all\)$", line) for line in display.said)
    last = records(run)[-2]
    assert last["step"] == 8 and last["skipped"] == 4 and last["skipped_in_a_row"] == 0
    (end,) = saved_states(run, [8])
    assert end[".opt_state.inner[0].count"] == end[".opt_state.norms.count"] == 4  # steps 1, 2, 3 and 8


def test_without_patience_the_first_bad_step_ends_the_run():
    checkpoints = mock.Mock(latest=None)
    limit = guard.SkipLimit(0, checkpoints, QUIET)
    metrics = dict(loss=2.5, grad_norm=70.0, learning_rate=1e-3, skipped=0, skipped_in_a_row=0)
    limit.check(1, metrics)
    told = "step 2 at learning rate 0.001: gradient norm 70, a spike; 1 skipped in a row, train.max_skips = 0; no"
    with pytest.raises(FloatingPointError, match=f"^{re.escape(told)} checkpoint yet$"):
        limit.check(2, metrics | dict(skipped=1, skipped_in_a_row=1))
    assert checkpoints.wait.called  # the newest one may not be written yet


def test_a_shard_that_breaks_in_the_middle_ends_the_run_in_one_line_behind_a_whole_checkpoint(
    tmp_path, monkeypatch, capsys
):
    run = tiny_run(tmp_path)
    shutil.copytree(prepare(run.data, run.model.vocab_size, QUIET).folder, tmp_path / "corpus")
    # Four epochs of this small text are read at once: a few batches.
    data = replace(run.data, source=f"prepared:{tmp_path / 'corpus'}", batch_size=32, context_length=128)
    run = replace(run, data=data, train=TrainConfig(steps=500, checkpoint_every=3))
    opened, source, save = [], Corpus.source, Checkpoints.save

    def keep(corpus, split):
        opened.append(source(corpus, split))
        return opened[-1]

    def save_and_break(checkpoints, *args):
        save(checkpoints, *args)
        (path,) = (tmp_path / "corpus").rglob("tokens-train-*")
        path.write_bytes(bytes(path.stat().st_size))
        opened[0]._documents.data_source._readers[:] = [None]  # the file is opened again at the next document

    monkeypatch.setattr(Corpus, "source", keep)
    monkeypatch.setattr(Checkpoints, "save", save_and_break)
    monkeypatch.setitem(cli.COMMANDS, "train", lambda args: train(run, QUIET))
    assert cli.main(["train"]) == 2
    latest = max(int(path.name) for path in (run.folder / "checkpoints").iterdir())  # none is half written
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: shard '\S+/tokens-train-00000\.array_record' is damaged [^\n]*\n", error), error
    (state,) = saved_states(run, [latest])
    assert state[".step"] == latest >= 3
