"""Training attention over the active mesh: batch over data and fsdp, heads over tensor, the sequence over context.

XLA does not split a kernel it knows nothing of, so kernels run under `shard_map`, each device on rows and heads of its
own. With one group (MQA) heads are split and keys and values are on every device.

Along the context axis a device has a stretch of the queries and needs the keys and values of the whole sequence. What
travels is what they are read from, once a pass: the values and one rotary key of absorbed GVA, G d + r per token where
GQA sends 2 G d; MLA's latent and rotary key, c + r, and its keys and values are made where they arrive. The backward
pass gathers again rather than keep all tokens of every layer, and what it finds goes back to its owners summed.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gva_jax.attention.training.common import KEPT, Shard
from gva_jax.sharding import AXES, RULES, spec

CONTEXT = RULES["sequence"]


def refusal(q, k) -> str | None:
    """Why the active mesh does not let each device work on rows, heads and queries of its own, None if it does.

    Raises:
      ValueError: heads or groups that the tensor axis does not divide.
    """
    sizes = {axis: size for axis, size in _axes().items() if size > 1}
    if strange := [axis for axis in sizes if axis not in AXES]:
        return f"the mesh has the axis {strange[0]!r}, which is none of {', '.join(AXES)}"
    ways = sizes.get("tensor", 1)
    for name, count in (("heads", q.shape[2]), ("groups", k.shape[2])):
        if count % ways and (name, count) != ("groups", 1):
            raise ValueError(f"{count} {name} over mesh axis tensor = {ways}: must be a multiple of it")
    ways = sizes.get("data", 1) * sizes.get("fsdp", 1)
    if q.shape[0] % ways:
        return f"a batch of {q.shape[0]} over data x fsdp = {ways}: must be a multiple of it"
    ways = sizes.get(CONTEXT, 1)
    if q.shape[1] % ways:
        return f"a sequence of {q.shape[1]} over context = {ways}: must be a multiple of it"
    return None


def splits_sequence() -> bool:
    """Whether the active mesh has a context axis to split."""
    return _axes().get(CONTEXT, 1) > 1


def share(x, sequence: str | None = "sequence") -> jax.ShapeDtypeStruct | None:
    """What one device works on of `x`, (B, T, H or G, d) or (B, T); all positions where `sequence` is None."""
    if x is None:
        return None
    sizes = _axes()
    ways = [math.prod(sizes[axis] for axis in axes) for axes in _split(x, sequence)]
    return jax.ShapeDtypeStruct([size // n for size, n in zip(x.shape, ways, strict=True)], x.dtype)


def over_mesh(attention: Callable, q, k, v, segment_ids):
    """`attention(q, k, v, segment_ids)`, each device on its own share; the sequence is whole."""
    axes = _axes()
    if math.prod(axes.values()) == 1:
        return attention(q, k, v, segment_ids)
    parts = tuple(None if x is None else P(*_split(x)) for x in (q, k, v, segment_ids))
    # Whether results are equal over an axis is not tracked through kernels.
    run = jax.shard_map(attention, in_specs=parts, out_specs=parts[0], axis_names=set(axes), check_vma=False)
    return run(q, k, v, segment_ids)


def over_context(attention: Callable, q, tokens: tuple, read: Callable, maps: tuple, segment_ids):
    """`attention(q, *read(*tokens, *maps), segment_ids)`, each device with its own stretch of the queries.

    Arguments as in `gva_jax.attention.dispatch.attention_from`.
    """
    axes = _axes()
    # Integers (segment ids, positions) come whole: a word per token, gathered outside, where layers can share it.
    along = lambda x: "sequence" if jnp.issubdtype(x.dtype, jnp.floating) else None
    parts = (
        P(*_split(q)),
        tuple(P(*_split(x, along(x))) for x in tokens),
        tuple(P(None, "tensor" if "tensor" in axes else None) for _ in maps),
        None if segment_ids is None else P(*_split(segment_ids, None)),
    )

    def local(q, tokens, maps, segment_ids):
        shard = Shard(jax.lax.axis_index(CONTEXT), axes[CONTEXT])
        whole = lambda x: jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True) if along(x) else x

        def attend(q, tokens, maps):
            k, v = read(*map(whole, tokens), *maps)
            return attention(q, k, v, segment_ids, shard=shard)

        kept = jax.checkpoint_policies.save_only_these_names(KEPT)
        return jax.checkpoint(attend, policy=kept)(q, tokens, maps)

    run = jax.shard_map(local, in_specs=parts, out_specs=parts[0], axis_names=set(axes), check_vma=False)
    return run(q, tokens, maps, segment_ids)


def _axes() -> dict[str, int]:
    """The active mesh's axes without those that a `shard_map` around this has split already."""
    mesh = jax.sharding.get_abstract_mesh()
    free = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {axis: size for axis, size, kind in free if kind != AxisType.Manual}


def _split(x, sequence: str | None = "sequence") -> list[tuple[str, ...]]:
    """The mesh axes over each axis of (B, T, H or G, d), (B, T, c) or (B, T). A single group is on every device."""
    heads = "heads" if x.ndim == 4 and x.shape[2] > 1 else None
    there = _axes()
    entries = spec("batch", sequence, heads, None)[: x.ndim]
    every = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    return [tuple(axis for axis in axes if axis in there) for axes in every]
