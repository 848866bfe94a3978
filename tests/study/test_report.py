"""A study of made-up runs, worked out by hand: what the report says, and what it will not say."""

import csv
import json
import math
from dataclasses import replace

import pytest
import small

from gva_jax.config import ConfigError
from gva_jax.study import Variant, report
from gva_jax.study.records import Records, is_complete
from gva_jax.study.spec import CONFIRM, changed
from gva_jax.study.summary import summarise
from gva_jax.train.evaluation import Evaluation

CORPUS = {"hash": "a" * 64, "heldout": {"documents": 2, "tokens": 99, "bytes": 300}}


def measured(perplexity: float) -> Evaluation:
    return Evaluation(nats=100 * math.log(perplexity), targets=100, bytes=300)


def write(records: Records, member, heldout: float | None, development: float | None = None, **changes) -> None:
    """A record with these perplexities; the curve falls to the development one."""
    development = heldout if development is None else development
    curve = [] if development is None else [(2, math.log(2 * development)), (6, math.log(development))]
    facts = dict(
        corpus=CORPUS,
        parameters=1234,
        tokens=768,
        curve=curve,
        development=None if development is None else measured(development),
        heldout=None if heldout is None or member.phase != CONFIRM else measured(heldout),
        swapped=None,
        diverged_at=None,
        seconds=90.0,
        together=1,
        device="1 x cpu",
        versions={"jax": "0.10.2"},
        revision="abc",
        finished="2026-11-30",
    )
    records.write(member, **facts | changes)


VALUES = {("gqa", 11): 60.0, ("gva", 11): 57.0, ("gqa", 12): 50.0, ("gva", 12): 51.0,
          ("gqa", 13): 40.0, ("gva", 13): 39.0}  # fmt: skip
THREE = small.study(seeds=(11, 12, 13))


@pytest.fixture
def folder(tmp_path):
    """All of `THREE` with the perplexities of `VALUES`."""
    records = Records(tmp_path)
    for member in THREE.confirm_members(records.rates(THREE)):
        write(records, member, VALUES[member.variant, member.seed])
    return tmp_path


def test_the_toy_by_hand(folder):
    summary = summarise(THREE, Records(folder))
    assert summary["complete"] and not summary["missing"]
    gqa, gva = summary["rows"]
    assert gqa["heldout"] == pytest.approx({"mean": 50, "sd": 10})
    assert gva["heldout"] == pytest.approx({"mean": 49, "sd": math.sqrt(84)})  # 8^2 + 2^2 + 10^2 over 2
    pair = summary["pairs"][0]
    assert pair["split"] == "heldout" and pair["differences"] == pytest.approx({11: -3, 12: 1, 13: -1})
    found = pair["comparison"]
    assert found["mean"] == pytest.approx(-1) and found["sd"] == pytest.approx(2)
    assert found["change"] == pytest.approx(-0.02)
    assert (found["improved"], found["p"]) == (2, 0.75)


def test_the_report_says_it(folder):
    report.write(THREE, folder, "gva study small")
    text = (folder / "report.md").read_text()
    assert "not complete" not in text
    assert "| gqa | 0.01 | 3 | 50.000 ± 10.000 | 50.000 ± 10.000 |" in text
    assert "| -1.000 ± 2.000 | -2.00% | 2/3 | 0.75 | 11: -3.000, 12: +1.000, 13: -1.000 |" in text
    assert "| gva | 0.01 | 1,234 | 768 | 1.5 min |" in text
    assert "    gva study small" in text and "revision abc" in text and "jax 0.10.2" in text
    with (folder / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["variant"], int(r["seed"])): round(float(r["heldout_perplexity"]), 6) for r in rows} == VALUES
    assert (folder / "curves.csv").read_text().count("\n") == 1 + 2 * 6


