"""Training attention over the active mesh: batch over data and fsdp, heads and groups over tensor.

XLA does not split a kernel it knows nothing of, so kernels run under `shard_map`, each device on rows and heads of its
own; nothing crosses the network. With one group (MQA) heads are split and keys and values are on every device.
"""

import math
from collections.abc import Callable

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gva_jax.sharding import AXES, spec


def refusal(q, k) -> str | None:
    """Why the active mesh does not let each device work on rows and heads of its own, None if it does.

    Raises:
      ValueError: heads or groups that the tensor axis does not divide.
    """
    sizes = {axis: size for axis, size in _axes().items() if size > 1}
    if strange := [axis for axis in sizes if axis not in AXES]:
        return f"the mesh has the axis {strange[0]!r}, which is none of {', '.join(AXES)}"
    if "context" in sizes:
        return f"the mesh splits the sequence over context = {sizes['context']}"
    ways = sizes.get("tensor", 1)
    for name, count in (("heads", q.shape[2]), ("groups", k.shape[2])):
        if count % ways and (name, count) != ("groups", 1):
            raise ValueError(f"{count} {name} over mesh axis tensor = {ways}: must be a multiple of it")
    ways = sizes.get("data", 1) * sizes.get("fsdp", 1)
    if q.shape[0] % ways:
        return f"a batch of {q.shape[0]} over data x fsdp = {ways}: must be a multiple of it"
    return None


def share(x) -> jax.ShapeDtypeStruct | None:
    """What one device holds of `x`, (B, T, H or G, d) or (B, T)."""
    if x is None:
        return None
    sizes = _axes()
    ways = [math.prod(sizes[axis] for axis in axes) for axes in _split(x)]
    return jax.ShapeDtypeStruct([size // n for size, n in zip(x.shape, ways, strict=True)], x.dtype)


def over_mesh(attention: Callable, q, k, v, segment_ids):
    """`attention(q, k, v, segment_ids)`, each device on its own share."""
    axes = _axes()
    if math.prod(axes.values()) == 1:
        return attention(q, k, v, segment_ids)
    parts = tuple(None if x is None else P(*_split(x)) for x in (q, k, v, segment_ids))
    # Whether results are equal over an axis is not tracked through kernels.
    run = jax.shard_map(attention, in_specs=parts, out_specs=parts[0], axis_names=set(axes), check_vma=False)
    return run(q, k, v, segment_ids)


def _axes() -> dict[str, int]:
    """The active mesh's axes without those that a `shard_map` around this has split already."""
    mesh = jax.sharding.get_abstract_mesh()
    free = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {axis: size for axis, size, kind in free if kind != AxisType.Manual}


def _split(x) -> list[tuple[str, ...]]:
    """The mesh axes over each axis of (B, T, H or G, d) or (B, T). A single group is on every device."""
    heads = "heads" if x.ndim == 4 and x.shape[2] > 1 else None
    there = _axes()
    entries = spec("batch", None, heads, None)[: x.ndim]
    every = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    return [tuple(axis for axis in axes if axis in there) for axes in every]
