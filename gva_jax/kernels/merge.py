"""Partial attention results over disjoint tokens, merged exactly by their log-sum-exp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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


def merge_splits(
    out: Float[Array, "n *rows d"], lse: Float[Array, "n *rows"]
) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows"]]:
    """(out, lse) over all of n disjoint token sets."""
    m = lse.max(axis=0)
    base = jnp.where(m == -jnp.inf, 0, m)
    weight = jnp.exp(lse - base)
    total = weight.sum(axis=0)
    some = total > 0
    total = jnp.where(some, total, 1)
    return (out * (weight / total)[..., None]).sum(axis=0), jnp.where(some, base + jnp.log(total), -jnp.inf)


def with_sinks(
    out: Float[Array, "B T H d"],
    lse: Float[Array, "B T H"],
    sinks: Float[Array, "H"],
    q_lengths: Int[Array, "B"] | None,
) -> tuple[Float[Array, "B T H d"], Float[Array, "B T H"]]:
    """With what takes weight, once, and gives no value; queries past `q_lengths` are not real and have no sink."""
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype))
    if q_lengths is not None:
        real = jnp.arange(lse.shape[1], dtype=jnp.int32) < q_lengths[:, None]
        total = jnp.where(real[..., None], total, -jnp.inf)
    return out * jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total))[..., None], total
