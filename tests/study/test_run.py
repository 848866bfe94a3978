"""Whole studies at tiny size: killed and continued, finished members kept, together and alone the same."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import small
from small import QUIET

from gva_jax import cli
from gva_jax.config import ConfigError
from gva_jax.display import Display
from gva_jax.study import Variant, command, programs, run, spec
from gva_jax.study.records import Record, Records
from gva_jax.study.spec import changed
from gva_jax.train import loop


class Interrupting(Display):
    """Sends the process SIGTERM when `at` updates of this run are done."""

    def __init__(self, at: int):
        super().__init__(quiet=True)
        self._left = at

    def task(self, title, total=None, start=0):
        context, display = super().task(title, total, start), self

        class Watched:
            def __enter__(self):
                task = context.__enter__()
                advance = task.advance

                def watch(count=1, figures=""):
                    advance(count, figures)
                    if title == "updates" and display._left > 0:
                        display._left -= count
                        if display._left <= 0:
                            signal.raise_signal(signal.SIGTERM)

                task.advance = watch
                return task

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Watched()


def figures(record: Record) -> dict:
    """What must not depend on how a member came to its end."""
    kept = ("curve", "development", "heldout", "swapped", "diverged_at", "tokens", "parameters")
    return {name: getattr(record, name) for name in kept}


def found(study, folder) -> dict[str, dict]:
    return {name: figures(record) for name, record in Records(folder).of(study).items()}


ONE_SEED = small.study(seeds=(11,), variants={"gqa": Variant(small.GQA), "gva": Variant(swap={
    "model.attention.value_transform": "silu"})})  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """`small.study()`, every member alone, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert run.run(small.study(), folder, QUIET, together=1) == run.Outcome(True)
    return folder


def no_training(*_):
    raise AssertionError("something was trained")


def test_killed_and_continued_equals_undisturbed(whole, tmp_path):
    """In the middle of the second member, between two points of its curve."""
    study = small.study()
    stopped = run.run(study, tmp_path, Interrupting(6 + 3), together=1)
    assert stopped == run.Outcome(False, signal.SIGTERM)
    assert [path.stem for path in (tmp_path / "members").glob("*.json")] == ["confirm-gqa-lr0.01-seed11"]
    assert len(list((tmp_path / "running").iterdir())) == 1
    assert run.run(study, tmp_path, QUIET, together=1).complete
    assert found(study, tmp_path) == found(study, whole)
    assert not (tmp_path / "running").exists()


def test_nothing_finished_is_run_again_from_the_records_alone(whole, tmp_path, monkeypatch):
    shutil.copytree(whole / "members", tmp_path / "members")
    monkeypatch.setattr(programs, "Alone", no_training)
    monkeypatch.setattr(programs, "Together", no_training)
    assert run.run(small.study(), tmp_path, QUIET).complete
    (tmp_path / "members" / "confirm-gva-lr0.01-seed12.json").unlink()
    with pytest.raises(AssertionError, match="was trained"):
        run.run(small.study(), tmp_path, QUIET)


