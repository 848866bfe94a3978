"""Bytes that splitting the sequence moves in one layer of a training step, family by family, as a table in Markdown.

    python tests/aot/context_bytes.py cpu         on 8 simulated devices, float32
    python tests/aot/context_bytes.py v5e:2x4     compiled for a TPU slice that is not here, bfloat16

The attention of the 350M configs, 8,192 tokens over a context axis of 8; scanned layers, which the program's text holds
once. What is sent back is counted before it is summed and scattered.
"""

import os
import sys
from pathlib import Path

# Before JAX is imported.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import collectives  # noqa: E402
import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from gva_jax import sharding  # noqa: E402
from gva_jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, RunConfig  # noqa: E402
from gva_jax.model import Transformer  # noqa: E402
from gva_jax.train import optimizer as optimizers  # noqa: E402
from gva_jax.train import state as states  # noqa: E402
from gva_jax.train.step import make_train_step  # noqa: E402

T, WAYS = 8192, 8
ROWS = {  # name: family, its fields, scalars a token by the formula
    "GQA": ("gqa", dict(num_kv_heads=4), 2 * 4 * 64),
    "GVA, r = 16": ("gva", dict(num_kv_heads=4, rope_dim=16, q_norm=True), 4 * 64 + 16),
    "GVA, r = 24": ("gva", dict(num_kv_heads=4, rope_dim=24, q_norm=True), 4 * 64 + 24),
    "GVA, full RoPE": ("gva", dict(num_kv_heads=4, q_norm=True), 4 * 64),
    "MLA, c = 256, r = 16": ("mla", dict(latent_dim=256, rope_dim=16), 256 + 16),
}


def sent(family: str, fields: dict, devices, dtype: str) -> dict[str, int]:
    """See `collectives.context_bytes`."""
    run = RunConfig(
        model=ModelConfig(512, 2, 1024, 1024, AttentionConfig(family, 16, head_dim=64, **fields), dtype=dtype),
        data=DataConfig(context_length=T, batch_size=1),
        mesh=MeshConfig(1, 1, 1, WAYS),
    )
    mesh = sharding.make_mesh(run.mesh, devices)
    model, optimizer = Transformer(run.model), optimizers.make(run.optimizer, 10)
    state = states.abstract(model, optimizer, 0, mesh)
    step = make_train_step(model, optimizer, optimizers.learning_rate(run.optimizer, 10), state, mesh)
    batch = {part: jax.ShapeDtypeStruct((1, T), "int32") for part in ("inputs", "targets", "segment_ids", "positions")}
    with jax.set_mesh(mesh):
        text = step.jitted.lower(state, batch).compile().as_text()
    return collectives.context_bytes(collectives.read(text, dict(mesh.shape)))


def main(where: str) -> None:
    here = where == "cpu"
    devices = jax.devices() if here else topologies.get_topology_desc(where, "tpu").devices
    dtype, size = ("float32", 4) if here else ("bfloat16", 2)
    print(f"{where}, {dtype}, JAX {jax.__version__}\n")
    heads = "", "by the formula", "gathered, forward", "of GQA's", "gathered again", "sent back", "integers"
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    whole = None
    for name, (family, fields, scalars) in ROWS.items():
        found = sent(family, fields, devices, dtype)
        whole = whole or found["forward"]
        again, back = found["gathered again"], found["sent back"] * WAYS
        print(f"| {name} | {scalars * size * T:,} | {found['forward']:,} | {found['forward'] / whole} | "
              f"{again:,} | {back:,} | {found['integers']:,} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
