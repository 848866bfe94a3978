"""A number that tells whether what was read is what was written; files that Orbax reads back can have changed."""

import jax
import jax.numpy as jnp


@jax.jit
def fingerprint(tree) -> jax.Array:
    """32 bits of all bits of a tree's arrays and of their places, the same on every mesh and device. A uint32 scalar.

    Sums of whole numbers, so that their order does not matter; one changed bit always changes it.
    """
    leaves = jax.tree.leaves(tree)
    return sum((_weight(i) * _of_array(x) for i, x in enumerate(leaves)), jnp.zeros((), jnp.uint32))


def _of_array(x) -> jax.Array:
    bits = _bits(x)
    places = sum((_weight(d) * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, d) for d in range(bits.ndim)),
                 jnp.zeros((), jnp.uint32))  # fmt: skip
    return jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)


def _bits(x) -> jax.Array:
    """As uint32; what has eight bytes gets one more axis."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = x.dtype.itemsize
    if width >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}[width]).astype(jnp.uint32)


def _weight(i: int) -> jax.Array:
    """Odd numbers that have little to do with one another."""
    return jnp.uint32((0x9E3779B1 * (2 * i + 1)) & 0xFFFFFFFF)
