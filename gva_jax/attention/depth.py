"""Depth-Attention: a layer's values are mixed, token by token, with those of earlier layers, before attention.

    v_l <- sum_j w_j v_j,    w = softmax_j(mean over the group's heads of q_l·k_j / sqrt(d))

j runs over the selected earlier layers and l itself, all at the same token; no parameters. The mixed values are what is
cached and aggregated, so decoding needs nothing more: a step has all layers of its tokens at hand. k_j and v_j are
those of layer j before its own mixing (values after their transform, keys after RoPE, which cancels at one position);
keys that are read from values are, for these scores, read from the unmixed ones.

Families know a function `mix(q, keys, v) -> v` only, which `DepthMixer` makes for one layer.

Letters: B batch, T tokens, H query heads, G groups, K heads of keys (G or H), d head width, w width of a value.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gva_jax.compat import wide_dtype

# Queries (B T H d), keys as a function without arguments (made only where they are needed), values (B T G w) -> values.
Mix = Callable[[Array, Callable[[], Array], Array], Array]
Own = tuple[Array, Array]  # a layer's keys (B T K d) and values (B T G w), unmixed


def unmixed(q, keys, v):
    """The `mix` of a model without Depth-Attention."""
    return v


class DepthMixer:
    """The `mix` of one layer; afterwards `own` holds what later layers may need of it."""

    def __init__(self, earlier: tuple[Own, ...]):
        self.earlier, self.own = earlier, None

    def __call__(self, q, keys, v):
        self.own = (keys(), v)
        return mixed(q, (*self.earlier, self.own))


def mixed(q: Float[Array, "B T H d"], layers: tuple[Own, ...]) -> Float[Array, "B T G w"]:
    """The values of `layers`, weighted by how well this layer's queries meet their keys. The last is the layer itself.

    The softmax is float32 (float64 for float64 inputs).
    """
    if len(layers) == 1:
        return layers[0][1]
    values = [v for _, v in layers]
    (B, T, H, d), G, wide = q.shape, values[0].shape[2], wide_dtype(q.dtype)

    def score(k: Float[Array, "B T K d"]) -> Float[Array, "B T G"]:
        per_head = (q.astype(wide) * jnp.repeat(k.astype(wide), H // k.shape[2], axis=2)).sum(-1)
        return per_head.reshape(B, T, G, H // G).mean(-1) * d**-0.5

    weights = jax.nn.softmax(jnp.stack([score(k) for k, _ in layers]), axis=0)
    return sum(w[..., None] * v.astype(wide) for w, v in zip(weights, values, strict=True)).astype(values[-1].dtype)
