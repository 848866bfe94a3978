"""The training step compiled for TPUs that are not here, its sequence split over devices: the kernels and what is sent.

`python test_context.py v5e:2x4` compiles, and prints a line of JSON a program.
"""

import json
import re
import sys
from dataclasses import asdict

import pytest
import targets

TOPOLOGY, MESH = "v5e:2x4", (1, 2, 2, 2)
# Rows of batches have a factor 3, sequences a factor 7 and, on a device, whole blocks of splash attention.
B, T, D, HEADS, WIDTH, R = 6, 1792, 256, 4, 64, 32
FAMILIES = {
    "gva": dict(num_kv_heads=2, rope_dim=R, q_norm=True),
    "gqa": dict(num_kv_heads=2),
}
STREAMS = {"gva": ((1, WIDTH), (R,)), "gqa": ((1, WIDTH),)}  # one group a device
SPLASH = {"splash_mha_fwd_segmented", "splash_mha_dq_segmented", "splash_mha_dkv_segmented"}


def compile_steps(topology: str) -> None:
    import collectives
    import jax
    from jax.experimental import topologies

    from gva_jax import sharding
    from gva_jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, RunConfig
    from gva_jax.model import Transformer
    from gva_jax.train import optimizer as optimizers
    from gva_jax.train import state as states
    from gva_jax.train.step import make_train_step

    devices = topologies.get_topology_desc(topology, "tpu").devices
    batch = {part: jax.ShapeDtypeStruct((B, T), "int32") for part in ("inputs", "targets", "segment_ids", "positions")}
    for family, kw in FAMILIES.items():
        attention = AttentionConfig(family, HEADS, head_dim=WIDTH, **kw)
        run = RunConfig(
            model=ModelConfig(512, 2, D, 512, attention, dtype="bfloat16"),
            data=DataConfig(context_length=T, batch_size=B),
            mesh=MeshConfig(*MESH),
        )
        mesh = sharding.make_mesh(run.mesh, devices)
        sharding.check(run, mesh)
        model, optimizer = Transformer(run.model), optimizers.make(run.optimizer, 10)
        state = states.abstract(model, optimizer, 0, mesh)
        step = make_train_step(model, optimizer, optimizers.learning_rate(run.optimizer, 10), state, mesh)
        with jax.set_mesh(mesh):
            text = step.jitted.lower(state, batch).compile().as_text()
        sent = collectives.read(text, dict(mesh.shape))
        kernels = sorted(set(re.findall(r"splash_mha_[a-z]+_segmented", text)))
        print(json.dumps({"family": family, "kernels": kernels, "sent": [asdict(x) for x in sent]}), flush=True)


def test_tpus_gather_values_and_run_splash_attention():
    import collectives

    if absent := targets.missing("v5e"):
        pytest.skip(f"needs {', '.join(absent)}, from the extra `aot`")
    steps = targets.run(__file__, TOPOLOGY)
    assert [step["family"] for step in steps] == list(FAMILIES)
    _, fsdp, _, context = MESH
    gathered = {}
    for step in steps:
        stream = STREAMS[step["family"]]
        shared = [x for x in stream if len(x) == 1]
        allowed = collectives.Expected(
            B // fsdp, T // context, T, stream, sums=((D,), *shared), unsplit=tuple((D, x[-1]) for x in shared)
        )
        sent = [
            collectives.Collective(**{**x, "shape": tuple(x["shape"]), "axes": x["axes"] and tuple(x["axes"])})
            for x in step["sent"]
        ]
        assert set(step["kernels"]) == SPLASH
        assert not (strange := [str(x) for x in sent if x not in allowed]), "\n".join(strange)
        gathered[step["family"]] = collectives.context_bytes(sent)["forward"]
    assert gathered["gva"] / gathered["gqa"] == (WIDTH + R) / (2 * WIDTH)


if __name__ == "__main__":
    compile_steps(sys.argv[1])
