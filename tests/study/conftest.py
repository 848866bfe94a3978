"""Programs that several tests run are compiled once: JAX's persistent compilation cache, in a folder of the session."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

_OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory):
    before = {name: getattr(jax.config, name) for name in _OPTIONS}
    folder = tmp_path_factory.getbasetemp() / "compiled"
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
