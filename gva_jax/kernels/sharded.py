"""Decode attention over a mesh: groups on one axis, the cached sequence on another, batches on the rest.

Each device attends to its own part of the cache; parts of the sequence are merged exactly by their log-sum-exp, so what
crosses the network is one output and one number per head, never the cache.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gva_jax.kernels.api import decode_attention
from gva_jax.kernels.merge import with_sinks


def sharded_decode_attention(
    q, values, *, mesh: Mesh, keys=None, q_rope=None, rope_keys=None, lengths, q_lengths=None, scale, sinks=None,
    value_scales=None, key_scales=None, page_table=None, layout="tokens_major", batch_axes=("data", "fsdp"),
    tensor_axis="tensor", context_axis="context", **options,
):  # fmt: skip
    """`decode_attention` by `shard_map` over `mesh`, arguments and results as there, global.

    Args:
      batch_axes: mesh axes that split the batch (without pages; the pages of a page table are on every one of them).
      tensor_axis: splits query heads and groups. With one group (MQA, MLA) heads are split, the cache is replicated.
        Rotary keys are replicated over it.
      context_axis: splits the cached tokens into contiguous stretches of S.
      options: window, softcap, implementation, interpret.

    Raises:
      ValueError: heads, groups, batch or tokens that the mesh does not divide; pages together with a split sequence.
    """
    sizes = dict(mesh.shape)
    batch_axes = tuple(axis for axis in batch_axes if axis in sizes)
    batch_ways = math.prod(sizes[axis] for axis in batch_axes)
    tensor, context = (axis if axis in sizes else None for axis in (tensor_axis, context_axis))
    tensor_ways, context_ways = sizes.get(tensor_axis, 1), sizes.get(context_axis, 1)
    major, paged = layout == "tokens_major", page_table is not None
    (B, _, H, _), G = q.shape, values.shape[1]
    S = values.shape[2 if major else 3]
    checks = [("batch", B, batch_ways, batch_axes), ("heads", H, tensor_ways, tensor_axis)]
    checks += [("groups", G, tensor_ways, tensor_axis)] if G > 1 else []
    if paged and context_ways > 1:
        raise ValueError(f"page_table with {context_axis} = {context_ways}: page ids are global, use one context shard")
    if not paged:
        checks.append(("cached tokens", S, context_ways, context_axis))
    for name, size, ways, axis in checks:
        if size % ways:
            raise ValueError(f"{size} {name} over mesh axis {axis} of {ways}: must be a multiple of it")

    batch = batch_axes or None
    rows, groups, tokens = None if paged else batch, tensor if G > 1 else None, None if paged else context
    cached = lambda *front: P(*front, *((tokens, None) if major else (None, tokens)))
    operands = {
        "q": (q, P(batch, None, tensor, None)),
        "values": (values, cached(rows, groups)),
        "keys": (keys, cached(rows, groups)),
        "q_rope": (q_rope, P(batch, None, tensor, None)),
        "rope_keys": (rope_keys, cached(rows)),
        "lengths": (lengths, P(batch)),
        "q_lengths": (q_lengths, P(batch)),
        "sinks": (sinks, P(tensor)),
        "value_scales": (value_scales, P(rows, groups, tokens)),
        "key_scales": (key_scales, P(rows, groups, tokens)),
        "page_table": (page_table, P(batch, None)),
    }
    operands = {name: pair for name, pair in operands.items() if pair[0] is not None}

    def local(arrays):
        arrays = dict(arrays)
        q, values, lengths = arrays.pop("q"), arrays.pop("values"), arrays.pop("lengths")
        sinks = arrays.pop("sinks", None)
        if context_ways > 1:  # positions count from this stretch's first token
            lengths = lengths - jax.lax.axis_index(context).astype(lengths.dtype) * (S // context_ways)
        whole = context_ways == 1
        out, lse = decode_attention(
            q, values, lengths=lengths, scale=scale, layout=layout, sinks=sinks if whole else None, **arrays, **options
        )
        return (out, lse) if whole else _merge(out, lse, sinks, context, arrays.get("q_lengths"))

    specs = {name: spec for name, (_, spec) in operands.items()}
    results = P(batch, None, tensor, None), P(batch, None, tensor)
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=results, check_vma=False)
    return run({name: x for name, (x, _) in operands.items()})


def _merge(out, lse, sinks, axis: str, q_lengths):
    """Results of all stretches along a mesh axis, and the sinks, which take weight once."""
    finite = lambda m: jnp.where(jnp.isfinite(m), m, 0)
    m = finite(jax.lax.pmax(lse, axis))
    weight = jnp.exp(lse - m)
    total = jax.lax.psum(weight, axis)
    y = jax.lax.psum(out.astype(lse.dtype) * weight[..., None], axis) / jnp.where(total == 0, 1, total)[..., None]
    lse = jnp.log(total) + m
    if sinks is not None:
        y, lse = with_sinks(y, lse, sinks, q_lengths)
    return y.astype(out.dtype), lse
