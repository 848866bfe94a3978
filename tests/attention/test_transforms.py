"""What each transform computes, its constants, its gradients, and the scale it starts at."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from test_init import ratios, unit  # noqa: F401  (a fixture)
from variants import inputs, relative, weights

from gva_jax.attention import GroupedValueAttention, KeyIsValueAttention, LatentAttention, MultiHeadAttention, outputs
from gva_jax.attention.outputs import OUTPUT_TRANSFORMS
from gva_jax.attention.values import VALUE_TRANSFORMS, gaussian_moments, measure
from gva_jax.config import AttentionConfig, ModelConfig
from gva_jax.model import Transformer, measure_value_moments

F64 = {"dtype": jnp.dtype("float64"), "param_dtype": jnp.dtype("float64")}
B, T, D, G, d = 2, 5, 12, 3, 6

sigmoid = lambda x: 1 / (1 + np.exp(-x))
silu = lambda x: x * sigmoid(x)


def by_quadrature(f, sigma):
    """E f(sigma z) as a Riemann sum, which for such functions is exact to rounding."""
    z = np.linspace(-12, 12, 4001)
    return (f(sigma * z) * np.exp(-(z**2) / 2)).sum() * (z[1] - z[0]) / math.sqrt(2 * math.pi)


# ---- values ----------------------------------------------------------------------------------------------------------


def expected_value(name, x, v, P):
    """The design's formulas in NumPy; `P` are the transform's parameters."""
    sigma = 0.02 * math.sqrt(x.shape[-1])
    mean = by_quadrature(silu, sigma)
    deviation = math.sqrt(by_quadrature(lambda u: silu(u) ** 2, sigma) - mean**2)
    gate = x @ P["gate"]["kernel"] if "gate" in P else None
    return {
        "none": lambda: v,
        "silu": lambda: silu(v),
        "tanh_gate": lambda: v * np.tanh(v),
        "affine_match": lambda: v * deviation / sigma + mean,
        "matched_silu": lambda: (silu(v) - mean) / deviation * sigma,
        "headwise_g2": lambda: v * sigmoid(gate)[..., None],
        "full_glu": lambda: silu(v) * gate.reshape(v.shape),
        "reduced_glu": lambda: silu(v) * gate.reshape(v.shape),
        "state_gate": lambda: np.stack(
            [v[:, :, g] * sigmoid(v[:, :, g] @ P["kernel"][:, g, None] + P["bias"][g]) for g in range(G)], axis=2
        ),
    }[name]()


@pytest.mark.parametrize("name", VALUE_TRANSFORMS)
def test_each_value_transform_is_its_formula(name):
    with jax.enable_x64(True):
        transform = VALUE_TRANSFORMS[name](**F64)
        width = transform.width(d)
        assert width == (4 if name == "reduced_glu" else d)
        x, v = inputs(B, T, D), inputs(B, T, G, width, seed=2)
        shapes = jax.eval_shape(transform.init, jax.random.key(0), x, v)
        variables = jax.tree.map(lambda leaf: inputs(*leaf.shape, seed=3), shapes)
        found = transform.apply(variables, x, v)
    P = jax.tree.map(np.asarray, variables.get("params", {}))
    assert relative(found, expected_value(name, np.asarray(x), np.asarray(v), P)) < 1e-12


@pytest.mark.parametrize(("d", "width"), [(64, 43), (32, 21), (128, 85), (2, 1)])
def test_the_reduced_width_is_two_thirds_rounded(d, width):
    assert VALUE_TRANSFORMS["reduced_glu"].width(d) == width


@pytest.mark.parametrize("sigma", [0.02, 0.226, 0.64, 3.0])
def test_the_fixed_constants_are_a_gaussians_moments(sigma):
    mean = by_quadrature(silu, sigma)
    variance = by_quadrature(lambda u: silu(u) ** 2, sigma) - mean**2
    assert gaussian_moments(sigma) == pytest.approx((0, sigma, mean, math.sqrt(variance)), rel=1e-9)


@pytest.mark.parametrize("given", [False, True])
def test_affine_and_matched_silu_trade_moments(given):
    """On values that are not Gaussian only measured constants match them."""
    rng = np.random.default_rng(0)
    D = 400
    v = rng.normal(size=(1, 1000, 10, 20)) * 0.02 * math.sqrt(D)
    v = jnp.asarray(v + 0.3 * (v > 0.2) if given else v, jnp.float32)
    moments = tuple(np.asarray(measure(v), float).tolist())
    x = jnp.zeros((1, 1000, D))
    make = lambda name: VALUE_TRANSFORMS[name](moments=moments if given else None).apply({}, x, v)
    exact = 1e-5 if given else 0.02
    for name, wanted in (("affine_match", moments[2:]), ("matched_silu", moments[:2])):
        found = make(name)
        assert float(found.mean()) == pytest.approx(wanted[0], abs=exact * wanted[1])
        assert float(found.std()) == pytest.approx(wanted[1], rel=exact)


def test_the_moments_of_a_model_are_those_of_its_layers():
    attention = AttentionConfig("gqa", 4, 2, 16, value_transform="affine_match")
    model = Transformer(ModelConfig(50, 2, 64, 64, attention))
    tokens = jnp.arange(96).reshape(2, 48) % 50
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    moments = measure_value_moments(model, variables, tokens)
    assert moments == pytest.approx(gaussian_moments(0.02 * 8), rel=0.1, abs=0.02)
    attention = dataclasses.replace(attention, value_moments=moments)
    assert Transformer(dataclasses.replace(model.config, attention=attention)).config.attention == attention


@pytest.mark.parametrize("name", [name for name in VALUE_TRANSFORMS if name != "none"])
def test_the_expected_rms_of_a_transformed_value(name):
    """What the scale-matched key map divides by, against a draw of the transform's own initialisation."""
    D, d, N = 900, 48, 400
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, N, D))
    x = jnp.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True)), jnp.float32)
    transform = VALUE_TRANSFORMS[name]()
    v = (x @ jnp.asarray(rng.normal(size=(D, 4 * d)) * 0.02, jnp.float32)).reshape(1, N, 4, d)
    y, _ = transform.init_with_output(jax.random.key(0), x, v)
    assert float(jnp.sqrt(jnp.mean(y**2))) == pytest.approx(transform.rms(0.02 * math.sqrt(D), d), rel=0.03)


