"""`gva bench train`: the order of measuring, what is compared with what, and the command on real tiny steps."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from gva_jax.bench import train as bench
from gva_jax.bench.train import check, measure
from gva_jax.cli import main
from gva_jax.config import AttentionConfig, ConfigError, DataConfig, ModelConfig, RunConfig, TrainConfig, to_dict

SIZES = dict(vocab_size=64, num_layers=1, model_dim=32, hidden_dim=32, scan_layers=False)


def config(name="a", **attention) -> RunConfig:
    attention = AttentionConfig(**{"family": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **attention})
    data = DataConfig(context_length=16, batch_size=8)
    return RunConfig(name=name, model=ModelConfig(**SIZES, attention=attention), data=data)


# ---- with variants whose costs are given -----------------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch):
    """Measures variants of given seconds and bytes on a clock of its own; the result and what ran in which order."""

    def go(*costs, stats=False, rounds=3):
        at = SimpleNamespace(now=0.0, mark=100, ran=[])

        class Given:
            def __init__(self, config):
                self.name, self.parameters = config.name, 1
                self.forwards, self.steps, self.compiled_bytes, self.peak = costs[int(config.name)]

            def begin(self):
                at.ran.append(("begin", self.name))

            def end(self):
                at.ran.append(("end", self.name))

            def forward(self):
                at.ran.append(("forward", self.name))
                at.now += self.forwards.pop(0)

            def step(self):
                at.ran.append(("step", self.name))
                at.mark = max(at.mark, self.peak)
                at.now += self.steps.pop(0)

        monkeypatch.setattr(bench, "Variant", Given)
        monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: at.now))
        monkeypatch.setattr(bench, "_high_mark", lambda: at.mark if stats else None)
        return measure([config(str(i)) for i in range(len(costs))], rounds=rounds), at.ran

    return go


def test_rounds_are_interleaved_and_medians_leave_the_first_round_out(given):
    found, ran = given(([99, 1, 2, 90], [99, 10, 20, 900], 50, 0), ([99, 3, 70, 3], [99, 30, 30, 700], 60, 0))
    assert ran[2:] == 4 * [("forward", "0"), ("forward", "1"), ("step", "0"), ("step", "1")]
    assert [(m.forward_seconds, m.step_seconds) for m in found] == [(2, 20), (3, 30)]
    assert [(m.forward_ratio, m.step_ratio, m.peak_ratio) for m in found] == [(1, 1, 1), (1.5, 1.5, 1.2)]
    assert {m.peak_source for m in found} == {"compiled"}


def test_a_devices_high_mark_is_a_variants_own_only_where_it_rises(given):
    ones = lambda: [1.0] * 9
    costs = [(ones(), ones(), compiled, peak) for compiled, peak in ((300, 330), (200, 220), (310, 320))]
    found, ran = given(*costs, stats=True)
    assert [(m.peak_bytes, m.peak_source) for m in found] == [(330, "device"), (220, "device"), (310, "compiled")]
    alone = [("begin", "1"), ("step", "1"), ("end", "1"), ("begin", "0"), ("step", "0"), ("end", "0")]
    assert ran[:6] == alone  # the smallest first, alone on the device


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_steps_of_different_size_are_not_compared():
    a, b = config(), config("b")
    check([a, b])
    longer = replace(b, data=replace(b.data, context_length=32))
    with pytest.raises(ConfigError, match="a takes 8 x 1 sequences of 16 tokens a step, b 8 x 1 sequences of 32"):
        check([a, longer])
    with pytest.raises(ConfigError, match="b 4 x 2 sequences of 16"):
        check([a, replace(b, train=TrainConfig(accumulation=2))])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "configs = (): give one or more"),
        (["quickstart", "nope"], "config 'nope': no such file"),
        (["quickstart", "gva_350m"], "takes 4 x 1 sequences of 256 tokens a step, gva_350m 32 x 8 sequences"),
        (["quickstart", "--rounds", "0"], "rounds = 0: must be 1 or more"),
        (["quickstart", "--batch", "8"], "no option --batch; did you mean --batch_size?"),
    ],
)
def test_mistakes_are_one_line(capsys, args, told):
    assert main(["bench", "train", *args]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


# ---- real steps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Two configs whose steps differ in size until they are overridden."""
    paths = []
    for name, family in (("a", "gqa"), ("b", "mha")):
        path, run = tmp_path / f"{name}.py", config(name, family=family, num_kv_heads=2 if family == "gqa" else None)
        run = replace(run, data=replace(run.data, context_length=16 if name == "a" else 48, batch_size=16),
                      train=TrainConfig(accumulation=1 if name == "a" else 4))  # fmt: skip
        path.write_text("from gva_jax.config import RunConfig, from_dict\n\n\ndef config():\n"
                        f"    return from_dict(RunConfig, {to_dict(run)!r})\n")  # fmt: skip
        paths.append(str(path))
    return paths


@pytest.mark.long
def test_the_command(capsys, files):
    assert main(["bench", "train", *files, "--batch-size", "8", "--context", "24", "--rounds", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["batch_size"], figures["context"], figures["rounds"]) == (8, 24, 2)
    a, b = figures["variants"]
    assert (a["name"], b["name"]) == ("a", "b")
    assert a["forward_ratio"] == a["step_ratio"] == a["peak_ratio"] == 1
    assert b["step_ratio"] == pytest.approx(b["step_seconds"] / a["step_seconds"]) and a["forward_seconds"] > 0
    # MHA has two groups more of keys and values, 2 x 32 x 16; parameters and two moments of each are held.
    assert b["parameters"] - a["parameters"] == 2 * 32 * 16
    assert b["peak_bytes"] - a["peak_bytes"] >= 3 * 4 * 2 * 32 * 16
    shape = SimpleNamespace(data=DataConfig(context_length=24, batch_size=8))
    drawn = bench.table([shape], [bench.Measurement(**a), bench.Measurement(**b)])
    assert drawn.caption == "* of the compiled program" and drawn.row_count == 2


def test_a_variants_step_is_training():
    """Every parameter moves, which an update that is not applied, or a frozen part, would not do."""
    variant = bench.Variant(config())
    variant.begin()
    before = jax.tree.map(lambda x: x.copy(), variant._state.params)
    variant.step()
    variant.forward()
    variant.step()
    assert variant._state.step == 2
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, variant._state.params)
    assert all(jax.tree.leaves(moved))
    variant.end()
    assert variant.compiled_bytes > 3 * 4 * variant.parameters
