"""Scale-matched initialisation: keys start at the queries' RMS, in each slice; the default misses by the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned

from gva_jax.attention import GroupedValueAttention
from gva_jax.attention.gva import reconstruct
from gva_jax.config import AttentionConfig, ConfigError, ModelConfig
from gva_jax.model import Transformer, calibrate, unstack

N = 512  # tokens that are measured

# Standard error of the measured ratio of RMS, for inputs of RMS exactly 1 in every token. A mean square is a quadratic
# form `sum_j w_j' C w_j / columns` in the Gaussian columns w_j of a map, with C the second moment of what the map
# reads. One column has mean tr(C) and variance 2 tr(C^2); C over N tokens of `fan_in` independent features has
# tr(C^2) / tr(C)^2 = 1 / fan_in + 1 / N. So its relative variance is
spread = lambda fan_in, columns: 2 * (1 / fan_in + 1 / N) / columns
# and an RMS has half the relative error of its square. With Q-norm a slice's share of its head fluctuates less.


def standard_errors(D, H, G, d, r):
    """Of content keys over content queries, and of the rotary key over rotary queries."""
    n = d - (r or 0)
    content = spread(d, H * n) + spread(D, G * d) + spread(D, H * n)
    rotary = spread(D, r) + spread(D, H * r) if r else 0.0
    return content**0.5 / 2, rotary**0.5 / 2


@pytest.fixture(scope="module")
def unit():
    """Inputs (1, N, D) of RMS 1 in every token."""

    def make(D, seed=0):
        x = np.random.default_rng(seed).normal(size=(1, N, D))
        return jnp.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True)), jnp.float32)

    return make


def ratios(module, x, variables=None):
    """RMS of keys over that of queries, content slice and rotary slice (None without one), pooled over heads."""

    def projections(self):
        q, q_rope, v, k_rope = self._project(x, jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))
        return q, reconstruct(v, self._key_map(x.shape[-1])), q_rope, k_rope

    @jax.jit
    def measure(variables):
        variables = module.init(jax.random.key(3), x[:, :2]) if variables is None else variables
        q, k, q_rope, k_rope = module.apply(variables, method=projections)
        rms = lambda a: jnp.sqrt(jnp.mean(jnp.square(a)))
        return rms(k) / rms(q), None if q_rope is None else rms(k_rope) / rms(q_rope)

    return measure(variables)


WIDE = (512, 8, 2, 64)  # D, H, G, d
CASES = [((*WIDE, r), q_norm) for r in (None, 0, 24) for q_norm in (False, True)]
CASES += [((1024, 16, 4, 64, 16), q_norm) for q_norm in (False, True)]  # the 350M shape
CASES += [((64, 4, 2, 16, 4), False), ((96, 6, 1, 32, None), True)]


@pytest.mark.parametrize(("shape", "q_norm"), thinned(CASES, 2), ids=str)
def test_scale_matched_keys_start_at_the_queries_rms(shape, q_norm, unit):
    D, H, G, d, r = shape
    module = GroupedValueAttention(H, G, d, rope_dim=r, q_norm=q_norm)
    for ratio, error in zip(ratios(module, unit(D)), standard_errors(*shape), strict=True):
        if ratio is not None:
            assert ratio == pytest.approx(1, abs=0.02 if D >= 512 else 4 * error)


@pytest.mark.parametrize(("q_norm", "factor"), [(False, 6.25), (True, 9.765625)])
def test_the_default_misses_by_the_formulas_factor(q_norm, factor, unit):
    assert factor == pytest.approx(1 / (0.02 * 64**0.5 * (0.02 * 1024**0.5 if q_norm else 1)))
    module = GroupedValueAttention(16, 4, 64, rope_dim=16, q_norm=q_norm, key_init="default")
    content, rotary = ratios(module, unit(1024))
    assert 1 / content == pytest.approx(factor, rel=0.02)
    assert 1 / rotary == pytest.approx(1 / (0.02 * 1024**0.5) if q_norm else 1, rel=0.02)


# ---- measured instead of assumed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("r", "q_norm", "key_init"), [(4, True, "default"), (None, False, "scale_matched")])
def test_calibrate_hits_the_measured_rms(r, q_norm, key_init, unit):
    module = GroupedValueAttention(4, 2, 16, rope_dim=r, q_norm=q_norm, key_init=key_init)
    x = 3 * unit(32) * jnp.linspace(0.1, 2, 32)  # neither of RMS 1 nor equal in all directions
    variables = jax.jit(module.init)(jax.random.key(0), x[:, :2])
    assert abs(ratios(module, x, variables)[0] - 1) > 0.01
    calibrated = jax.jit(module.calibrate)(variables, x)
    for ratio in ratios(module, x, calibrated):
        assert ratio is None or ratio == pytest.approx(1, abs=1e-5)
    for part, old in variables["params"].items():
        same = jax.tree.map(lambda a, b: bool((a == b).all()), old, calibrated["params"][part])
        assert all(jax.tree.leaves(same)) == (part not in ("key_map", "rope_key"))


def test_calibrate_of_a_model_hits_what_each_layer_sees():
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope_dim=4, q_norm=True)
    config = ModelConfig(50, 2, 32, 64, attention)
    model, tokens = Transformer(config), jnp.arange(48).reshape(2, 24)
    calibrated = jax.jit(lambda key: calibrate(model, model.init(key, tokens), tokens))(jax.random.key(0))
    assert calibrated["params"]["layers"]["attention"]["key_map"].shape == (2, 8, 16)
    model, calibrated = unstack(model, calibrated)
    inputs = lambda variables: model.apply(
        variables, tokens, capture_intermediates=lambda module, _: module.name == "attention_norm"
    )[1]["intermediates"]
    seen = jax.jit(inputs)(calibrated)
    attend = GroupedValueAttention(4, 2, 8, rope_dim=4, key_init="default")
    for layer in ("layers_0", "layers_1"):
        x = seen[layer]["attention_norm"]["__call__"][0]
        for ratio in ratios(attend, x, {"params": calibrated["params"][layer]["attention"]}):
            assert ratio == pytest.approx(1, abs=1e-5)


def test_calibrate_refuses_a_family_without_a_key_map():
    attention = AttentionConfig("mla", num_heads=2, head_dim=8, rope_dim=4, latent_dim=8)
    model = Transformer(ModelConfig(50, 1, 16, 16, attention))
    with pytest.raises(ConfigError, match=r"attention\.family = 'mla': has no key map"):
        calibrate(model, {"params": {}}, jnp.zeros((1, 4), jnp.int32))