def test_figures_hold_each_pair_and_their_mean(folder, monkeypatch):
    pytest.importorskip("matplotlib")
    from gva_jax.study import figures

    records = Records(folder)
    found, summary = records.of(THREE), summarise(THREE, records)
    (lines,) = figures.curves(THREE, found, summary).values()
    assert [line[6] for line in lines] == pytest.approx([-5, 2, -2.5, -5.5 / 3])
    drawn = figures.draw(THREE, found, summary, folder)
    assert [path.name for path in drawn] == ["training.png", "last_quarter.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)

    plots = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: plots.append(figure.axes[0]))
    figures.draw(THREE, found, summary, folder)
    for axes, first in zip(plots, (2, 6), strict=True):
        *pairs, mean, _ = axes.get_lines()
        assert [line.get_ydata()[-1] for line in (*pairs, mean)] == pytest.approx([-5, 2, -2.5, -5.5 / 3])
        assert all(min(line.get_xdata()) == first for line in (*pairs, mean))
        assert mean.get_linewidth() > 2 * max(line.get_linewidth() for line in pairs)


def test_no_two_pairs_of_a_figure_look_alike():
    pytest.importorskip("matplotlib")
    from gva_jax.study import figures

    assert len({(figures.style(i)["color"], figures.style(i)["linestyle"]) for i in range(40)}) == 40
    assert figures.style(0)["linestyle"] == "-" and figures.style(0)["color"] == figures.style(10)["color"]


def test_a_missing_run_is_named_and_nothing_is_averaged_over_it(folder):
    (folder / "members" / "confirm-gva-lr0.01-seed12.json").unlink()
    summary = report.write(THREE, folder, "gva study small")
    assert not summary["complete"] and summary["missing"] == ["confirm-gva-lr0.01-seed12"]
    gqa, gva = summary["rows"]
    assert gqa["heldout"] is not None and gva["heldout"] is None and gva["bits_per_byte"] is None
    assert all(pair["comparison"] is None for pair in summary["pairs"])
    text = (folder / "report.md").read_text()
    assert "not complete" in text and "- confirm-gva-lr0.01-seed12" in text
    assert "| gva | 0.01 | 2 of 3 | incomplete | incomplete | incomplete |" in text
    assert "| gva | 0.01 | 1,234 | 768 |  |" in text  # nor the time
    assert "2 of 3 pairs" in text and "-2.00%" not in text


def test_a_diverged_run_is_named_and_nothing_is_averaged_over_it(folder):
    records = Records(folder)
    member = THREE.confirm_members(records.rates(THREE))[1]
    write(records, member, None, diverged_at=3)
    summary = report.write(THREE, folder, "gva study small")
    assert summary["diverged"] == ["confirm-gva-lr0.01-seed11"] and summary["rows"][1]["heldout"] is None
    assert "Diverged" in (folder / "report.md").read_text()


def test_the_search_is_told_with_its_best(tmp_path):
    study, records = small.searching(1e-2, 2e-2, 4e-2), Records(tmp_path)
    values = {("gqa", 1e-2): 70.0, ("gqa", 2e-2): 60.0, ("gqa", 4e-2): None, ("gva", 1e-2): 55.0, ("gva", 2e-2): 56.0}
    for member in study.search_members():
        if (member.variant, member.learning_rate) in values:
            value = values[member.variant, member.learning_rate]
            write(records, member, value, diverged_at=2 if value is None else None)
    assert records.rates(study) == {"gqa": (2e-2,)}  # gva lacks one
    summary = report.write(study, tmp_path, "gva study small")
    assert summary["search"]["gqa"]["best"] == 2e-2 and not summary["search"]["gqa"]["at_edge"]
    assert summary["search"]["gva"]["best"] is None
    text = (tmp_path / "report.md").read_text()
    assert "| gqa | 70.000 | **60.000** | diverged |" in text and "| gva | 55.000 | 56.000 | missing |" in text
    assert "- search-gva-lr0.04-seed1" in text and "- confirm-gva-seed11" in text
    write(records, study.search_members()[-1], 58.0)
    assert records.rates(study) == {"gqa": (2e-2,), "gva": (1e-2,)}
    assert "edge of what was tried for gva" in report.markdown(summarise(study, records) | {"figures": []}, "x")


