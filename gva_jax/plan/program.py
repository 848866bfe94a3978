"""The real training step, compiled for devices that are not here."""

import contextlib
import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.sharding import Mesh

from gva_jax import runtime, sharding
from gva_jax.attention import dispatch
from gva_jax.config import ConfigError, MeshConfig, RunConfig, cache_folder
from gva_jax.model import Transformer
from gva_jax.plan.topologies import Topology
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.step import make_train_step

PARTS = ("inputs", "targets", "segment_ids", "positions")
_MEMORY = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries as summarised": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
    "peak": "peak_memory_in_bytes",
}
# What a compiler says of a program that is too large: how much it would use.
_TOO_LARGE = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm|Out of memory|RESOURCE_EXHAUSTED")


@dataclass(frozen=True)
class Compiled:
    """A compiled step. `text` is empty where the compiler refused it for want of memory, and `refused` says so.

    `memory` in bytes a device, as the compiler reports them: arguments without their padding; `temporaries` is what it
    sets aside for them, "temporaries as summarised" its own summary, which on TPUs is more. `attention` is the
    implementation of training attention in it, `passed_over` better ones with the reasons why each was not taken.
    `whole`: which maps are not split, in words. `seconds`: of the compiler.
    """

    text: str
    memory: dict[str, int]
    attention: str
    passed_over: dict[str, str]
    seconds: float
    refused: str | None = None
    whole: tuple[str, ...] = ()


def fitted(config: RunConfig, mesh: MeshConfig, devices: int) -> RunConfig:
    """`config` on this mesh, with the most micro-batches, up to its own number, that the mesh can split evenly."""
    rest = mesh.fsdp * mesh.tensor * mesh.context
    data = devices // rest if mesh.data == -1 else mesh.data
    rows, ways = config.data.batch_size, data * mesh.fsdp
    fits = lambda n: rows % n == 0 and rows // n % ways == 0
    pieces = next((n for n in range(config.train.accumulation, 0, -1) if fits(n)), config.train.accumulation)
    mesh = replace(mesh, data=data) if data else mesh
    return replace(config, mesh=mesh, train=replace(config.train, accumulation=pieces))


def compile_step(
    config: RunConfig, topology: Topology, devices: list, options: dict[str, str] | None = None, keep: bool = True
) -> tuple[Compiled, Mesh]:
    """The training step of `config` on its mesh over `devices` of `topology`.

    Args:
      options: XLA's, by name.
      keep: read what an equal program compiled to before, and keep it, in the cache folder.

    Raises:
      ConfigError: sizes that the mesh cannot split, or a training attention that cannot be compiled.
    """
    runtime.check_float64(config.model)
    mesh = sharding.make_mesh(config.mesh, devices)
    sharding.check(config, mesh)
    model = Transformer(config.model)
    optimizer = optimizers.make(config.optimizer, config.train.steps)
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)
    state = states.abstract(model, optimizer, config.train.seed, mesh)
    shape = config.data.batch_size, config.data.context_length
    batch = {part: jax.ShapeDtypeStruct(shape, "int32") for part in PARTS}
    step = make_train_step(model, optimizer, schedule, state, mesh, config.train.accumulation)
    with jax.set_mesh(mesh), _watched() as choice:
        lowered = step.jitted.lower(state, batch)
        implementation = config.model.attention.training_implementation or choice.get("implementation", "chunked")
        kept = _kept(lowered.as_text(), topology, options) if keep else None
        if kept is not None and kept.is_file():
            return Compiled(**json.loads(gzip.decompress(kept.read_bytes()))), mesh
        passed_over, whole = choice.get("passed_over", {}), tuple(sharding.whole(state.params))
        chosen = dict(attention=implementation, passed_over=passed_over, whole=whole)
        begun = time.monotonic()
        try:
            compiled = lowered.compile(compiler_options=options or None)
        except Exception as error:
            if not _TOO_LARGE.search(str(error)):
                raise
            said = next((line for line in str(error).splitlines() if "Used " in line), str(error).splitlines()[0])
            seconds = time.monotonic() - begun
            return Compiled("", {}, **chosen, seconds=seconds, refused=" ".join(said.split())), mesh
    seconds, memory = time.monotonic() - begun, reported_memory(compiled)
    done = Compiled(compiled.as_text(), memory, **chosen, seconds=seconds)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(gzip.compress(json.dumps(asdict(done)).encode(), 6, mtime=0))
        partial.replace(kept)
    return done, mesh


