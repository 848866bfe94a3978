"""Every attention variant at toy width, and weights under which attention is far from uniform."""

import jax
import jax.numpy as jnp
import numpy as np

from gva_jax.attention import (
    GroupedTiedAttention,
    GroupedValueAttention,
    KeyIsValueAttention,
    LatentAttention,
    MultiHeadAttention,
)

D = 24  # model width


def _gva(rope_dim, num_kv_heads=2, **kw):
    return lambda **dtypes: GroupedValueAttention(4, num_kv_heads, 32, rope_dim=rope_dim, **kw, **dtypes)


def _heads(num_kv_heads, **kw):
    return lambda **dtypes: MultiHeadAttention(num_heads=4, num_kv_heads=num_kv_heads, head_dim=8, **kw, **dtypes)


def _latent(rope_dim, **kw):
    return lambda **dtypes: LatentAttention(num_heads=3, head_dim=8, latent_dim=12, rope_dim=rope_dim, **kw, **dtypes)


def _tied(family, **kw):
    return lambda **dtypes: family(num_heads=4, num_kv_heads=2, head_dim=8, **kw, **dtypes)


VARIANTS = {
    "mha": _heads(None),
    "gqa": _heads(2),
    "mqa": _heads(1),
    "gqa_norms": _heads(2, q_norm=True, k_norm=True),
    "mla": _latent(4),
    "mla_keyless": _latent(0, q_norm=True),
    "gva_16": _gva(16),
    "gva_24": _gva(24, 1, q_norm=False, key_init="default"),
    "gva_keyless": _gva(0, q_norm=False),
    "gva_keyless_norm": _gva(0),
    "gva_full": _gva(None, None, q_norm=False, key_init="default"),
    "gva_full_norm": _gva(None),
    "kv_2": _tied(KeyIsValueAttention, rope_dim=2, q_norm=True),
    "kv_keyless": _tied(KeyIsValueAttention, rope_dim=0),
    "kv_full": _tied(KeyIsValueAttention),
    "gta": _tied(GroupedTiedAttention),
}


def weights(module, width: int = D, gain: float = 1.3, seed: int = 0):
    """Variables of `module` with every map's outputs at about `gain` times its inputs' RMS, norms' scales near 1.

    At the usual std of 0.02 attention at toy width is uniform, and a wrong mask or position would hardly show.
    """
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2, width)))

    def draw(leaf):
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(1 + 0.3 * noise if leaf.ndim == 1 else noise * gain * leaf.shape[0] ** -0.5, leaf.dtype)

    return jax.tree.map(draw, shapes)


def inputs(*shape, dtype=np.float64, seed: int = 1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def relative(a, b) -> float:
    """Largest difference over the largest entry of `b`, the truth."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(b).max())
