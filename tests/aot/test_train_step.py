"""The real training step compiled for TPUs and H100s that are not here, and which training attention is in it.

`python test_train_step.py v5e` compiles and prints a line of JSON a program.
"""

import itertools
import json
import re
import sys
from unittest import mock

import pytest
import targets

B, T = 4, 640  # more than one block of splash attention, and no whole number of them
FAMILIES = {
    "gva": dict(num_kv_heads=2, rope_dim=16, q_norm=True, key_init="scale_matched"),  # keys of 80, values of 64
    "gqa": dict(num_kv_heads=2),
    "mla": dict(latent_dim=64, rope_dim=16),
}
MESHES = {1: dict(data=1), 4: dict(data=2, tensor=2)}  # by their number of devices
PROGRAMS = {  # (devices, family): all on one TPU, what differs most on the others
    "v5e": [*itertools.product([1], FAMILIES), (4, "gva")],
    "v5p": [(4, "gva")],
    "v6e": [(4, "gva")],
    "h100": [(1, "gva")],
}
# What the compiled program holds for each implementation: kernels of the forward and of the backward pass.
KERNELS = {
    "splash": {"splash_mha_fwd_segmented", "splash_mha_dq_segmented", "splash_mha_dkv_segmented"},
    "cudnn": {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"},
    "chunked": set(),
}


def compile_steps(target: str) -> None:
    import jax

    from gva_jax import sharding
    from gva_jax.attention import dispatch
    from gva_jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, RunConfig
    from gva_jax.model import Transformer
    from gva_jax.train import optimizer as optimizers
    from gva_jax.train import state as states
    from gva_jax.train.step import make_train_step

    chosen, choose = {}, dispatch.training_choice

    def spy(*operands, **kw):
        choice = chosen["implementation"], chosen["passed_over"] = choose(*operands, **kw)
        return choice

    devices = targets.devices(target, 4)
    batch = {part: jax.ShapeDtypeStruct((B, T), "int32") for part in ("inputs", "targets", "segment_ids", "positions")}
    for count, family in PROGRAMS[target]:
        axes = MESHES[count]
        attention = AttentionConfig(family, 4, head_dim=64, **FAMILIES[family])
        run = RunConfig(
            model=ModelConfig(256, 2, 128, 256, attention, dtype="bfloat16"),
            data=DataConfig(context_length=T, batch_size=B),
            mesh=MeshConfig(**axes),
        )
        mesh = sharding.make_mesh(run.mesh, devices[:count])
        sharding.check(run, mesh)
        model, optimizer = Transformer(run.model), optimizers.make(run.optimizer, 10)
        state = states.abstract(model, optimizer, 0, mesh)
        step = make_train_step(model, optimizer, optimizers.learning_rate(run.optimizer, 10), state, mesh)
        with jax.set_mesh(mesh), mock.patch.object(dispatch, "training_choice", spy):
            compiled = step.jitted.lower(state, batch).compile()
        text = compiled.as_text()
        print(json.dumps({
            "family": family,
            "devices": count,
            **chosen,
            "kernels": sorted(set(re.findall(r"splash_mha_[a-z]+_segmented|__cudnn\$\w+", text))),
            "calls": len(re.findall(r'custom_call_target="(?:tpu_custom_call|__cudnn\$)', text)),
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        }), flush=True)  # fmt: skip


def compiled(target: str) -> list[dict]:
    if absent := targets.missing(target):
        pytest.skip(f"needs {', '.join(absent)}, from the extra `aot`")
    steps = targets.run(__file__, target)
    assert [(step["devices"], step["family"]) for step in steps] == PROGRAMS[target]
    for step in steps:  # one scanned layer
        kernels = KERNELS[step["implementation"]]
        assert set(step["kernels"]) == kernels and step["calls"] == len(kernels), step
    return steps


@pytest.mark.parametrize("target", ["v5e", "v5p", "v6e"])
def test_tpus_run_splash_attention(target):
    for step in compiled(target):
        assert step["implementation"] == "splash" and not step["passed_over"], step


def test_h100s_run_what_serves():
    reasons = compiled("h100")[0]["passed_over"]
    assert "tokamax" in reasons  # it compiles only for a GPU that is here
    if "cudnn" in reasons:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        pytest.skip(f"compiled with chunked, where an H100 would take tokamax or cuDNN ({told})")


if __name__ == "__main__":
    compile_steps(sys.argv[1])