def test_a_study_is_spread_over_sessions(whole, tmp_path):
    study = small.study()
    first = run.run(study, tmp_path, QUIET, together=1, limit_members=1)
    assert first == run.Outcome(False) and len(Records(tmp_path)) == 1
    out_of_time = run.run(study, tmp_path, QUIET, together=1, limit_seconds=1e-3)
    assert out_of_time == run.Outcome(False) and len(Records(tmp_path)) == 1
    assert found(study, tmp_path).items() <= found(study, whole).items()


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.long)])
def test_members_together_equal_the_same_alone(whole, tmp_path, monkeypatch, devices):
    """Two seeds at two learning rates, four members on one device or two on each; equal within float32 noise."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    study = small.study(variants={"gva": Variant()}, pairs=(), learning_rates=(1e-2, 2e-2))
    assert run.run(study, tmp_path, QUIET, together=8).complete
    alone, many = found(small.study(), whole), found(study, tmp_path)
    assert {record.together for record in Records(tmp_path).of(study).values()} == {4}
    for name in ("confirm-gva-lr0.01-seed11", "confirm-gva-lr0.01-seed12"):
        (steps, losses), (_, expected) = (zip(*side[name]["curve"], strict=True) for side in (many, alone))
        assert steps == (2, 4, 6)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for split in ("development", "heldout"):
            assert many[name][split].loss == pytest.approx(alone[name][split].loss, rel=1e-5)
            assert many[name][split].targets == alone[name][split].targets
    losses = sorted(member["development"].loss for member in many.values())
    assert len(losses) == 4 and min(np.diff(losses)) > 1e-3  # members differ, so equality above says something


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_variants_together_equal_the_same_alone(tmp_path, monkeypatch, devices):
    """They differ in initial values, or in the forward; each with a swap to the other's."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    variants = {
        "silu": Variant(SILU, swap={"model.attention.value_transform": "none"}),
        "matched": Variant(swap=SILU),
        "default": Variant({"model.attention.key_init": "default"}),
    }
    study = small.study(pairs=(), variants=variants)
    study = replace(study, base=changed(study.base, {"train.steps": 3}))
    for name, together in (("together", 8), ("alone", 1)):
        assert run.run(study, tmp_path / name, QUIET, together=together).complete
    alone, many = (Records(tmp_path / name).of(study) for name in ("alone", "together"))
    assert sorted(record.together for record in many.values()) == [2, 2, 4, 4, 4, 4]
    for name, record in many.items():
        for split in ("development", "heldout", "swapped"):
            one, other = getattr(record, split), getattr(alone[name], split)
            assert one is other is None or one.loss == pytest.approx(other.loss, rel=1e-5)
    losses = [x.loss for r in alone.values() for x in (r.heldout, r.swapped) if x is not None]
    assert len(losses) == 10 and min(np.diff(sorted(losses))) > 1e-4  # so equality above says something


def test_a_member_is_what_the_trainer_makes_of_its_config(whole, tmp_path):
    member = small.study().confirm_members({"gva": (1e-2,)})[0]
    report = loop.train(replace(member.config, runs=str(tmp_path)), QUIET)
    record = Records(whole).get(member)
    assert record.heldout.loss == pytest.approx(report.heldout.loss, rel=1e-6)
    assert record.development.loss == pytest.approx(report.development.loss, rel=1e-6)


@pytest.mark.long
def test_the_search_never_reads_the_heldout_split(tmp_path, monkeypatch):
    read, batches = [], run.evaluation_batches
    monkeypatch.setattr(
        run, "evaluation_batches", lambda corpus, split, data: read.append(split) or batches(corpus, split, data)
    )
    study = small.searching(1e-2, 1e30, variants={"gva": Variant()}, pairs=(), seeds=(11,))
    assert run.run(study, tmp_path, QUIET, together=1, limit_members=2) == run.Outcome(False)
    assert set(read) == {"development"}
    assert run.run(study, tmp_path, QUIET, together=1).complete
    assert set(read) == {"development", "heldout"}
    records = Records(tmp_path)
    trials = [records.get(member) for member in study.search_members()]
    assert [trial.heldout for trial in trials] == [None, None]
    assert trials[0].diverged_at is None and trials[1].diverged_at is not None and trials[1].development is None
    assert records.rates(study) == {"gva": (1e-2,)}


@pytest.mark.long
def test_a_swap_is_measured_on_the_trained_weights(tmp_path):
    study = replace(ONE_SEED, base=changed(ONE_SEED.base, {"train.steps": 2}))
    assert run.run(study, tmp_path, QUIET, together=1).complete
    gqa, gva = Records(tmp_path).of(study).values()
    assert gqa.swapped is None
    assert gva.swapped.targets == gva.heldout.targets and gva.swapped.loss != gva.heldout.loss


