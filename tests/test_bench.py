"""`gva bench decode`: what a step costs, counted by hand, and what the command prints."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from gva_jax import chips
from gva_jax.bench import decode
from gva_jax.bench.decode import DecodeShape, measure, roofline
from gva_jax.chips import CHIPS
from gva_jax.cli import main

SMALL = DecodeShape(batch=2, context=256, num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=4, latent_dim=24)


def test_costs_per_cached_token_are_those_of_the_design():
    shape = DecodeShape(context=1)
    assert shape.cost("gqa") == (1024, 4096)
    assert shape.cost("gva") == (544, 4608)
    assert shape.cost("mla") == (544, 2 * 16 * (272 + 256))


def test_the_ceiling_over_gqa_is_the_ratio_of_bytes_where_memory_bounds():
    gqa, gva, _ = roofline(DecodeShape())
    for chip in CHIPS:
        ratio = gqa["microseconds"][chip.name] / gva["microseconds"][chip.name]
        assert ratio == pytest.approx(1024 / 544)
    v5e = 8192 * 1024 / 819e9 * 1e6
    assert gqa["microseconds"]["TPU v5e"] == pytest.approx(v5e)


def test_measures_every_family_with_every_implementation():
    found, bandwidth = measure(SMALL, implementations=("xla", "reference"), rounds=2)
    assert [(m.family, m.implementation) for m in found] == [
        (family, name) for family in ("gqa", "gva", "mla") for name in ("xla", "reference")
    ]
    assert bandwidth > 1e8
    for m in found:
        assert m.seconds > 0 and m.bytes_per_second == pytest.approx(m.nbytes / m.seconds)
    assert {m.family: m.nbytes for m in found}["gva"] == 2 * 256 * (2 * 16 + 4) * 2
    assert [m.time_ratio_to_gqa for m in found if m.family == "gqa"] == [1.0, 1.0]


def test_the_einsum_to_compare_with_computes_the_same():
    steps = [decode._step(dataclasses.replace(SMALL, dtype="float32"), "gva", name) for name in ("einsum", "xla")]
    (a,), (b, _) = (jax.tree.leaves(step()) for step in steps)
    assert jnp.abs(a - b).max() < 1e-5 < jnp.abs(a).max()


def test_the_command(capsys):
    small = ["--context", "256", "--rounds", "1", "--dtype", "float32"]
    assert main(["bench", "decode", *small, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [step["family"] for step in figures["steps"]] == ["gqa", "gva", "mla"]
    assert main(["bench", "decode", *small]) == 0
    assert "time / GQA" in capsys.readouterr().out
    assert main(["bench", "decode", "--roofline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["bytes"] == 544 * 8192
    assert main(["bench", "decode", "--roofline"]) == 0
    assert "H200, microseconds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["decode", "--dtype", "int3"], "dtype = 'int3': must be one of bfloat16"),
        (["decode", "--implementation", "cuda"], "implementation = 'cuda': must be one of reference"),
        (["decode", "--rope-dim", "7"], "rope_dim = 7"),
        (["encode"], "no benchmark 'encode': must be decode or train"),
    ],
)
def test_mistakes_are_one_line(capsys, args, told):
    assert main(["bench", *args]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v5 lite", "TPU v5e"), ("TPU v5", "TPU v5p"), ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("cpu", None)],
)
def test_a_chip_is_known_by_the_name_that_jax_gives_it(kind, name):
    chip = chips.of(kind)
    assert (chip and chip.name) == name
