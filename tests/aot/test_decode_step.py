"""A whole decode step compiled for accelerators that are not here: the kernel is used, and no cache is copied.

`python test_decode_step.py v5e` compiles and prints a line of JSON a family.
"""

import json
import re
import sys

import pytest
import targets

BATCH, CAPACITY = 8, 32_768
FAMILIES = {
    "gva": dict(num_kv_heads=4, rope_dim=16, q_norm=True, key_init="scale_matched"),
    "gqa": dict(num_kv_heads=4),
    "mla": dict(latent_dim=256, rope_dim=16),
}
# What the compiled program calls, and the layout of caches.
KERNELS = {
    "v5e": ("tpu_custom_call", "tokens_minor"),
    "tpu7x": ("tpu_custom_call", "tokens_minor"),
    "a100": ("__gpu$xla.gpu.triton", "tokens_major"),
    "h100": ("mosaic_gpu_v2", "tokens_major"),
}


def compile_steps(target: str) -> None:
    import jax
    import jax.numpy as jnp

    from gva_jax.config import AttentionConfig, ModelConfig
    from gva_jax.model import Transformer

    here = jax.sharding.SingleDeviceSharding(targets.devices(target)[0])
    for family, fields in FAMILIES.items():
        attention = AttentionConfig(family, 16, head_dim=64, **fields)
        model = Transformer(ModelConfig(1024, 2, 256, 512, attention, scan_layers=False, dtype="bfloat16"))
        variables = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
        with jax.sharding.use_abstract_mesh(targets.abstract_mesh(target)):  # layout and kernel follow
            caches = jax.eval_shape(lambda model=model: model.init_cache(BATCH, CAPACITY))
            step = lambda variables, *rest, model=model: model.apply(variables, *rest, method="decode")
            jitted = jax.jit(step, in_shardings=here, out_shardings=here, donate_argnums=2)
            lowered = jitted.lower(variables, jax.ShapeDtypeStruct((BATCH, 1), jnp.int32), caches)
        compiled = lowered.compile()
        text = compiled.as_text()
        print(json.dumps({
            "family": family,
            "layout": caches[0].layout,
            "calls": re.findall(r'custom_call_target="([^"]+)"', text),
            "cache_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)),
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "cache_copies": [c for c in re.findall(r"= (\S+) copy\(", text) if str(CAPACITY) in c],
        }), flush=True)  # fmt: skip


@pytest.mark.parametrize("target", KERNELS)
def test_copies_no_cache(target):
    if absent := targets.missing(target):
        pytest.skip(f"needs {', '.join(absent)}, from the extra `aot`")
    steps = targets.run(__file__, target)
    kernel, layout = KERNELS[target]
    assert [step["family"] for step in steps] == list(FAMILIES)
    for step in steps:
        assert step["layout"] == layout and step["calls"].count(kernel) >= 2, step
        assert not step["cache_copies"] and step["temporary_bytes"] < step["cache_bytes"] / 20, step


if __name__ == "__main__":
    compile_steps(sys.argv[1])
