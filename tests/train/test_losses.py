"""Cross-entropy without whole logits: equal to the plain one, gradients included, on one device and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from gva_jax import sharding
from gva_jax.config import MeshConfig
from gva_jax.train import losses


def batch(B=4, T=50):
    ids = np.random.default_rng(3).integers(0, tiny.VOCAB, (2, B, T)).astype(np.int32)
    segments = np.ones((B, T), np.int32)
    segments[1, 30:] = 0
    segments[2:] = np.arange(T) // 20 + 1
    return {"inputs": ids[0], "targets": ids[1], "segment_ids": segments, "positions": np.tile(np.arange(T), (B, 1))}


def loss_and_gradients(model, monkeypatch, limit, mesh=None):
    monkeypatch.setattr(losses, "LOGIT_BYTES", limit)
    monkeypatch.setattr(losses, "TILE", 8)
    params = tiny.weights(model)["params"]
    data = {name: jnp.asarray(x, jnp.int32) for name, x in batch().items()}
    run = lambda params, data: jax.value_and_grad(lambda p: losses.summed_loss(model, p, data) / 170)(params)
    if mesh is None:
        return jax.jit(run)(params, data)
    where = sharding.state_shardings(params, model.config, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(run, in_shardings=(where, sharding.batch_sharding(mesh)))(params, data)


def assert_equal(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert tiny.relative(x, y) < tolerance


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_change_nothing(monkeypatch, tied):
    """200 tokens in chunks of 16: the last one is half padding."""
    with jax.enable_x64(True):
        model = tiny.make(tie_embeddings=tied, **tiny.F64)
        whole = loss_and_gradients(model, monkeypatch, 2**30)
        assert_equal(loss_and_gradients(model, monkeypatch, 16 * 8 * tiny.VOCAB), whole, 1e-12)


@pytest.mark.parametrize("axes", [dict(fsdp=4), dict(data=2, fsdp=2, tensor=2)])
def test_meshes_change_nothing(monkeypatch, axes):
    with jax.enable_x64(True):
        model = tiny.make(vocab_size=tiny.VOCAB + 3, **tiny.F64)
        whole = loss_and_gradients(model, monkeypatch, 2**30)
        mesh = sharding.make_mesh(MeshConfig(**axes), jax.devices()[: np.prod(list(axes.values()))])
        assert_equal(loss_and_gradients(model, monkeypatch, 4000, mesh), whole, 1e-12)


def test_float32_differs_by_noise(monkeypatch):
    model = tiny.make()
    assert_equal(loss_and_gradients(model, monkeypatch, 16 * 4 * tiny.VOCAB),
                 loss_and_gradients(model, monkeypatch, 2**30), 2e-5)  # fmt: skip


def test_one_device_keeps_nothing_as_wide_as_the_vocabulary(monkeypatch):
    """Of the compiled program of the loss and its gradients no array has all tokens and the vocabulary."""
    monkeypatch.setattr(losses, "LOGIT_BYTES", 2**20)
    x, matrix = jnp.zeros((4, 512, 16)), jnp.zeros((4096, 16))
    ids = jnp.zeros((4, 512), jnp.int32)
    run = jax.jit(jax.value_and_grad(losses.linear_cross_entropy, (0, 1)))
    compiled = run.lower(x, matrix, ids, ids == 0).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 512 * 4096 * 4 / 4


def test_huge_logits_do_not_overflow():
    x, matrix = jnp.full((1, 2, 4), 1e3), jnp.stack([jnp.ones(4), -jnp.ones(4), jnp.zeros(4)])
    targets = jnp.array([[0, 1]])
    logits = x @ matrix.T
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()
    got, gradients = jax.value_and_grad(losses.linear_cross_entropy, (0, 1))(x, matrix, targets, targets >= 0)
    assert float(got) == float(expected) == 8000
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients)
