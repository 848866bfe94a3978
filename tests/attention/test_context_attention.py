"""Training attention whose sequence is split over devices, against float64: stretches, segments across their borders,
keys that are read from values, and which implementation serves.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_training_attention import BF16, Case, choice, cotangent, expected, meant_for, operands
from variants import relative

from gva_jax import sharding
from gva_jax.attention.dispatch import attention_from, training_attention
from gva_jax.attention.layers import joined
from gva_jax.attention.training import chunked, splash
from gva_jax.attention.training.common import KEPT
from gva_jax.config import ConfigError, MeshConfig

R = 8  # width of the rotary key


def on(data=1, fsdp=1, tensor=1, context=1):
    mesh = MeshConfig(data, fsdp, tensor, context)
    return jax.set_mesh(sharding.make_mesh(mesh, jax.devices()[: data * fsdp * tensor * context]))


@pytest.fixture(params=["chunked", "splash"])
def how(request, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK", 100)
    monkeypatch.setattr(splash, "BLOCK", 256)
    return dict(implementation=request.param, interpret=request.param == "splash")


def differentiated(attend, *operands):
    @jax.jit
    def both(*operands):
        y, pull = jax.vjp(attend, *operands)
        return y, *pull(cotangent(y))

    return jax.device_get(both(*operands))


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        (Case(384, 4, 2, 24, 16, True), dict(context=3)),  # a document over two borders, padding at the end
        pytest.param(Case(256, 4, 2, 16, 16, False), dict(tensor=2, context=2), marks=pytest.mark.long),
        (Case(256, 4, 1, 24, 16, True), dict(data=2, tensor=2, context=2)),  # one group, on every device
    ],
    ids=["three stretches", "two and groups", "one group"],
)
def test_values_and_gradients_equal_float64(case, mesh, how):
    q, k, v, ids = operands(case)
    with on(**mesh):
        found = differentiated(
            lambda q, k, v: training_attention(q, k, v, segment_ids=ids, scale=case.scale, **how), q, k, v
        )
    for a, b in zip(found, expected(q, k, v, ids, cotangent(found[0]), case.scale), strict=True):
        assert np.isfinite(a).all() and relative(a, b) < 4e-6
    if ids is not None:
        assert all((x[ids < 0] == 0).all() for x in found), "padding has an output or a gradient"
        wrong = expected(q, k, v, np.maximum(ids, 0), cotangent(found[0]), case.scale)
        assert all(relative(a, b) > 1e-2 for a, b in zip(found, wrong, strict=True)), "a wrong mask would pass"


@pytest.mark.parametrize("mesh", [{}, dict(tensor=2, context=4)], ids=["one device", "eight"])
def test_values_as_keys_beside_one_rotary_key(mesh):
    case = Case(64, 4, 2, 16 + R, 16, True)
    q, k, v, ids = operands(case)
    k_rope = k[:, :, 0, :R]
    with on(**mesh):
        found = differentiated(
            lambda q, v, k_rope: training_attention(q, None, v, k_rope=k_rope, segment_ids=ids, scale=case.scale),
            q, v, k_rope,
        )  # fmt: skip
    whole = joined(v, k_rope)
    y, dq, dk, dv = expected(q, whole, v, ids, cotangent(found[0]), case.scale)
    truth = y, dq, dv + dk[..., :16], dk[..., 16:].sum(2)
    assert all(relative(a, b) < 4e-6 for a, b in zip(found, truth, strict=True))


def test_only_what_keys_are_read_from_is_gathered():
    """Keys and values of H heads from a latent of width c, weights by heads: MLA."""
    q, *_, ids = operands(Case(32, 4, 4, 8, 8, True))
    z = jnp.asarray(np.random.default_rng(3).normal(size=(2, 32, 12)), jnp.float32)
    maps = tuple(jnp.asarray(np.random.default_rng(i).normal(size=(12, 4, 8)), jnp.float32) for i in range(2))
    read = lambda z, *maps: tuple(jnp.einsum("BTc,cHn->BTHn", z, m) for m in maps)
    attend = functools.partial(attention_from, read=read, segment_ids=ids, scale=0.3)
    call = lambda q, z, *maps: attend(q, (z,), maps=maps)
    with on(tensor=2, context=2):
        found = differentiated(call, q, z, *maps)
        text = jax.jit(call).lower(q, z, *maps).as_text()
    for a, b in zip(found, differentiated(call, q, z, *maps), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    gathered = [line for line in text.splitlines() if "all_gather" in line]
    assert len(gathered) == 1 and "tensor<2x32x12xf32>" in gathered[0]


def test_each_pass_gathers_once_and_attends_once(how):
    """Also in a layer that keeps nothing but attention's result."""
    q, k, v, ids = operands(Case(256, 4, 2, 24, 16, True))
    attend = functools.partial(training_attention, segment_ids=ids, scale=0.3, **how)
    loss = lambda q, k, v: jnp.sin(attend(jnp.cos(q), jnp.cos(k), jnp.cos(v))).sum()
    kept = jax.checkpoint_policies.save_only_these_names(KEPT)
    with on(context=2):
        traced = [
            str(jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(q, k, v)) for f in (loss, jax.checkpoint(loss, policy=kept))
        ]
        again = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(q, k, v))
    attention = "pallas_call" if how["implementation"] == "splash" else "= cond["
    for text in traced:
        assert text.count("= all_gather[") == 4 and text.count("= reduce_scatter[") == 2  # keys, values
        assert text.count(attention) == traced[0].count(attention) < again.count(attention)


# ---- which implementation --------------------------------------------------------------------------------------------


def test_kernels_that_cannot_take_a_stretch_are_passed_over():
    with meant_for("tpu", data=2, context=2):
        assert choice(T=512) == ("splash", {})
        told = "a device has 192 of the sequence's 384 positions: must be a multiple of 128"
        assert choice(T=384) == ("chunked", {"splash": told})
        q, k, v, _ = operands(Case(384, 4, 2, 24, 16, False), BF16)
        with pytest.raises(ConfigError, match=f"'splash': {told}"):
            training_attention(q, k, v, scale=1.0, implementation="splash")
    with meant_for("gpu", context=2):
        name, passed_over = choice(T=512)
        assert name == "chunked"
        assert "a device has 256 of 512 queries" in passed_over["cudnn"]


def test_sequences_that_do_not_divide_are_left_to_xla():
    case = Case(30, 4, 2, 16, 16, True)
    q, k, v, ids = operands(case)
    with on(context=4):
        y = training_attention(q, k, v, segment_ids=ids, scale=case.scale)
    assert relative(y, expected(q, k, v, ids, y, case.scale)[0]) < 4e-6


def test_causal_blocks_are_told_by_their_corners():
    mask = splash._CausalMask((512, 512))
    for rows in range(0, 512, 128):
        for columns in range(0, 512, 128):
            at = slice(rows, rows + 128), slice(columns, columns + 128)
            np.testing.assert_array_equal(mask[at], splash.splash.CausalMask((512, 512))[at])
    odd = slice(127, 130), slice(126, 129)
    np.testing.assert_array_equal(mask[odd], splash.splash.CausalMask((512, 512))[odd])