@pytest.mark.long
@pytest.mark.parametrize("together", [1, 2])
def test_a_swap_that_computes_the_same_measures_the_same(tmp_path, monkeypatch, together):
    """Two seeds, whose weights differ: the same keys, made out of the values instead of folded into the query."""
    swap = {"model.attention.form": "materialised"}
    study = replace(small.study(variants={"gva": Variant(swap=swap)}, pairs=()))
    models, kind = [], programs.Alone if together == 1 else programs.Together
    evaluator = kind.evaluator
    monkeypatch.setattr(kind, "evaluator", lambda self, model=None: models.append(model) or evaluator(self, model))
    assert run.run(study, tmp_path, QUIET, together=together).complete
    first, second = Records(tmp_path).of(study).values()
    for record in (first, second):
        assert record.swapped.targets == record.heldout.targets
        assert record.swapped.loss == pytest.approx(record.heldout.loss, rel=1e-6)
    assert abs(first.heldout.loss - second.heldout.loss) > 1e-4
    assert sum(model is not None for model in models) == 2 // together  # once a program


def test_a_study_says_how_many_train_together(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "default_together", lambda: 8)
    monkeypatch.setattr(programs, "Together", no_training)
    study = small.study(variants={"gva": Variant()}, pairs=())
    study = replace(study, base=changed(study.base, {"train.steps": 1}))
    with pytest.raises(AssertionError, match="was trained"):
        run.run(study, tmp_path, QUIET)
    assert run.run(replace(study, together=1), tmp_path, QUIET).complete


def test_checkpoints_are_saved_on_the_way(tmp_path, monkeypatch):
    saved, save = [], run.Checkpoints.save
    keep = lambda self, state, position: saved.append(int(state.step)) or save(self, state, position)
    monkeypatch.setattr(run.Checkpoints, "save", keep)
    study = replace(ONE_SEED, base=changed(ONE_SEED.base, {"train.checkpoint_every": 4}))
    assert not run.run(study, tmp_path, QUIET, together=1, limit_members=1).complete
    assert saved == [4]


@pytest.mark.parametrize(
    ("rate", "diverged_at", "steps"),
    [(30.0, 6, 6), (1e30, 3, 4)],  # finite, but no perplexity; not finite, found while the next update runs
)
def test_what_explodes_has_diverged(tmp_path, rate, diverged_at, steps):
    study = small.study(variants={"gva": Variant()}, pairs=(), seeds=(11,), learning_rates=(rate,))
    study = replace(study, base=changed(study.base, {"train.max_skips": 1}))
    assert run.run(study, tmp_path, QUIET, together=1).complete
    (record,) = Records(tmp_path).of(study).values()
    assert (record.development, record.heldout, record.diverged_at) == (None, None, diverged_at)
    assert record.tokens == steps * 8 * 16


@pytest.mark.parametrize(("count", "devices", "first"), [(5, 4, 4), (3, 4, 3), (9, 4, 8), (5, 1, 5)])
def test_a_group_is_spread_evenly(monkeypatch, count, devices, first):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    study = small.study(variants={"gva": Variant()}, pairs=(), seeds=tuple(range(count)))
    assert len(programs.group(study.confirm_members({"gva": (1e-2,)}), 64)) == first


SILU = {"model.attention.value_transform": "silu"}
GLU = {"model.attention.value_transform": "full_glu"}


