"""A whole decode step compiled for a TPU that is not here: the kernel is used, and no cache is copied.

Run as a script it compiles and prints one JSON line a family; the test runs it where libtpu is installed.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CAPACITY = 32_768


def compile_steps(topology: str) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from gva_jax.config import AttentionConfig, ModelConfig
    from gva_jax.model import Transformer

    devices = topologies.get_topology_desc(topology, "tpu").devices[:1]
    mesh = Mesh(devices, ("one",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, P())
    for family, fields in {
        "gva": dict(num_kv_heads=4, rope_dim=16, q_norm=True, key_init="scale_matched"),
        "gqa": dict(num_kv_heads=4),
        "mla": dict(latent_dim=256, rope_dim=16),
    }.items():
        attention = AttentionConfig(family, 16, head_dim=64, **fields)
        model = Transformer(ModelConfig(1024, 2, 256, 512, attention, scan_layers=False, dtype="bfloat16"))
        variables = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
        with jax.set_mesh(mesh):  # says which platform is meant: layout and kernel follow
            caches = jax.eval_shape(lambda model=model: model.init_cache(8, CAPACITY))
            step = lambda variables, *rest, model=model: model.apply(variables, *rest, method="decode")
            jitted = jax.jit(step, in_shardings=here, out_shardings=here, donate_argnums=2)
            compiled = jitted.lower(variables, jax.ShapeDtypeStruct((8, 1), jnp.int32), caches).compile()
        text = compiled.as_text()
        print(json.dumps({
            "family": family,
            "layout": caches[0].layout,
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "cache_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)),
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "cache_copies": [c for c in re.findall(r"= (\S+) copy\(", text) if str(CAPACITY) in c],
        }), flush=True)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, from the extra `aot`")
@pytest.mark.parametrize("topology", ["v5e:2x2", "tpu7x:2x2x1"])
def test_a_decode_step_copies_no_cache(topology):
    environment = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": "",
                   "PYTHONPATH": str(Path(__file__).parent.parent)}  # fmt: skip
    command = [sys.executable, __file__, topology]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [step["family"] for step in steps] == ["gva", "gqa", "mla"]
    for step in steps:
        assert step["layout"] == "tokens_minor" and step["kernels"] == 2, step
        assert not step["cache_copies"] and step["temporary_bytes"] < step["cache_bytes"] / 20, step


if __name__ == "__main__":
    compile_steps(sys.argv[1])
