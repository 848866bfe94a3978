"""What is imported when, and the wheel: it brings the configs and works where no checkout is."""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("flax", "optax", "orbax", "grain", "tensorflow_datasets", "tensorflow", "array_record", "tokenizers")


def imported(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    assert not imported("import gva_jax; dir(gva_jax)") & {*HEAVY, "jax", "numpy", "tyro", "rich"}


def test_kernels_and_cache_load_without_flax():
    loaded = imported("import gva_jax.kernels, gva_jax.cache")
    assert "jax" in loaded and not loaded & set(HEAVY)


def test_attention_loads_without_training():
    """Flax itself brings Optax and Orbax; what is ours to keep out is kept out."""
    loaded = imported("from gva_jax import GroupedValueAttention, LatentAttention, MultiHeadAttention, Transformer")
    assert "flax" in loaded and not loaded & (set(HEAVY) - {"flax", "optax", "orbax"})


@pytest.mark.parametrize("argv", [["--help"], ["train"], ["train", "quickstart", "--train.stepz", "1"]])
def test_commands_that_compute_nothing_load_no_jax(argv):
    assert not imported(f"from gva_jax import cli; cli.main({argv})") & {*HEAVY, "jax"}


def test_every_public_name_is_there():
    import gva_jax

    for name in gva_jax.__all__:
        assert getattr(gva_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gva_jax.nothing  # noqa: B018


# ---- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv to build a wheel")
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([uv, "build", "--wheel", "-o", folder, ROOT], capture_output=True, text=True)
    if "Failed to fetch" in done.stderr or "failed to fetch" in done.stderr:
        pytest.skip("needs the package index, for the build backend")
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs the `gva` of a fresh environment that has the wheel, and this environment's packages for what it needs."""
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "venv/bin/python"
    subprocess.run(["uv", "venv", "--python", sys.executable, folder / "venv"], check=True, capture_output=True)
    subprocess.run(["uv", "pip", "install", "--python", python, "--no-deps", wheel], check=True, capture_output=True)
    query = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip())
    # A path named in a .pth file comes last, and its own .pth files (this checkout's, when editable) are not read.
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def gva(*argv):
        command = [folder / "venv/bin/gva", *argv]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)

    where = subprocess.run([python, "-c", "import gva_jax; print(gva_jax.__file__)"], cwd=folder, **dict(
        capture_output=True, text=True, env=environment, check=True))  # fmt: skip
    assert Path(where.stdout).is_relative_to(folder)
    return gva


def test_the_wheel_knows_the_shipped_configs(installed):
    from gva_jax.config import shipped

    overview = installed("--help")
    assert overview.returncode == 0 and ", ".join(shipped()) in overview.stdout
    figures = installed("info", "gva_350m_r24", "--json")
    assert figures.returncode == 0, figures.stderr
    assert json.loads(figures.stdout)["cache_ratio_to_gqa"] == 0.546875
    assert installed("train", "quickstart", "--help").returncode == 0


def test_the_wheel_trains(installed):
    from test_cli import TINY

    done = installed("train", "quickstart", *TINY)
    assert done.returncode == 0, done.stderr
    assert "runs/quickstart" in done.stdout


def test_the_wheel_is_typed_licensed_and_holds_nothing_else(wheel):
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    assert "gva_jax/py.typed" in names and "gva_jax/configs/quickstart.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"gva_jax"}
