"""What several ways of computing training attention share."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PADDING = -1  # a segment id; see `gva_jax.attention.dispatch.training_attention`
KEPT = "attention_result"  # `checkpoint_name` of outputs and log-sums: what a backward pass should not make again


class Shard(NamedTuple):
    """Which stretch of the sequence the queries are: the `index`-th of `count` equal ones, `index` a traced scalar."""

    index: Int[Array, ""]
    count: int

    def own(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """The stretch of `x`, whose `axis` is of the whole sequence."""
        size = x.shape[axis] // self.count
        return jax.lax.dynamic_slice_in_dim(x, self.index * size, size, axis)


def pad(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """`x` with `value` behind the end of `axis`, up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def pad_tokens(size: int, q, k, v, segment_ids):
    """All with `size` positions. New ones come last, so that no causal query sees them; their outputs are cut off."""
    ids = None if segment_ids is None else pad(segment_ids, 1, size, PADDING)
    return *(pad(x, 1, size) for x in (q, k, v)), ids


def without_padding(y: Float[Array, "B T H dv"], segment_ids: Int[Array, "B T"] | None) -> Float[Array, "B T H dv"]:
    """Output 0 where the segment id is negative.

    Kernels that compare ids let padding see padding of the same id. This cuts it off: what follows sees 0, and no
    gradient enters a row of padding, so none leaves it.
    """
    return y if segment_ids is None else jnp.where((segment_ids >= 0)[..., None, None], y, 0)


def same_segment(segment_ids: Int[Array, "B T"]) -> jax.Array:
    """(B, 1, T, T), true where query and key are of one segment; padding sees padding, so that no row is empty."""
    return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


def split_sequence(q, k) -> str | None:
    """What a kernel says that takes queries from position 0 on only."""
    T, S = q.shape[1], k.shape[1]
    if T == S:
        return None
    return f"the mesh splits the sequence: a device has {T} of {S} queries, the kernel does not take where they begin"


def tried(attention: Callable, q, k, v, segment_ids) -> str | None:
    """What the library behind `attention` says against tracing it and its gradient on such operands, None if nothing.

    Libraries check what they can run (device, version, dtype, widths) when they are traced, each release differently.
    """
    shapes = (None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, segment_ids))
    return _tried(attention, *shapes)


@functools.cache
def _tried(attention, q, k, v, segment_ids):
    def both(q, k, v, segment_ids):
        y, pull = jax.vjp(lambda *a: attention(*a, segment_ids, 1.0), q, k, v)
        return pull(y)

    try:
        jax.eval_shape(both, q, k, v, segment_ids)
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None