@pytest.mark.parametrize(
    ("value", "query", "q_norm"), [("silu", "none", True), ("reduced_glu", "silu", False), ("state_gate", "none", True)]
)
def test_scale_matched_keys_of_transformed_values_start_at_the_queries_rms(value, query, q_norm, unit):  # noqa: F811
    module = GroupedValueAttention(
        8, 2, 64, rope_dim=24, q_norm=q_norm, value_transform=value, query_transform=query
    )
    for ratio in ratios(module, unit(512)):
        assert ratio == pytest.approx(1, abs=0.04)


def test_calibrate_measures_the_transformed_value(unit):  # noqa: F811
    module = GroupedValueAttention(4, 2, 16, rope_dim=4, value_transform="silu", key_init="default")
    x = 3 * unit(32)
    calibrated = module.calibrate(module.init(jax.random.key(0), x[:, :2]), x)
    assert ratios(module, x, calibrated) == pytest.approx((1, 1), abs=1e-5)


# ---- gradients -------------------------------------------------------------------------------------------------------

OUTPUTS = list(OUTPUT_TRANSFORMS)
CASES = [("gva", dict(value_transform=v, output_transform=OUTPUTS[i % 4])) for i, v in enumerate(VALUE_TRANSFORMS)]
CASES += [
    ("gqa", dict.fromkeys(("query_transform", "key_transform", "value_transform"), "silu")),
    ("mla", dict(output_transform="xsa", query_transform="silu")),
    ("kv", dict(output_transform="xsa")),
]
MODULES = {
    "gva": lambda **kw: GroupedValueAttention(4, 2, 8, rope_dim=4, **kw),
    "gqa": lambda **kw: MultiHeadAttention(4, 2, 8, **kw),
    "mla": lambda **kw: LatentAttention(4, 8, latent_dim=12, rope_dim=4, **kw),
    "kv": lambda **kw: KeyIsValueAttention(4, 2, 8, **kw),
}


