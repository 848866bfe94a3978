"""Training over meshes: every family on every mesh equals one device, and what crosses the network is what should.

What crosses is read off the compiled step. Sequences of 56 in batches of 24: what has a factor 7 or 3 is about tokens.
"""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import collectives
import jax
import numpy as np
import pytest
import tiny_run as tiny
from cover import thinned
from jax.sharding import AbstractMesh

from gva_jax import model as models
from gva_jax import sharding
from gva_jax.config import AttentionConfig, ConfigError, DataConfig, MeshConfig, RunConfig, TrainConfig, load
from gva_jax.display import Display
from gva_jax.train import optimizer as optimizers
from gva_jax.train.loop import train
from gva_jax.train.state import abstract
from gva_jax.train.step import make_eval_step, put

B, T = 24, 56
FAMILIES = {
    **tiny.FAMILIES,
    "mha": AttentionConfig("mha", 4, None, 8),
    "gva_keyless": AttentionConfig("gva", 4, 2, 8, 0),
    "gva_materialised": AttentionConfig("gva", 4, 2, 8, 4, q_norm=True, form="materialised"),
}
# What a family's attention gathers, per token: by groups (G, d), or one for all (r or c).
STREAMS = {
    "gva": ((2, 8), (4,)),
    "gva_keyless": ((2, 8),),
    "gva_materialised": ((2, 8), (4,)),
    "gva_full_rope": ((2, 8),),
    "gqa": ((2, 8),),
    "mqa": ((1, 8),),
    "mha": ((4, 8),),
    "mla": ((16,), (4,)),
}
COVER = [  # (data, fsdp, tensor, context)
    ("gva", (1, 2, 2, 2)),
    ("gva_materialised", (1, 2, 1, 4)),
    ("gva_full_rope", (2, 1, 2, 2)),
    ("gqa", (1, 1, 2, 4)),
    ("mqa", (1, 2, 2, 2)),
    ("mla", (2, 1, 2, 2)),
    ("mha", (2, 2, 2, 1)),
    ("gva_materialised", (2, 2, 2, 1)),
]
# Every three of the four axes. (Eight devices do not split over all four.)
THREE = [(2, 2, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2)]
REST = sorted({*itertools.product(FAMILIES, THREE)} - {*COVER})


def config(family: str, mesh: tuple[int, ...], **kw) -> RunConfig:
    run = tiny.config(mesh=MeshConfig(*mesh), attention=FAMILIES[family], **kw)
    return replace(run, data=DataConfig(context_length=T, batch_size=B))


