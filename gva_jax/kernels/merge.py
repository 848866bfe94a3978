"""Partial attention results over disjoint tokens, merged exactly by their log-sum-exp."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    a: tuple[Float[Array, "B T H d"], Float[Array, "B T H"]], b: tuple[Float[Array, "B T H d"], Float[Array, "B T H"]]
) -> tuple[Float[Array, "B T H d"], Float[Array, "B T H"]]:
    """(out, lse) over the union of two disjoint token sets, from each set's (out, lse). lse = -inf is an empty set."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    m = jnp.maximum(lse_a, lse_b)
    m = jnp.where(jnp.isfinite(m), m, 0)
    weight_a, weight_b = jnp.exp(lse_a - m), jnp.exp(lse_b - m)
    total = weight_a + weight_b
    share = lambda w: (w / jnp.where(total == 0, 1, total))[..., None]
    return out_a * share(weight_a) + out_b * share(weight_b), jnp.log(total) + m