@pytest.mark.parametrize(("family", "fields"), thinned(CASES, 2), ids=str)
def test_gradients_are_finite_and_the_future_has_none(family, fields):
    with jax.enable_x64(True):
        module = MODULES[family](**fields, **F64)
        variables, x = weights(module, 16), inputs(2, 7, 16)
        segments = jnp.array([[0, 0, 0, 0, 1, 1, -1]] * 2)

        @jax.jit
        def run(variables, x):
            y, pull = jax.vjp(lambda v, x: module.apply(v, x, segment_ids=segments), variables, x)
            at = lambda t: pull(jnp.zeros_like(y).at[:, t].set(1.0))
            return y, at(2)[1], at(5)[1], at(0), pull(jnp.ones_like(y))[0]

        y, early, late, first, everything = jax.device_get(run(variables, x))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((first, everything)))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(everything)), "a parameter without a gradient"
    assert np.abs(early[:, :3]).min() > 0 and (early[:, 3:] == 0).all(), "a position sees its future"
    assert np.abs(late[:, 4:6]).min() > 0 and (late[:, :4] == 0).all() and (late[:, 6:] == 0).all()
    assert (y[:, 6] == 0).all(), "padding sees something"
    if fields.get("output_transform") == "xsa":  # the first token of each document sees itself only
        assert (y[:, [0, 4]] == 0).all()
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(first))


# ---- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTPUT_TRANSFORMS)
def test_each_output_transform_is_its_formula(name):
    H = 2 * G
    with jax.enable_x64(True):
        transform = OUTPUT_TRANSFORMS[name](**F64)
        x, y, v = inputs(B, T, D), inputs(B, T, H, d, seed=2), inputs(B, T, G, d, seed=4)
        v = v.at[0, 1, 1].set(0.0)  # a value that is nothing: nothing to take out
        first = jnp.zeros((B, T), bool).at[1, 2].set(True)
        shapes = jax.eval_shape(transform.init, jax.random.key(0), x, y, v, first)
        variables = jax.tree.map(lambda leaf: inputs(*leaf.shape, seed=3), shapes)
        found = transform.apply(variables, x, y, v, first)
    x, y, v = map(np.asarray, (x, y, v))
    kernel = np.asarray(variables["params"]["gate"]["kernel"]) if variables else None
    if name == "xsa":
        own = np.repeat(v, 2, axis=2)
        length = np.linalg.norm(own, axis=-1, keepdims=True)
        own = own / np.where(length > 0, length, 1)
        truth = y - (y * own).sum(-1, keepdims=True) * own
        truth[1, 2] = 0
    else:
        truth = {
            "none": lambda: y,
            "headwise_g1": lambda: y * sigmoid(x @ kernel)[..., None],
            "elementwise_g1": lambda: y * sigmoid(x @ kernel).reshape(y.shape),
        }[name]()
    assert relative(found, truth) < 1e-12


def test_the_first_token_of_each_segment_wherever_it_lies():
    ids = jnp.array([[3, 3, 1, 1, 3, 2, -1], [0, 0, 0, 0, 0, 0, 0]])
    first = outputs.first_tokens(jnp.zeros((2, 7, 4)), ids)
    assert first.tolist() == [[True, False, True, False, False, True, True], [True] + [False] * 6]
    assert outputs.first_tokens(jnp.zeros((2, 3, 4)), None).tolist() == [[True, False, False]] * 2


@pytest.mark.parametrize(("family", "cached"), [("gva", "int8"), ("mla", "bfloat16")])
def test_the_first_token_of_xsa_is_exactly_0_in_bfloat16_and_behind_a_rounded_cache(family, cached):
    """There rounding alone would leave some hundredths of a value."""
    module = MODULES[family](output_transform="xsa", dtype=jnp.dtype("bfloat16"))
    variables, x = weights(module, 16), inputs(2, 3, 16, dtype=np.float32)
    cache = module.init_cache(2, 128, jnp.dtype(cached), "tokens_major")

    @jax.jit
    def run(variables, x, cache):
        return module.apply(variables, x), module.apply(variables, x, cache, method="decode")[0]

    for y in jax.device_get(run(variables, x, cache)):
        assert (y[:, 0] == 0).all() and (y[:, 1:] != 0).any(axis=-1).all()
