"""Meshes, and the one table from logical axis names to mesh axes.

Parameters are matched by path, so modules return plain arrays and need no metadata. Whatever the table does not know is
an error, never silent replication.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gva_jax.config import ConfigError, MeshConfig, ModelConfig, RunConfig

AXES = ("data", "fsdp", "tensor", "context")

# Logical axis -> mesh axes.
RULES = {
    "batch": ("data", "fsdp"),
    "sequence": "context",
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "groups": "tensor",  # replicated where there is one group (MQA): then only heads are split
    "hidden": "tensor",
    "width": "fsdp",  # of what a map reads: a head's values, MLA's latent
    "heads x width": ("tensor", "fsdp"),
    None: None,
}

# Parameter path (of one layer, or of the model) -> logical axes. Stacked layers have one more axis in front. Of several
# choices the first is taken that splits the array evenly: maps may be narrower than fsdp. See `whole`.
PARAMETERS = (
    (r"embedding/embedding", ("vocab", "embed")),
    (r"unembedding/kernel", ("embed", "vocab")),
    (r"attention/query/kernel", ("embed", "heads")),
    (r"attention/(key|value)/kernel", ("embed", "groups")),
    (r"attention/(rope_key|latent)/kernel", ("embed", None)),
    (r"attention/(key_map|value_map)", ("width", "heads"), (None, "heads x width"), (None, "heads")),
    (r"attention/output/kernel", ("heads", "embed")),
    (r"attention/value_transform/gate/kernel", ("embed", "groups")),
    (r"attention/value_transform/kernel", (None, "groups")),
    (r"attention/value_transform/bias", ("groups",)),
    (r"attention/output_transform/gate/kernel", ("embed", "heads")),
    (r"mlp/(gate|up)/kernel", ("embed", "hidden")),
    (r"mlp/down/kernel", ("hidden", "embed")),
    (r"\w*norm/scale", (None,)),
)


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """A mesh with axes data, fsdp, tensor, context over `devices` (default: all).

    Raises:
      ConfigError: the axes' product is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    rest = config.fsdp * config.tensor * config.context
    data = len(devices) // rest if config.data == -1 else config.data
    if data * rest != len(devices) or data == 0:
        shape = f"data={config.data}, fsdp={config.fsdp}, tensor={config.tensor}, context={config.context}"
        raise ConfigError(f"mesh ({shape}): its product must be the number of devices, {len(devices)}")
    shape = (data, config.fsdp, config.tensor, config.context)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def spec(*logical: str | None, one_group: bool = False) -> P:
    """The partition of an array whose axes have these logical names.

    Raises:
      ValueError: an unknown name, or two names that fall on one mesh axis.
    """
    for name in logical:
        if name not in RULES:
            raise ValueError(f"unknown logical axis {name!r}; known are {', '.join(str(k) for k in RULES)}")
    axes = [None if one_group and name == "groups" else RULES[name] for name in logical]
    used = [axis for entry in axes if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    if len(set(used)) < len(used):
        raise ValueError(f"logical axes {logical} put two axes of one array on one mesh axis: {axes}")
    return P(*axes)


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Tell the compiler how an activation is split; does nothing where no mesh is active."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, spec(*logical))


def state_shardings(tree, model: ModelConfig, mesh: Mesh):
    """NamedShardings for parameters, or for any tree that holds them under their paths (an optimiser's moments).

    Raises:
      ValueError: a leaf whose path the table does not know.
    """
    attention = model.attention
    one_group = (attention.num_kv_heads or attention.num_heads) == 1

    def one(path, leaf):
        name = "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
        if leaf.ndim == 0 or name == "rng":
            return NamedSharding(mesh, P())
        for pattern, *choices in PARAMETERS:
            if re.search(rf"(^|/){pattern}$", name):
                stacked = leaf.ndim - len(choices[0])
                if stacked not in (0, 1):
                    raise ValueError(f"parameter {name} has shape {leaf.shape}, the table expects axes {choices[0]}")
                found = [P(*[None] * stacked, *spec(*logical, one_group=one_group)) for logical in choices]
                partition = next((one for one in found if _evenly(leaf.shape, one, mesh)), found[-1])
                return NamedSharding(mesh, partition)
        raise ValueError(f"no sharding rule for parameter {name} of shape {leaf.shape}: add one to PARAMETERS")

    return jax.tree_util.tree_map_with_path(one, tree)


def _evenly(shape: tuple[int, ...], partition: P, mesh: Mesh) -> bool:
    ways = lambda axes: math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))
    return all(size % ways(axes) == 0 for size, axes in zip(shape, partition, strict=True))


def whole(abstract_params) -> list[str]:
    """Which maps fsdp does not split, in words, of parameters with declared shardings: it divides neither axis."""
    told = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params):
        name, fsdp = path[-1].key, leaf.sharding.mesh.shape["fsdp"]
        unsplit = tuple(leaf.sharding.spec)[-2:] == tuple(spec(None, "heads"))
        if name in ("key_map", "value_map") and fsdp > 1 and unsplit:
            shape = " x ".join(map(str, leaf.shape[-2:]))
            told.append(f"{name} ({shape}) is whole on every device: fsdp = {fsdp} divides neither axis")
    return list(dict.fromkeys(told))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of every array (B, T) in a batch."""
    return NamedSharding(mesh, spec("batch", "sequence"))


class Share(NamedTuple):
    """The rows of a batch that a process loads: the `index`-th of `count` equal shares.

    `blocks` are the places of those rows on the mesh, in units of one device's rows.
    """

    index: int
    count: int
    blocks: tuple[int, ...]


@functools.cache
def share(mesh: Mesh, process: int) -> Share:
    """What `process` loads. Processes whose devices have the same rows, other heads or other tokens of them, load the
    same.

    Raises:
      ConfigError: a process whose devices have rows in common with another's, and others not.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    held = {}
    for block, devices in enumerate(mesh.devices.reshape(ways, -1)):
        for device in devices:
            held.setdefault(device.process_index, set()).add(block)
    shares = sorted({tuple(sorted(blocks)) for blocks in held.values()})
    if sum(map(len, shares)) != ways or len({len(blocks) for blocks in shares}) > 1:
        told = "the devices of a process must hold rows of its own, or the same rows as another process's"
        raise ConfigError(f"mesh (data x fsdp = {ways} over {len(held)} processes): {told}")
    mine = tuple(sorted(held[process]))
    return Share(shares.index(mine), len(shares), mine)


def check(config: RunConfig, mesh: Mesh) -> None:
    """Refuses sizes that the mesh cannot split evenly.

    Raises:
      ConfigError: naming the field, its value and the mesh axis.
    """
    shape, model, attention = dict(mesh.shape), config.model, config.model.attention
    groups = attention.num_kv_heads or attention.num_heads
    micro = config.data.batch_size // config.train.accumulation
    sizes = [
        ("data.batch_size / train.accumulation", micro, ("data", "fsdp")),
        ("model.model_dim", model.model_dim, ("fsdp",)),
        ("model.vocab_size", model.vocab_size, ("tensor",)),
        ("model.hidden_dim", model.hidden_dim, ("tensor",)),
        ("model.attention.num_heads", attention.num_heads, ("tensor",)),
        ("data.context_length", config.data.context_length, ("context",)),
    ]
    if groups > 1:  # one group is replicated, its heads are split
        sizes.append(("model.attention.num_kv_heads", groups, ("tensor",)))
    for name, size, axes in sizes:
        ways = math.prod(shape[axis] for axis in axes)
        if size % ways:
            raise ConfigError(f"{name} = {size}: must be a multiple of {ways}, the mesh's {' x '.join(axes)}")
