"""For all tests: 8 simulated CPU devices, quick compilation, shapes checked, a cache folder of their own."""

import os
from importlib.metadata import version

# Before JAX is imported: afterwards neither is read again.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # compiles 10 times faster; later versions do not know the flag
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# Annotated shapes hold in every call that a test makes. (Not in `gva_jax.cache`: a pytree node is also made of what
# stands for arrays in transformations.)
install_import_hook(["gva_jax.attention", "gva_jax.kernels", "gva_jax.model"], "shapecheck.check")


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """Nothing that a test prepares reaches the user's cache, and nothing there reaches a test."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GVA_JAX_CACHE", str(folder))
        yield folder


def pytest_addoption(parser):
    parser.addoption("--every-shape", action="store_true", help="decode kernels: the full product of sizes, hours long")
