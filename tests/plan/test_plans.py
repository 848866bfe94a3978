"""From a compiled text and its sizes to what a plan says: times, MFU, memory, and whether it fits."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gva_jax import sharding
from gva_jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, RunConfig
from gva_jax.info import describe
from gva_jax.plan import topologies
from gva_jax.plan.program import Compiled
from gva_jax.plan.report import COLUMNS, notes, plan, row

TOPOLOGY = topologies.parse("v5e:2x2")
PEAK, BANDWIDTH, MEMORY = 197e12, 819e9, 16e9  # of a v5e, bfloat16

# One product of 2 x 1024^3 FLOPs, and all four devices' parts of a matrix.
TEXT = """HloModule m

ENTRY %main (a: bf16[1024,1024], b: bf16[256,1024], c: s32[8,128]) -> bf16[1024,1024] {
  %a = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="state.params['w']"}
  %b = bf16[256,1024]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="state.opt_state['w']"}
  %c = s32[8,100]{1,0:T(8,128)} parameter(2), metadata={op_name="batch['inputs']"}
  %g = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-gather(%b), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %d = bf16[1024,1024]{1,0:T(8,128)(2,1)} dot(%a, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
SIZE = 2 * 1024 * 1024
SIZES = {"temporaries": 5 * 10**9, "outputs": 7_000, "aliased": 4_000, "code": 10**8, "peak": 4 * 10**9}


def config() -> RunConfig:
    attention = AttentionConfig("gqa", 4, 2, 16)
    model = ModelConfig(64, 2, 64, 128, attention)
    return RunConfig(name="tiny", model=model, data=DataConfig(context_length=32, batch_size=8),
                     mesh=MeshConfig(fsdp=4))  # fmt: skip


PLACES = [SimpleNamespace(id=i, coords=(i % 2, i // 2, 0), core_on_chip=0) for i in range(4)]


def planned(text: str = TEXT, sizes=(1, 4, 1, 1), **changes):
    mesh = SimpleNamespace(shape=dict(zip(sharding.AXES, sizes, strict=True)), axis_names=sharding.AXES,
                           devices=np.array(PLACES).reshape(sizes))  # fmt: skip
    compiled = Compiled(text, SIZES, "splash", {}, seconds=9.0)
    return plan(config(), TOPOLOGY, mesh, replace(compiled, **changes))


def test_times_are_those_of_the_chip_and_the_longest_bounds_the_step():
    one = planned()
    assert one.flops == {"matmul": 2 * 1024**3, "attention_kernels": 0, "total": 2 * 1024**3}
    assert one.hbm_bytes == 3 * SIZE and one.bytes_over == {"fsdp": SIZE * 3 / 4}
    assert one.seconds["flops"] == pytest.approx(2 * 1024**3 / PEAK)
    assert one.seconds["hbm"] == pytest.approx(3 * SIZE / BANDWIDTH)
    assert one.seconds["network"] > one.seconds["flops"]
    assert one.bound == max(one.seconds.values())
    model_flops = 8 * 32 * describe(config())["flops_per_token"]["training"]
    assert one.mfu == pytest.approx(model_flops / (4 * PEAK * one.bound))


def test_collectives_of_one_axis_follow_each_other_and_axes_go_on_at_once():
    gather = (
        "  %g{n} = bf16[1024,1024]{{1,0}} all-gather(%b), channel_id={n}, replica_groups={groups}, dimensions={{0}}\n"
    )
    along_x, along_y = "{{0,1},{2,3}}", "{{0,2},{1,3}}"
    more = [gather.format(n=n, groups=groups) for n, groups in ((2, along_x), (3, along_x), (4, along_y))]
    one = planned(TEXT.replace("  ROOT", "".join(more) + "  ROOT"), (1, 2, 2, 1))
    rows, columns = SIZE / 2, SIZE / 2  # what a device gets of a matrix from the other one
    assert one.bytes_over == {"fsdp x tensor": SIZE * 3 / 4, "tensor": 2 * rows, "fsdp": columns}
    times = [TOPOLOGY.seconds(nbytes, places, 2) for nbytes, places in ((2 * rows, PLACES[:2]), (columns, PLACES[::2]))]
    both = TOPOLOGY.seconds(SIZE * 3 / 4, PLACES, 4)
    assert one.seconds["network"] == pytest.approx(max(*times, both)) and times[0] > max(times[1], both)


def test_memory_is_all_that_the_program_needs_and_decides_on_what_fits():
    one = planned()
    assert one.memory["parameters"] == SIZE and one.memory["optimizer"] == SIZE // 4
    assert one.memory["batch"] == 4 * 8 * 128 and one.memory["padding"] == 4 * 8 * 28
    total = SIZE + SIZE // 4 + 4 * 8 * 128 + 3_000 + 5 * 10**9 + 10**8
    assert one.memory["total"] == total and one.fits
    rest = int(MEMORY) - total
    assert planned(memory=SIZES | {"temporaries": 5 * 10**9 + rest}).fits
    assert not planned(memory=SIZES | {"temporaries": 5 * 10**9 + rest + 1}).fits
    assert row(one, MEMORY)[COLUMNS.index("of memory")] == f"{total / MEMORY:.1%}"


def test_what_the_compiler_refuses_does_not_fit_and_is_told():
    one = planned("", memory={}, refused="Used 20.0G of 15.75G hbm")
    assert not one.fits and one.bound == float("inf") and row(one, MEMORY)[-1] == "no"
    assert any("Used 20.0G of 15.75G" in line for line in notes(config(), [one]))


def test_maps_that_are_not_split_are_told():
    one = planned(whole=("key_map (64 x 640) is whole on every device: fsdp = 256 divides neither axis",))
    assert any("fsdp=4: key_map (64 x 640) is whole" in line for line in notes(config(), [one]))
