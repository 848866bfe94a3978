"""Depth-Attention: the formula, decoding with the mixed value in the cache, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from tiny import ids, relative, weights
from variants import inputs

from gva_jax.attention.depth import DepthMixer, mixed
from gva_jax.config import AttentionConfig, ConfigError, ModelConfig
from gva_jax.model import Transformer, calibrate

F64 = {"dtype": "float64", "param_dtype": "float64"}


def test_values_are_weighted_by_how_queries_meet_keys_over_depth():
    B, T, H, G, d, w = 2, 3, 4, 2, 6, 5
    with jax.enable_x64(True):
        q = inputs(B, T, H, d)
        layers = [(inputs(B, T, K, d, seed=2 + K), inputs(B, T, G, w, seed=9 + K)) for K in (G, H, G)]
        found = mixed(q, tuple(layers))
    q, layers = np.asarray(q), [tuple(map(np.asarray, layer)) for layer in layers]
    for b, t, g in np.ndindex(B, T, G):
        heads = [2 * g, 2 * g + 1]
        key = lambda k, h, b=b, t=t, g=g: k[b, t, h] if k.shape[2] == H else k[b, t, g]
        s = np.array([np.mean([q[b, t, h] @ key(k, h) for h in heads]) / np.sqrt(d) for k, _ in layers])
        p = np.exp(s) / np.exp(s).sum()
        truth = sum(weight * v[b, t, g] for weight, (_, v) in zip(p, layers, strict=True))
        assert relative(found[b, t, g], truth) < 1e-12


def test_a_layer_with_nothing_before_it_keeps_its_values():
    mixer, v = DepthMixer(()), jnp.ones((1, 2, 3, 4))
    assert mixer(jnp.ones((1, 2, 3, 4)), lambda: v, v) is v and mixer.own == (v, v)


KINDS = {
    "gqa": AttentionConfig("gqa", 4, 2, 8, value_transform="silu", output_transform="xsa"),
    "gva": AttentionConfig("gva", 4, 2, 8, rope_dim=4, q_norm=True, key_init="scale_matched"),
    "gva_full": AttentionConfig("gva", 4, 2, 8, value_transform="silu"),
    "gta": AttentionConfig("gta", 4, 2, 8),
}


def model(kind, sources=(0, 1), **kw):
    """Three layers; each compiles anew, so most tests take two."""
    return Transformer(
        ModelConfig(61, model_dim=16, hidden_dim=24, attention=KINDS[kind], depth_sources=sources,
                    **{"num_layers": 3, "scan_layers": False, **kw})
    )


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_prefill_and_decode_equal_the_forward(kind):
    with jax.enable_x64(True):
        sizes = {} if kind == "gva" else dict(sources=(0,), num_layers=2)
        deep = model(kind, **sizes, **F64).clone(implementation="reference")
        variables, tokens = weights(deep), ids(T=7)

        @jax.jit
        def run(variables):
            caches = deep.init_cache(2, 128, layout="tokens_major")
            prompt, caches = deep.apply(variables, tokens[:, :5], caches, lengths=jnp.array([5, 3]), method="prefill")
            rest = jnp.stack([tokens[0, 5:7], tokens[1, 3:5]])
            step, _ = deep.apply(variables, rest, caches, method="decode")
            return deep.apply(variables, tokens), prompt, step

        full, prompt, step = jax.device_get(run(variables))
    assert relative(prompt[0], full[0, :5]) < 1e-12 and relative(prompt[1, :3], full[1, :3]) < 1e-12
    assert relative(step[0], full[0, 5:]) < 1e-12 and relative(step[1], full[1, 3:5]) < 1e-12


def test_gradients_are_finite_reach_all_and_not_the_future_with_rematerialised_layers():
    with jax.enable_x64(True):
        # The layers' own keys and values leave a rematerialised layer too.
        deep, same = (model("gva", sources=(0,), remat=remat, num_layers=2, **F64) for remat in ("full", "none"))
        variables, tokens = weights(deep), ids(T=6)

        @jax.jit
        def run(variables, other):
            loss = lambda m: lambda v: m.apply(v, tokens)[:, 3].sum()
            early = lambda tokens: deep.apply(variables, tokens)[:, :4]
            return jax.grad(loss(deep))(variables), jax.grad(loss(same))(variables), early(tokens), early(other)

        found, truth, a, b = jax.device_get(run(variables, tokens.at[:, 4:].set(7)))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert np.isfinite(mine).all() and np.abs(mine).max() > 0 and relative(mine, theirs) < 1e-12
    assert (a == b).all(), "a position sees its future"


def test_mixing_changes_what_the_last_layer_gives():
    mixing, plain = (model("gqa", sources, num_layers=2) for sources in ((0,), ()))
    variables, tokens = weights(mixing), ids(T=4)
    run = jax.jit(lambda v: (mixing.apply(v, tokens), plain.apply(v, tokens)))
    assert relative(*run(variables)) > 1e-3


def test_calibrate_hands_on_what_layers_need():
    deep, tokens = model("gva"), ids()
    variables = weights(deep)
    found = jax.eval_shape(lambda v: calibrate(deep, v, tokens), variables)
    assert jax.tree.structure(found) == jax.tree.structure(variables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(depth_sources=(3,)), "model.depth_sources = (3,): must be layers in rising order, 0 to 2"),
        (dict(depth_sources=(1, 0)), "model.depth_sources = (1, 0): must be layers in rising order"),
        (dict(depth_sources=(-1,)), "model.depth_sources = (-1,): must be layers in rising order"),
        (dict(depth_sources=(0,), scan_layers=True), "model.depth_sources = (0,): a scan would save"),
        (
            dict(depth_sources=(0,), attention=AttentionConfig("mla", 4, latent_dim=8, rope_dim=4)),
            "model.depth_sources = (0,): MLA makes its values",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(change, message):
    with pytest.raises(ConfigError) as error:
        ModelConfig(**{**dict(num_layers=4, scan_layers=False), **change})
    assert str(error.value).startswith(message)
