"""Differences between JAX versions and between devices, bridged in one place. Knows JAX only."""

import jax


def is_concrete(x) -> bool:
    """Whether `x` has a value now, rather than being traced."""
    return not isinstance(x, jax.core.Tracer)


def varying_like(x, *others):
    """`x`, typed as varying over the axes of a surrounding `shard_map` that any of `others` varies over.

    What a loop carries must say so from the start.
    """
    varies = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset().union(*(varies(other) for other in others if other is not None)) - varies(x)
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _target_device():
    """The device that computations are meant for: the active mesh's abstract one, else the first one here.

    Compiling for a pod happens on a machine without one, so the mesh decides before the backend does.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return jax.devices()[0] if device is None else device


def target_platform() -> str:
    """The platform that computations are meant for: "cpu", "tpu" or "gpu"."""
    platform = _target_device().platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def target_kind() -> str:
    """The kind of device that computations are meant for, as JAX names it: "TPU v4", "NVIDIA H200"."""
    return _target_device().device_kind


def multiprocessors() -> int:
    """How many of them the GPU that computations are meant for has; an H100's 132 where that is not known."""
    device = _target_device()
    return getattr(device, "core_count", None) or getattr(device, "num_cores", None) or 132


def compute_capability() -> tuple[int, int] | None:
    """Of the GPU that computations are meant for: (9, 0) for an H100. None where it is no NVIDIA GPU, or not known.

    JAX's abstract devices do not tell it, but a subclass can, in an attribute `compute_capability`, "9.0"; and so does
    a GPU of that kind where the machine has one. Mosaic GPU looks in the same places.
    """
    device, real = _target_device(), jax.devices()[0]
    if device.device_kind == real.device_kind:
        device = real
    major, dot, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None


def wide_dtype(*dtypes):
    """The dtype sums are kept in: float64 if any operand is float64, else float32."""
    return jax.numpy.float64 if jax.numpy.float64 in dtypes else jax.numpy.float32


def key_value_store():
    """The client of the store that the processes of `jax.distributed` share. None where there is one process."""
    from jax._src import distributed  # not public; the few calls that are used of it are the same in all versions

    return distributed.global_state.client


def process_index_and_count() -> tuple[int, int]:
    """Of `jax.distributed`, without touching a device; (0, 1) where there is one process."""
    from jax._src import distributed

    state = distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def detect_cluster(count: int | None, method: str | None, seconds: int) -> tuple:
    """What JAX finds out about the processes around this one: (coordinator, count, index, local device ids).

    `method` is JAX's name of the kind of cluster, None for any. Each may be None. It raises whatever the kind of
    cluster raises: RuntimeError, KeyError, and an HTTP library's.
    """
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(None, count, None, None, method, seconds)


def has_tpu_chips() -> bool:
    """Whether this machine has TPU chips on its bus, whatever JAX is told to run on."""
    from jax._src import cloud_tpu_init

    return bool(cloud_tpu_init.running_in_cloud_tpu_vm)
