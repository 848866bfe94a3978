"""The training step: what it counts, what it updates, where its arrays lie, and that it compiles once."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run as tiny
from cover import thinned

from gva_jax import sharding
from gva_jax.config import ConfigError, DataConfig, MeshConfig, OptimizerConfig
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.losses import summed_loss
from gva_jax.train.step import put

MESHES = {
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(data=1, fsdp=8),
    "tensor": MeshConfig(data=4, tensor=2),
    "all": MeshConfig(data=2, fsdp=2, tensor=2),
}


@functools.cache
def losses_on_one_device() -> list[float]:
    """In float64, over 20 steps."""
    return [m["loss"] for m in tiny.one_device(tiny.float64(tiny.config())).advance(20)]


@pytest.mark.parametrize("mesh", thinned(MESHES, 2))
def test_eight_devices_equal_one_in_float64(mesh):
    with jax.enable_x64(True):
        run = tiny.float64(tiny.config(mesh=MESHES[mesh]))
        one = losses_on_one_device()
        many = [m["loss"] for m in tiny.Run(run).advance(20)]
    np.testing.assert_allclose(many, one, rtol=1e-9, atol=0)
    assert one[-1] < 0.9 * one[0]  # it has learnt, so the comparison is not one of constants


@functools.cache
def first_on_one_device() -> dict[str, float]:
    return tiny.one_device(tiny.config()).advance(1)[0]


@pytest.mark.parametrize("mesh", thinned(MESHES, 2))
def test_first_step_in_float32(mesh):
    (many,) = tiny.Run(tiny.config(mesh=MESHES[mesh])).advance(1)
    assert many["loss"] == pytest.approx(first_on_one_device()["loss"], rel=1e-6)


@pytest.mark.parametrize("mesh", ["fsdp", "all"])
def test_compiled_shardings_are_the_declared_ones(mesh):
    run = tiny.Run(tiny.config(mesh=MESHES[mesh]))
    with jax.set_mesh(run.mesh):
        compiled = run.step.jitted.lower(run.state, put(tiny.batch(0, run.config), run.mesh)).compile()
    declared = states.shardings(run.abstract)
    same = lambda x, want, got: got.is_equivalent_to(want, x.ndim)
    for side in (compiled.input_shardings[0][0], compiled.output_shardings[0]):
        assert all(jax.tree.leaves(jax.tree.map(same, run.abstract, declared, side)))
    assert run.state.params["layers"]["mlp"]["up"]["kernel"].sharding.spec[1] == "fsdp"
    split = [x for x in jax.tree.leaves(run.state) if not x.sharding.is_fully_replicated]
    assert sum(x.size for x in split) > 0.95 * sum(x.size for x in jax.tree.leaves(run.state))


def test_compiles_once_and_donates():
    run = tiny.Run(tiny.config(mesh=MESHES["all"]))
    before = run.state
    run.advance(4)
    assert run.step.jitted._cache_size() == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(before.params))


def test_accumulation_over_ragged_padding_equals_the_full_batch():
    with jax.enable_x64(True):
        whole = tiny.one_device(tiny.float64(tiny.config())).advance(5, ragged=True)
        parts = tiny.one_device(tiny.float64(tiny.config(accumulation=4))).advance(5, ragged=True)
        sharded = tiny.Run(tiny.float64(tiny.config(accumulation=2))).advance(5, ragged=True)
    for a, b, c in zip(whole, parts, sharded, strict=True):
        assert b == pytest.approx(a, rel=1e-10)
        assert c == pytest.approx(a, rel=1e-10)


def test_padding_counts_for_nothing():
    run = tiny.one_device(tiny.config())
    batch = tiny.batch(0, run.config, ragged=True)
    padded = batch["segment_ids"] == 0
    other = {**batch, "targets": np.where(padded, (batch["targets"] + 7) % 64, batch["targets"])}
    loss = jax.jit(lambda b: summed_loss(run.model, run.state.params, b))
    assert loss(batch) == loss(other) > 0
    changed = {**batch, "targets": (batch["targets"] + 7) % 64}
    assert loss(changed) != loss(batch)


def test_dtypes_are_what_the_config_says():
    run = tiny.one_device(tiny.config(dtype="bfloat16"))
    metrics = run.advance(1)
    arrays = jax.tree.leaves((run.state.params, run.state.opt_state))
    assert {x.dtype for x in arrays if x.ndim} == {jnp.dtype("float32")}
    assert 4.0 < metrics[0]["loss"] < 4.4


def test_dropout_follows_the_runs_random_state():
    run = tiny.config(dropout=0.5)
    it = tiny.one_device(run)
    begin = lambda rng: replace(jax.tree.map(jnp.asarray, tiny.initial_state(run)), rng=rng)

    def losses(rng):
        it.state = jax.device_put(begin(rng), states.shardings(it.abstract))
        return [m["loss"] for m in it.advance(2)]

    rng, other = np.array([1, 2], np.uint32), np.array([3, 4], np.uint32)
    assert losses(rng) == losses(rng)
    assert losses(rng)[0] != losses(other)[0]  # the same weights, other dropout
    assert losses(rng)[0] != first_on_one_device()["loss"]


# ---- optimiser -------------------------------------------------------------------------------------------------------


def test_weight_decay_spares_norms_and_embedding():
    run = tiny.one_device(tiny.config(tie_embeddings=False))
    params, zero = run.state.params, jax.tree.map(jnp.zeros_like, run.state.params)
    plan = OptimizerConfig(learning_rate=0.1, warmup=0, weight_decay=0.5, clip_norm=None)
    optimizer = optimizers.make(plan, 10)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path)
        shrinks = not ("scale" in name or "['embedding']['embedding']" in name)
        param = params
        for key in path:
            param = param[key.key]
        expected = -0.1 * 0.5 * param if shrinks else jnp.zeros_like(param)
        np.testing.assert_allclose(update, expected, rtol=1e-6, err_msg=name)


def test_learning_rate_warms_up_and_decays():
    rate = optimizers.learning_rate(OptimizerConfig(learning_rate=1.0, warmup=0.1, final_ratio=0.1), 100)
    assert float(rate(0)) == pytest.approx(1 / 11)
    assert float(rate(10)) == pytest.approx(1.0)
    assert float(rate(55)) == pytest.approx(0.55, rel=1e-5)
    assert float(rate(100)) == pytest.approx(0.1)
    constant = optimizers.learning_rate(OptimizerConfig(learning_rate=1.0, warmup=0, final_ratio=1.0), 10)
    assert float(constant(0)) == float(constant(9)) == 1.0


def test_gradients_are_clipped():
    run = tiny.one_device(tiny.config())
    huge = jax.tree.map(lambda p: jnp.full_like(p, 1e3), run.state.params)
    plan = OptimizerConfig(weight_decay=0.0, clip_norm=1.0)
    clipped, _ = optax.clip_by_global_norm(1.0).update(huge, optax.EmptyState())
    optimizer = optimizers.make(plan, 10)
    state = optimizer.init(run.state.params)
    _, seen = optimizer.update(huge, state, run.state.params)
    moments = [x for path, x in jax.tree_util.tree_leaves_with_path(seen) if ".mu" in jax.tree_util.keystr(path)]
    for mu, g in zip(moments, jax.tree.leaves(clipped), strict=True):
        np.testing.assert_allclose(mu, 0.1 * g, rtol=1e-5)


# ---- sharding table --------------------------------------------------------------------------------------------------


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match="unknown logical axis 'heds'"):
        sharding.spec("embed", "heds")
    with pytest.raises(ValueError, match="one mesh axis"):
        sharding.spec("heads", "vocab")
    mesh = sharding.make_mesh(MeshConfig())
    with pytest.raises(ValueError, match="no sharding rule for parameter attention/novel/kernel"):
        tree = {"attention": {"novel": {"kernel": jnp.zeros((2, 2))}}}
        sharding.state_shardings(tree, tiny.config().model, mesh)


def test_one_group_is_replicated_and_its_heads_are_split():
    run = tiny.Run(tiny.config("mqa", mesh=MESHES["all"]))
    attention = run.state.params["layers"]["attention"]
    assert attention["query"]["kernel"].sharding.spec[2] == "tensor"
    assert attention["value"]["kernel"].sharding.spec[2] is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(mesh=MeshConfig(data=3)), "product must be the number of devices, 8"),
        (dict(mesh=MeshConfig(data=-1, tensor=3)), "product must be the number of devices, 8"),
        (dict(mesh=MeshConfig(data=2, tensor=4)), "num_kv_heads = 2: must be a multiple of 4"),
        (dict(data=DataConfig(batch_size=12)), "data.batch_size / train.accumulation = 12: must be a multiple of 8"),
    ],
)
def test_meshes_that_cannot_split_are_refused(change, told):
    run = replace(tiny.config(), **change)
    with pytest.raises(ConfigError, match=told):
        sharding.check(run, sharding.make_mesh(run.mesh))