@pytest.mark.parametrize(
    ("most", "devices", "names"),
    [
        (8, 1, "gva11 gva12 gva13 silu11 silu12 silu13"),
        (8, 3, "gva11 silu11 gva12 silu12 gva13 silu13"),  # one of each on a device
        (8, 2, "gva11 silu11 gva12 silu12"),
        (4, 1, "gva11 gva12 silu11 silu12"),
        (2, 2, "gva11 silu11"),
        (1, 2, "gva11"),
    ],
)
def test_variants_of_the_same_parameters_are_one_program(monkeypatch, most, devices, names):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    variants = {"gva": Variant(), "glu": Variant(GLU), "silu": Variant(SILU)}
    study = small.study(variants=variants, pairs=(), seeds=(11, 12, 13))
    members = programs.group(study.confirm_members(dict.fromkeys(variants, (1e-2,))), most)
    assert [f"{member.variant}{member.seed}" for member in members] == names.split()


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, whole):
    out = tmp_path / "out"
    gated = Variant(swap={"model.attention.value_transform": "full_glu"})
    with_second = lambda changes: small.study(variants={"gva": Variant(), "second": Variant(changes)}, pairs=())
    for study, told in (
        (small.study(variants={"gva": gated}, pairs=()), "must leave the parameters as they are"),
        (with_second({"model.attention.family": "mha"}), r"variants\.second: attention\.num_kv_heads = 1"),
        (with_second({"mesh.tensor": 3}), r"variants\.second: .*mesh"),
        (replace(small.study(), base=changed(small.base(), {"model.dtype": "float64"})), "JAX_ENABLE_X64"),
        (replace(small.study(), base=changed(small.base(), {"model.vocab_size": 100})), "vocab"),
        (spec.with_source(small.study(), "prepared:nowhere"), "nowhere"),
    ):
        with pytest.raises(ConfigError, match=told):
            run.run(study, out, QUIET)
    assert not out.exists()
    for study, told in (
        (small.study(variants={"gva": gated}, pairs=()), r"variants\.gva: swap = .*must leave the parameters"),
        (with_second({"model.attention.family": "mha"}), r"variants\.second: attention\.num_kv_heads = 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            command.costs(study)
    with pytest.raises(ConfigError, match=r"optimizer\.b1: 0\.9 -> 0\.8"):
        run.run(replace(small.study(), base=changed(small.base(), {"optimizer.b1": 0.8})), whole, QUIET)


def test_one_process_at_a_time(tmp_path):
    with run._alone_in(tmp_path), pytest.raises(ConfigError, match="another process"):
        run.run(small.study(), tmp_path, QUIET)


# ---- the command -----------------------------------------------------------------------------------------------------

FILE = """
import sys
sys.path.insert(0, {folder!r})
from small import study
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(folder=str(Path(__file__).parent)))
    return path


def test_the_command_goes_on_where_it_stopped(file, whole, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole / "members", out / "members")
    (out / "members" / "confirm-gva-lr0.01-seed12.json").unlink()
    assert cli.main(["study", str(file), "--out", str(out), "--report"]) == 0
    assert "confirm-gva-lr0.01-seed12" in (out / "report.md").read_text()
    capsys.readouterr()
    assert cli.main(["study", str(file), "--out", str(out), "--together", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["complete"] and [row["seeds"] for row in summary["rows"]] == [[11, 12]] * 2
    assert found(small.study(), out) == found(small.study(), whole)
    text = (out / "report.md").read_text()
    assert "gva study mine.py --out out" in text and str(tmp_path) not in text


def test_what_a_study_costs(file, capsys):
    assert cli.main(["study", str(file), "--plan", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    gqa, gva = told["members"]
    assert (gqa["members"], gqa["updates"], gqa["tokens"]) == (2, 12, 12 * 8 * 16)
    assert gva["parameters"] == sum(x.size for x in jax.tree.leaves(programs.parameter_shapes(small.base().model)))
    assert told["hours"]["H100 SXM"] == pytest.approx((gqa["flops"] + gva["flops"]) / (0.3 * 989e12 * 3600), rel=0.01)


@pytest.mark.parametrize("name", ["gatedv_small", "gva_350m"])
def test_the_costs_of_shipped_studies_are_whole_on_a_narrow_terminal(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["study", name, "--plan", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert cli.main(["study", name, "--plan"]) == 0
    out = capsys.readouterr().out
    words = out.split()
    for row in told["members"]:
        assert {row["variant"], f"{row['parameters']:,}", f"{row['flops']:.3g}"} <= set(words), row
    assert all(chip in out for chip in told["hours"]) and "…" not in out, out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["nothing"], "no such file or shipped study"),
        (["gatedv_small", "--together", "0"], "together = 0"),
        (["gatedv_small", "--limit-seconds", "0"], "limit_seconds"),
        (["gatedv_small", "--report", "--plan"], "not both"),
        (["gatedv_small", "--report", "--out", "nowhere"], "no member"),
        (["gatedv_small", "--memberz", "1"], "did you mean --members"),
    ],
)
def test_a_mistake_is_one_line(args, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["study", *args]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
