"""Start-up: which devices JAX found, whether an accelerator lies idle, and where compiled programs are kept."""

import glob

import jax

from gva_jax.config import ConfigError, ModelConfig, cache_folder, require
from gva_jax.display import Display

# An accelerator, the extra that lets JAX use it, and what its driver makes in /dev on Linux either way.
_ACCELERATORS = (
    ("an NVIDIA GPU", "gpu", ("/dev/nvidia[0-9]*",)),
    ("a TPU", "tpu", ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")),
)


def start(display: Display) -> None:
    """What every command that computes does first."""
    keep_compiled_programs()
    display.say(describe_devices())
    if warning := unused_accelerator():
        display.say(warning)


def check_float64(model: ModelConfig) -> None:
    """Refuses a float64 model where JAX would silently make it float32."""
    for name in ("dtype", "param_dtype"):
        wide = getattr(model, name) == "float64"
        right = "needs the environment variable JAX_ENABLE_X64=1"
        require(not wide or jax.config.jax_enable_x64, f"model.{name}", getattr(model, name), right)


def keep_compiled_programs() -> None:
    """Turn on JAX's persistent compilation cache, unless JAX_COMPILATION_CACHE_DIR has already said where."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))


def describe_devices() -> str:
    """Device kind, count and backend in one line."""
    try:
        devices = jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS names a backend that cannot start
        raise ConfigError(f"JAX finds no device: {error}") from None
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"device: {len(devices)} x {kinds} (backend {jax.default_backend()}{processes})"


def unused_accelerator() -> str | None:
    """A warning when this machine has an accelerator but JAX runs on the CPU."""
    if jax.default_backend() != "cpu":
        return None
    for name, extra, patterns in _ACCELERATORS:
        if found := [path for pattern in patterns for path in glob.glob(pattern)]:
            chosen = jax.config.jax_platforms
            advice = f"unset JAX_PLATFORMS={chosen}" if chosen else f"pip install 'gva-jax[{extra}]'"
            return f"warning: {name} is present ({min(found)}) but JAX runs on the CPU; to use it: {advice}"
    return None