def expected(family: str, mesh: tuple[int, ...]) -> collectives.Expected:
    data, fsdp, tensor, context = mesh
    shared = [x for x in STREAMS[family] if len(x) == 1 or x[0] == 1]  # what all heads read
    stream = tuple((max(x[0] // tensor, 1), *x[1:]) if len(x) == 2 else x for x in STREAMS[family])
    return collectives.Expected(
        B // (data * fsdp), T // context, T, stream, sums=((32,), *shared),
        unsplit=tuple((32, x[-1]) for x in shared),
    )  # fmt: skip


def compiled(run: tiny.Run):
    with jax.set_mesh(run.mesh):
        return run.step.jitted.lower(run.state, put(tiny.batch(0, run.config), run.mesh)).compile()


@functools.cache
def on_one_device(family: str) -> list[dict[str, float]]:
    run = tiny.float64(config(family, (1, 1, 1, 1)))
    return tiny.one_device(run, tiny.drawn_state(run)).advance(3)


def check(family: str, mesh: tuple[int, ...]) -> None:
    with jax.enable_x64(True):
        one = on_one_device(family)
        run = tiny.float64(config(family, mesh))
        run = tiny.Run(run, state=tiny.drawn_state(run))
        step = compiled(run)
        run.step = step
        many = run.advance(3)
    for a, b in zip(one, many, strict=True):
        assert b == pytest.approx(a, rel=1e-9)
    assert one[2]["loss"] != one[0]["loss"]
    sent = collectives.read(step.as_text(), dict(run.mesh.shape))
    allowed = expected(family, mesh)
    assert not (strange := [str(x) for x in sent if x not in allowed]), "\n".join(strange)
    if mesh[3] > 1:  # all of the stream, and nothing else
        gathered = {x.shape[2:] for x in sent if x.axes == ("context",) and x.dtype == "f64" and x.kind == "all-gather"}
        assert gathered == set(allowed.stream)


@pytest.mark.parametrize(("family", "mesh"), thinned(COVER, 2))
def test_many_devices_equal_one_and_send_what_they_should(family, mesh):
    check(family, mesh)


@pytest.mark.long
@pytest.mark.parametrize(("family", "mesh"), REST)
def test_every_family_on_every_mesh(family, mesh):
    check(family, mesh)


def forward(run: RunConfig) -> list[collectives.Collective]:
    """What the evaluation of one batch sends."""
    it = tiny.Run(run, state=tiny.drawn_state(run))
    evaluate = make_eval_step(it.model, it.abstract, it.mesh, np.ones(run.model.vocab_size, np.int32))
    with jax.set_mesh(it.mesh):
        lowered = evaluate.jitted.lower(it.state.params, put(tiny.batch(0, run), it.mesh))
    return collectives.read(lowered.compile().as_text(), dict(it.mesh.shape))


def test_a_broken_constraint_is_found(monkeypatch):
    """Activations whose sequence is not said to be split."""
    mesh, real = (1, 2, 2, 2), models.constrain
    allowed, run = expected("gva", mesh), config("gva", mesh)
    assert all(x in allowed for x in forward(run))
    whole = lambda x, *names: real(x, *[None if name == "sequence" else name for name in names])
    monkeypatch.setattr(models, "constrain", whole)
    strange = [x for x in forward(run) if x not in allowed]
    assert any(x.kind == "all-gather" and x.axes == ("context",) and x.shape == (12, 56, 32) for x in strange)


def test_gva_gathers_half_of_what_gqa_does():
    sent = {name: collectives.context_bytes(forward(config(name, (2, 1, 1, 4)))) for name in ("gva", "gqa", "mla")}
    G, d, r, c, tokens = 2, 8, 4, 16, B // 2 * T
    assert {name: x["forward"] / tokens / 4 for name, x in sent.items()} == {
        "gva": G * d + r,
        "gqa": 2 * G * d,
        "mla": c + r,
    }
    assert sent["gva"]["forward"] / sent["gqa"]["forward"] == 1 / 2 + r / (2 * G * d)


# ---- the quickstart's model, whole runs ------------------------------------------------------------------------------


@functools.cache
def quickstart_losses(mesh: tuple[int, ...] | None, dtype: str, steps: int) -> list[float]:
    """On a mesh; None: one device."""
    run = tiny.quickstart(mesh and MeshConfig(*mesh), dtype)
    with jax.enable_x64(dtype == "float64"):
        it = tiny.one_device(run) if mesh is None else tiny.Run(run)
        return [m["loss"] for m in it.optimised().advance(steps)]


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(8, 1, 1, 1), (4, 2, 1, 1), (2, 2, 2, 1), (2, 1, 2, 2)])
def test_the_quickstart_model_on_meshes_equals_one_device(mesh):
    one, many = (quickstart_losses(where, "float64", 20) for where in (None, mesh))
    np.testing.assert_allclose(many[:2], one[:2], rtol=1e-14, atol=0)
    np.testing.assert_allclose(many, one, rtol=1e-13, atol=0)
    assert one[-1] < one[0] - 0.1  # it has learnt, so the comparison is not one of constants
    one, many = (quickstart_losses(where, "float32", 1) for where in (None, mesh))
    assert many[0] == pytest.approx(one[0], rel=1e-6)


def test_a_run_is_evaluated_saved_and_restored_on_another_mesh(tmp_path):
    run = replace(
        tiny.config(vocab_size=300, mesh=MeshConfig(2, 1, 2, 2)), name="split", runs=str(tmp_path / "runs"),
        data=DataConfig(source="docstrings:json,argparse", context_length=32, batch_size=8, holdout=0.1),
        train=TrainConfig(steps=3, eval_every=2, eval_batches=1),
    )  # fmt: skip
    first = train(run, Display(quiet=True))
    again = train(replace(run, mesh=MeshConfig(1, 2, 1, 4)), Display(quiet=True))
    assert again.step == 3 and again.variables["params"]["embedding"]["embedding"].sharding.mesh.shape["context"] == 4
    for split in ("development", "heldout"):
        a, b = getattr(first, split), getattr(again, split)
        assert b.targets == a.targets and b.loss == pytest.approx(a.loss, rel=1e-5) and a.perplexity < 300


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(mesh=MeshConfig(context=16)), "product must be the number of devices, 8"),
        (dict(mesh=MeshConfig(1, 1, 1, 8), data=DataConfig(context_length=60)), "data.context_length = 60: must be a"),
    ],
)
def test_meshes_that_cannot_split_a_sequence_are_refused(change, told):
    run = replace(tiny.config(), **change)
    with pytest.raises(ConfigError, match=told):
        sharding.check(run, sharding.make_mesh(run.mesh))


