"""launches.jsonl in a run's folder: when, how, from what code and on what machine it was launched, a line each time."""

import datetime
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
from jax.sharding import Mesh

from gva_jax import __version__, distributed
from gva_jax.train.writers import append

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "array-record", "tokenizers",
    "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "tokamax",
)  # fmt: skip


def launch(folder: Path, step: int, mesh: Mesh) -> None:
    """Record this launch, which starts at `step`, in process 0."""
    if distributed.first():
        append(folder / "launches.jsonl", facts(step, mesh))


def facts(step: int, mesh: Mesh) -> dict:
    """What one line holds. `git` is None where the package is not in a checkout."""
    devices = list(mesh.devices.flat)
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": shlex.join(sys.argv),
        "gva_jax": __version__,
        "git": revision(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "versions": versions(),
        "platform": devices[0].platform,
        "devices": {kind: sum(d.device_kind == kind for d in devices) for kind in {d.device_kind for d in devices}},
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "processes": jax.process_count(),
    }


def versions() -> dict[str, str]:
    """Of the packages that matter, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def revision(root: Path) -> dict | None:
    """`{"revision": ..., "dirty": ...}` of the checkout whose top is `root`; tracked files alone make it dirty."""
    if not (root / ".git").exists():  # a package in some other repository's environment is not that repository's
        return None

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, or it refuses
        return None
    return {"revision": head, "dirty": bool(changes)}
