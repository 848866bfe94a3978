"""Differences between JAX versions and between devices, bridged in one place. Knows JAX only."""

import jax


def is_concrete(x) -> bool:
    """Whether `x` has a value now, rather than being traced."""
    return not isinstance(x, jax.core.Tracer)


def target_platform() -> str:
    """The platform that computations are meant for ("cpu", "tpu", "gpu"): the active mesh's, else the default backend.

    Compiling for a pod happens on a machine without one, so the mesh decides before the backend does.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def multiprocessors() -> int:
    """How many of them the GPU that computations are meant for has; an H100's 132 where that is not known."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    count = getattr(jax.devices()[0], "core_count", None) if device is None else device.num_cores
    return count or 132


def wide_dtype(*dtypes):
    """The dtype sums are kept in: float64 if any operand is float64, else float32."""
    return jax.numpy.float64 if jax.numpy.float64 in dtypes else jax.numpy.float32
