"""The absorption identity: folding the key map into the query changes nothing, in scores, outputs and gradients."""

from unittest import mock

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from variants import inputs, weights

from gva_jax.attention import GroupedValueAttention
from gva_jax.attention.training import chunked

D, d, G, B, T = 16, 32, 2, 2, 6
F64, F32, BF16 = (jnp.dtype(t) for t in ("float64", "float32", "bfloat16"))
HEADS_PER_GROUP, ROPE_DIMS, Q_NORM = (1, 2, 3, 4, 8), (0, 16, 24), (False, True)
GRID = [(h, r, q_norm) for h in HEADS_PER_GROUP for r in ROPE_DIMS for q_norm in Q_NORM]


def tolerance(dtype) -> float:
    """What rounding allows, relative to the largest entry.

    A gradient through the scores rounds its operands about ten times (projection, norm, rotation, read-out, scores,
    weights, output, and back). Rounding errors are independent and grow with the square root of their number: of the
    roundings in `dtype`, and of the terms of the sums, which are kept in float32.
    """
    if dtype == F64:
        return 1e-12
    terms = D + d + d + T + 8 * G * d
    return terms**0.5 * float(jnp.finfo(F32).eps) + 10**0.5 * float(jnp.finfo(dtype).eps)


def measure(module, variables, x, into):
    """Scores of all pairs, outputs, and gradients w.r.t. every parameter and the input, as `module` computes them."""
    operands, attend = [], chunked.attention

    def spy(q, k, v, *args, **kw):
        operands.append((q, k, kw["scale"]))
        return attend(q, k, v, *args, **kw)

    def loss(variables, x):
        with mock.patch.object(chunked, "attention", spy):
            y = module.apply(variables, x)
        q, k, scale = operands.pop()
        q = q.reshape(B, T, k.shape[2], -1, q.shape[-1])
        scores = jnp.einsum("BTGhd,BSGd->BGhTS", q, k, preferred_element_type=jnp.promote_types(q.dtype, F32))
        return jnp.sum(y * into.astype(y.dtype)), (scores.reshape(B, -1, T, T) * scale, y)

    (scores, y), gradients = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, x)[::-1]
    return {"scores": scores, "outputs": y, "gradients": gradients[0]["params"], "input gradient": gradients[1]}


def make(heads_per_group, r, q_norm, dtype, form="absorbed", family=GroupedValueAttention):
    kw = dict(rope_dim=r, q_norm=q_norm, form=form, dtype=dtype, param_dtype=dtype)
    return family(heads_per_group * G, G, d, **kw)


def measure_both(heads_per_group, r, q_norm, dtypes):
    """{(dtype, form): what `measure` finds}, all on the same numbers, which every one of the dtypes can hold."""
    cases = [(dtype, form) for dtype in dtypes for form in ("absorbed", "materialised")]

    @jax.jit
    def run(*given):
        given = jax.tree.map(lambda a: a.astype(dtypes[-1]), given)
        cast = lambda dtype: jax.tree.map(lambda a: a.astype(dtype), given)
        return [measure(make(heads_per_group, r, q_norm, *case), *cast(case[0])) for case in cases]

    variables = weights(make(heads_per_group, r, q_norm, F64), D)
    results = jax.device_get(run(variables, inputs(B, T, D), inputs(B, T, D, seed=2)))
    return dict(zip(cases, results, strict=True))


def assert_close(found, truth, tolerance):
    """Each array within `tolerance` of the truth, relative to its largest entry."""
    size = jax.tree.map(lambda t: np.abs(np.asarray(t, np.float64)).max(), truth)
    unit = lambda tree: jax.tree.map(lambda a, s: np.asarray(a, np.float64) / s, tree, size)
    chex.assert_trees_all_close(unit(found), unit(truth), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("heads_per_group", "r", "q_norm"), thinned(GRID, 3))
def test_absorbed_equals_materialised(heads_per_group, r, q_norm):
    with jax.enable_x64(True):
        found = measure_both(heads_per_group, r, q_norm, (F64, F32, BF16))
    truth = found[F64, "materialised"]
    chex.assert_tree_all_finite(truth)
    assert set(truth["gradients"]) == {"query", "value", "key_map", "output"} | (
        {"query_norm"} if q_norm else set()
    ) | ({"rope_key"} if r else set())
    for (dtype, _), result in found.items():
        chex.assert_type(result["outputs"], dtype)
        assert_close(result, truth, tolerance(dtype))


# ---- the tolerances notice faults ------------------------------------------------------------------------------------


class WrongScale(GroupedValueAttention):
    """Scales by the width of the content instead of the width that was scored."""

    _scale = property(lambda self: self._content**-0.5)


class NoRope(GroupedValueAttention):
    """Forgets the rotary part of the scores."""

    @nn.compact
    def _project(self, x, positions):
        q_nope, q_rope, v, k_rope = super()._project(x, positions)
        return q_nope, 0 * q_rope, v, k_rope


class WrongHead(GroupedValueAttention):
    """Gives each head the key map of its neighbour."""

    @nn.compact
    def _key_map(self, D):
        return jnp.roll(super()._key_map(D), 1, axis=1)


@pytest.mark.parametrize("broken", [WrongScale, NoRope, WrongHead])
def test_a_broken_absorption_exceeds_every_tolerance(broken):
    def run(variables, x, dtype, family):
        cast = jax.tree.map(lambda a: a.astype(dtype), (variables, x))
        return make(2, 16, True, dtype, family=family).apply(*cast)

    with jax.enable_x64(True):
        variables, x = weights(make(2, 16, True, F64), D), inputs(B, T, D)
        for dtype in (F64, F32, BF16):
            both = lambda v, x, dtype=dtype: [run(v, x, dtype, f) for f in (GroupedValueAttention, broken)]
            right, wrong = jax.jit(both)(variables, x)
            with pytest.raises(AssertionError):
                assert_close(wrong, right, tolerance(dtype))


# ---- what cannot be absorbed -----------------------------------------------------------------------------------------


def test_full_rope_makes_one_key_per_head_whatever_the_form():
    seen, attend = [], chunked.attention

    def spy(q, k, v, *args, **kw):
        seen.append((k.shape, v.shape))
        return attend(q, k, v, *args, **kw)

    with jax.enable_x64(True), mock.patch.object(chunked, "attention", spy):
        variables, x = weights(make(2, None, True, F64), D), inputs(B, T, D)
        seen.clear()
        run = lambda v, x: [make(2, None, True, F64, form).apply(v, x) for form in ("absorbed", "materialised")]
        absorbed, materialised = jax.jit(run)(variables, x)
    assert seen == [((B, T, 2 * G, d),) * 2] * 2
    chex.assert_trees_all_equal(absorbed, materialised)