@pytest.mark.parametrize(
    ("r", "fsdp", "split", "told"),
    [
        (16, 16, ("fsdp", "tensor"), []),  # the width, 64
        (16, 256, (None, ("tensor", "fsdp")), []),  # 16 heads x 48
        (24, 256, (None, "tensor"), ["key_map (64 x 640) is whole on every device: fsdp = 256 divides neither axis"]),
    ],
)
def test_maps_are_split_over_fsdp_on_the_axis_that_it_divides(r, fsdp, split, told):
    run = load("gva_350m")
    model = replace(run.model, attention=replace(run.model.attention, rope_dim=r))
    devices = AbstractMesh((1, fsdp, 1, 1), sharding.AXES)
    state = abstract(models.Transformer(model), optimizers.make(run.optimizer, 10), 0, devices)
    for tree in (state.params, state.opt_state):
        found = {tuple(x.sharding.spec) for path, x in jax.tree_util.tree_leaves_with_path(tree)
                 if str(path[-1]) == "['key_map']"}  # fmt: skip
        assert found == {(None, *split)}
    assert sharding.whole(state.params) == told


# ---- processes -------------------------------------------------------------------------------------------------------


def held(*axes: int, processes: int):
    """A mesh of 8 devices as so many processes with equally many devices each see it."""
    names = [SimpleNamespace(process_index=i * processes // 8) for i in range(8)]
    return SimpleNamespace(shape=dict(zip(sharding.AXES, axes, strict=True)), devices=np.array(names).reshape(axes))


def test_processes_load_the_rows_that_their_devices_hold():
    share = lambda mesh, process: tuple(sharding.share.__wrapped__(mesh, process))
    assert share(held(2, 2, 2, 1, processes=2), 1) == (1, 2, (2, 3))
    assert share(held(1, 2, 1, 4, processes=4), 3) == (1, 2, (1,))  # two processes share a row's tokens
    assert share(held(1, 1, 1, 8, processes=8), 5) == (0, 1, (0,))
    split = held(4, 1, 1, 2, processes=2)
    split.devices = split.devices.reshape(2, 4).T.reshape(4, 1, 1, 2)  # every row on both
    assert share(split, 1) == (0, 1, (0, 1, 2, 3))
    uneven = held(8, 1, 1, 1, processes=2)
    uneven.devices[0, 0, 0, 0].process_index = 1
    with pytest.raises(ConfigError, match="data x fsdp = 8 over 2 processes"):
        share(uneven, 0)


@pytest.mark.parametrize("mesh", [(2, 2, 1, 2), (1, 1, 2, 4)])
def test_batches_lie_as_declared(mesh):
    run = config("gva", mesh)
    devices = sharding.make_mesh(run.mesh)
    batch = tiny.batch(0, run)
    for name, x in put(batch, devices).items():
        assert x.sharding == sharding.batch_sharding(devices)
        np.testing.assert_array_equal(x, batch[name])