def reported_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of one device, as `Compiled.memory` has them."""
    sizes = compiled.memory_analysis()
    memory = {name: int(getattr(sizes, field, 0)) for name, field in _MEMORY.items()}
    memory["temporaries"] = memory["temporaries as summarised"]
    if allocated := getattr(sizes, "total_allocation_bytes", 0):  # from JAX 0.11 on; equal for CPUs and GPUs
        memory["temporaries"] = allocated - sizes.indefinite_allocations
    return memory


def _kept(text: str, topology: Topology, options) -> Path:
    """Where the compiled form of a lowered program is kept: by all that decides on it, the compilers included, and
    by what is kept of it."""
    from importlib.metadata import packages_distributions, version

    installed = {name for names in packages_distributions().values() for name in names}
    compilers = [name for name in ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "nvidia-cuda-nvcc") if
                 name in installed]  # fmt: skip
    versions = {name: version(name) for name in compilers}
    form = [field.name for field in fields(Compiled)] + list(_MEMORY)
    what: list[Any] = [text, topology.name, options or {}, versions, os.environ.get("XLA_FLAGS", ""), form]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "plan" / f"{key[:32]}.json.gz"


@contextlib.contextmanager
def _watched() -> Iterator[dict]:
    """What `training_choice` says while a step is traced."""
    seen: dict = {}
    choose = dispatch.training_choice

    def watch(*operands, **kw):
        seen["implementation"], seen["passed_over"] = choose(*operands, **kw)
        return seen["implementation"], seen["passed_over"]

    with mock.patch.object(dispatch, "training_choice", watch):
        yield seen


def real_attention(compiled: Compiled, topology: Topology) -> str:
    """What the devices themselves would take, which may be more than what compiles without them."""
    if topology.is_tpu or compiled.attention != "chunked" or not compiled.passed_over:
        return compiled.attention
    return " or ".join(compiled.passed_over)


def parse_mesh(text: str) -> MeshConfig:
    """The mesh of `data=2,fsdp=8`; axes that are not named have one device, data what is left.

    Raises:
      ConfigError: an axis that there is not, or no number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in sharding.AXES or axis in sizes or not re.fullmatch(r"-?\d+", size):
            raise ConfigError(f"mesh = {text!r}: must be AXIS=DEVICES,... with axes {', '.join(sharding.AXES)}, once "
                              "each")  # fmt: skip
        sizes[axis] = int(size)
    return MeshConfig(**sizes)


def default_meshes(config: RunConfig, topology: Topology) -> list[MeshConfig]:
    """A handful worth comparing: parameters split over all, over 16 or 8, over none, and heads split two ways."""
    n, groups = topology.size, config.model.attention.num_kv_heads or config.model.attention.num_heads
    inner = (16 if topology.is_tpu else topology.shape[1]) if n > 16 or not topology.is_tpu else max(n // 2, 1)
    candidates = [dict(data=1, fsdp=n), dict(data=n // inner, fsdp=inner), dict(data=n)]
    if n % 2 == 0 and groups % 2 == 0:
        candidates.append(dict(data=1, fsdp=n // 2, tensor=2))
    if config.mesh != MeshConfig():
        candidates.insert(0, asdict(config.mesh))
    meshes = []
    for sizes in candidates:
        mesh = fitted(config, MeshConfig(**sizes), n).mesh
        if mesh not in meshes:
            meshes.append(mesh)
    return meshes