def test_a_rate_taken_from_another_variant(tmp_path):
    study, records = small.searching(1e-2, 2e-2), Records(tmp_path)
    study = replace(study, variants={"gqa": Variant(small.GQA), "gva": Variant(rates_from="gqa", seeds=(11,))})
    assert [member.variant for member in study.search_members()] == ["gqa", "gqa"]
    for member, value in zip(study.search_members(), (9.0, 8.0), strict=True):
        write(records, member, value)
    assert records.rates(study) == {"gqa": (2e-2,), "gva": (2e-2,)}
    assert study.paired_seeds("gqa", "gva") == (11,)


def test_a_variant_without_a_rate_that_survives_is_told_and_the_others_go_on(tmp_path):
    study, records = small.searching(1e-2), Records(tmp_path)
    for member in study.search_members():
        alive = member.variant == "gva"
        write(records, member, 9.0 if alive else None, diverged_at=None if alive else 2)
    assert records.rates(study) == {"gqa": (), "gva": (1e-2,)} and not is_complete(study, records)
    for member in study.confirm_members(records.rates(study)):
        write(records, member, 9.0)
    assert is_complete(study, records)
    summary = report.write(study, tmp_path, "gva study small")
    assert summary["without_rate"] == ["gqa"] and not summary["missing"]
    text = (tmp_path / "report.md").read_text()
    assert "Diverged at every learning rate of the search, and so not confirmed: gqa." in text
    assert "| gqa | diverged |" in text and "| gqa | ? | 0 of 2 | incomplete |" in text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model.hidden_dim": 32}, "model.hidden_dim: 16 -> 32"),
        ({"optimizer.b2": 0.9}, r"optimizer.b2: 0.95 -> 0.9"),
        ({"data.batch_size": 16}, "data.batch_size: 8 -> 16"),
    ],
)
def test_a_record_of_another_config_is_not_reused(folder, changes, told):
    other = replace(THREE, base=changed(THREE.base, changes))
    with pytest.raises(ConfigError, match=told):
        Records(folder).of(other)


def test_what_makes_no_difference_may_change(folder):
    free = {"train.log_every": 99, "mesh.fsdp": 2, "data.source": "prepared:elsewhere", "train.checkpoint_every": 3}
    other = replace(THREE, base=changed(THREE.base, free))
    assert len(Records(folder).of(other)) == 6


def test_records_of_other_text_are_not_reused(folder):
    member = THREE.confirm_members({"gqa": (1e-2,)})[0]
    with pytest.raises(ConfigError, match="text of hash aaaaaaaaaaaa -> bbbbbbbbbbbb"):
        Records(folder).get(member, "b" * 64)
    path = folder / "members" / "confirm-gqa-lr0.01-seed11.json"
    path.write_text(path.read_text().replace("a" * 64, "b" * 64))
    with pytest.raises(ConfigError, match="different text"):
        Records(folder).of(THREE)


def test_records_that_are_none(folder):
    path = folder / "members" / "confirm-gqa-lr0.01-seed11.json"
    for text, told in (("{", "no record"), ('{"format": 9}', "format 9"), ('{"format": 1}', "no record")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            Records(folder)


def test_records_hold_no_folder_of_this_machine(folder):
    for path in (folder / "members").glob("*.json"):
        text = path.read_text()
        assert json.loads(text)["config"]["data"].keys().isdisjoint({"source", "directory", "tokenizer"})
        assert str(folder) not in text and len(text) < 4000


def test_strangers_are_told(folder):
    fewer = replace(THREE, seeds=(11, 12))
    summary = report.write(fewer, folder, "gva study small")
    assert summary["strangers"] == ["confirm-gqa-lr0.01-seed13", "confirm-gva-lr0.01-seed13"]
    assert summary["rows"][0]["heldout"]["mean"] == pytest.approx(55)
    assert "not of this study" in (folder / "report.md").read_text()


def test_nothing_to_report(tmp_path):
    with pytest.raises(ConfigError, match="no member"):
        report.write(THREE, tmp_path, "gva study small")
