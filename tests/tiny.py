"""A model of toy size for tests, and weights under which every part of it matters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gva_jax.config import AttentionConfig, ModelConfig
from gva_jax.model import Transformer

VOCAB = 61
ATTENTION = {
    "gva": AttentionConfig("gva", 4, 2, 8, rope_dim=4, q_norm=True, key_init="scale_matched"),
    "gqa": AttentionConfig("gqa", 4, 2, 8),
    "mla": AttentionConfig("mla", 4, head_dim=8, latent_dim=12, rope_dim=4),
}
F64 = {"dtype": "float64", "param_dtype": "float64"}


def replaced(family, **kw):
    """An attention config of toy size with other fields."""
    return dataclasses.replace(ATTENTION[family], **kw)


def make(family="gva", **kw):
    return Transformer(ModelConfig(**{"vocab_size": VOCAB, "num_layers": 2, "model_dim": 16, "hidden_dim": 24,
                                      "attention": ATTENTION[family], **kw}))  # fmt: skip


def weights(model, gain=1.0):
    """Variables at a scale where every part matters, drawn in NumPy: nothing to compile."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))

    def draw(path, leaf):
        scale = "norm" in jax.tree_util.keystr(path)
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(1 + 0.3 * noise if scale else noise * gain * leaf.shape[-2] ** -0.5, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def ids(B=2, T=10, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (B, T)), jnp.int32)


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())
