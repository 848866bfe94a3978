"""What is read off compiled text: trips, shapes with their padding, FLOPs, collectives by axis, bytes of memory."""

import math

import jax
import jax.numpy as jnp
import pytest
import tiny
from cover import thinned

from gva_jax import sharding
from gva_jax.config import DataConfig, MeshConfig, OptimizerConfig, RunConfig, load
from gva_jax.info import describe
from gva_jax.plan import hlo
from gva_jax.plan.count import count, replica_groups, spanned
from gva_jax.plan.program import PARTS
from gva_jax.plan.report import activations, break_even, memory_of
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.step import make_train_step

MESH = {"data": 2, "fsdp": 4, "tensor": 2, "context": 1}
GROUPS = "replica_groups=[4,4]<=[2,4,2]T(0,2,1)"  # along fsdp

# A loop of 3 trips; in it a product and an all-gather, and a loop of 5 trips that holds a piece of the same all-gather.
NESTED = f"""HloModule test, is_scheduled=true

%piece (p: bf16[4,8]) -> bf16[16,8] {{
  %p = bf16[4,8]{{1,0}} parameter(0)
  ROOT %gathered.1 = bf16[16,8]{{1,0}} all-gather(%p), channel_id=7, {GROUPS}, dimensions={{0}}
}}

%inner_cond (a: (s32[], bf16[4,8])) -> pred[] {{
  %a = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %limit = s32[] constant(12)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}

%inner_body (a.1: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %a.1 = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%a.1), index=0
  %x.1 = bf16[4,8]{{1,0}} get-tuple-element(%a.1), index=1
  %fused = bf16[16,8]{{1,0}} fusion(%x.1), kind=kCustom, calls=%piece, frontend_attributes={{kernel_metadata={{
"note":"attributes of kernels go on over lines
}}}}, metadata={{op_name="x"}}
  %two = s32[] constant(2)
  %next = s32[] add(%i.1, %two)
  ROOT %out.1 = (s32[], bf16[4,8]{{1,0}}) tuple(%next, %x.1)
}}

%outer_cond (b: (s32[], bf16[4,8])) -> pred[] {{
  %b = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %limit.2 = s32[] constant(3)
  ROOT %greater = pred[] compare(%limit.2, %j), direction=GT
}}

%outer_body (b.1: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %b.1 = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %j.1 = s32[] get-tuple-element(%b.1), index=0
  %x.2 = bf16[4,8]{{1,0}} get-tuple-element(%b.1), index=1
  %gathered = bf16[16,8]{{1,0}} all-gather(%x.2), channel_id=7, {GROUPS}, dimensions={{0}}
  %product = bf16[4,16]{{1,0}} dot(%x.2, %gathered), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %start.1 = s32[] constant(2)
  %inner = (s32[], bf16[4,8]{{1,0}}) tuple(%start.1, %x.2)
  %loop.1 = (s32[], bf16[4,8]{{1,0}}) while(%inner), condition=%inner_cond, body=%inner_body
  %one = s32[] constant(1)
  %next.1 = s32[] add(%one, %j.1)
  ROOT %out.2 = (s32[], bf16[4,8]{{1,0}}) tuple(%next.1, %x.2)
}}

ENTRY %main (x: bf16[4,8]) -> (s32[], bf16[4,8]) {{
  %x = bf16[4,8]{{1,0}} parameter(0)
  %start = s32[] constant(0)
  %init = (s32[], bf16[4,8]{{1,0}}) tuple(%start, %x)
  ROOT %loop = (s32[], bf16[4,8]{{1,0}}) while(%init), condition=%outer_cond, body=%outer_body
}}
"""


def test_trips_multiply_and_a_channel_counts_once_a_trip_of_its_own_loop():
    program = hlo.parse(NESTED)
    ran = {name: times for name, times in program.times.items() if times}
    assert ran == {"main": 1, "outer_body": 3, "inner_body": 15, "piece": 15}
    counts = count(program, MESH)
    assert counts.matmul_flops == 3 * 2 * 4 * 16 * 8
    (gather,) = counts.collectives
    assert (gather.kind, gather.axes, gather.ways) == ("all-gather", ("fsdp",), 4)
    assert counts.bytes_over() == {"fsdp": 3 * 16 * 8 * 2 * 3 / 4}


def test_what_the_compiler_says_of_trips_is_believed_and_what_nobody_says_is_an_error():
    told = NESTED.replace(
        "condition=%outer_cond, body=%outer_body",
        'condition=%outer_cond, body=%outer_body, backend_config={"known_trip_count":{"n":"4"}}',
    )
    assert hlo.parse(told).times["outer_body"] == 4
    unknown = NESTED.replace("%start = s32[] constant(0)", "%start = s32[] negate(%x)")
    with pytest.raises(hlo.UnknownTrips, match="loop"):
        _ = hlo.parse(unknown).times


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[24,1024,64]{2,1,0:T(8,128)}", 24 * 1024 * 128 * 4),  # 64 lanes of 128
        ("f32[24,1024,64]{1,2,0:T(8,128)}", 24 * 1024 * 64 * 4),  # the other way round: nothing
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("f32[24,1024]{1,0}", 24 * 1024 * 4),
        ("s32[]{:T(128)}", 4),
        ("pred[7]{0}", 7),
    ],
)
def test_padding_is_that_of_the_layout(text, size):
    (array,) = hlo.arrays(text)
    assert array.padded_bytes == size


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}", ("tensor",)),
        ("replica_groups={{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}", ("data",)),
        (GROUPS, ("fsdp",)),
        ("replica_groups=[2,8]<=[8,2]T(1,0)", ("data", "fsdp")),
        ("replica_groups=[1,16]<=[16]", ("data", "fsdp", "tensor")),
        ("replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=2] {'fsdp'}", ("fsdp",)),
        ("replica_groups=mesh['a'=16] {'a':(2)4}", ("fsdp",)),
        ("replica_groups=mesh['a'=16] {'a':(1)2}", ("data",)),
        ("replica_groups={}", ("data", "fsdp", "tensor")),
    ],
)
def test_replica_groups_to_axes(groups, axes):
    found = replica_groups(f"channel_id=1, {groups}, use_global_device_ids=true", 16)
    assert sorted(n for group in found for n in group) == list(range(16))
    assert spanned(found, MESH) == axes
    assert {len(group) for group in found} == {math.prod(MESH[axis] for axis in axes)}


def test_what_lies_outside_a_convolutions_edges_is_not_counted():
    """A TPU's product of block-diagonal windows: 2 taps over 2 places, padded by 1 on both sides."""
    line = ("  ROOT %c = bf16[8,2,64]{2,1,0} convolution(%a, %b), window={size=2 pad=1_1 rhs_reversal=1}, "
            "dim_labels=b0f_i0o->b0f")  # fmt: skip
    text = f"""HloModule m

ENTRY %main (a: bf16[8,1,32], b: bf16[32,2,64]) -> bf16[8,2,64] {{
  %a = bf16[8,1,32]{{2,1,0}} parameter(0)
  %b = bf16[32,2,64]{{2,1,0}} parameter(1)
{line}
}}
"""
    assert count(hlo.parse(text), {"data": 1}).matmul_flops == 2 * 8 * 2 * 64 * 32


def test_a_slice_of_an_operand_and_an_update_in_place_move_no_more_than_themselves():
    text = """HloModule m

%fused (p: f32[10,100], q: f32[10,100], i: s32[]) -> f32[10,100] {
  %p = f32[10,100]{1,0} parameter(0)
  %q = f32[10,100]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,100]{1,0} dynamic-slice(%q, %i, %zero), dynamic_slice_sizes={1,100}
  ROOT %new = f32[10,100]{1,0} dynamic-update-slice(%p, %row, %i, %zero)
}

ENTRY %main (a: f32[10,100], b: f32[10,100], i: s32[]) -> f32[10,100] {
  %a = f32[10,100]{1,0} parameter(0)
  %b = f32[10,100]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %f = f32[10,100]{1,0} fusion(%a, %b, %i.1), kind=kLoop, calls=%fused
}
"""
    assert count(hlo.parse(text), {"data": 1}).hbm_bytes == 400 + 400 + 4  # read a row, write a row, an index


def test_so_does_a_slice_that_is_not_fused():
    text = """HloModule m

ENTRY %main (a: f32[10,100], i: s32[]) -> f32[1,100] {
  %a = f32[10,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,100]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,100}
}
"""
    assert count(hlo.parse(text), {"data": 1}).hbm_bytes == 400 + 400


def test_what_a_sparse_core_does_is_counted_once():
    text = """HloModule m

%gathered (p: bf16[1000,64], i: s32[20]) -> bf16[20,64] {
  %p = bf16[1000,64]{1,0} parameter(0)
  %i = s32[20]{0} parameter(1)
  ROOT %g = bf16[20,64]{1,0} gather(%p, %i), offset_dims={1}
}, execution_thread="sparsecore"

%called (p.1: bf16[1000,64], i.1: s32[20]) -> bf16[20,64] {
  %p.1 = bf16[1000,64]{1,0} parameter(0)
  %i.1 = s32[20]{0} parameter(1)
  ROOT %f = bf16[20,64]{1,0} fusion(%p.1, %i.1), kind=kCustom, calls=%gathered
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[1000,64], b: s32[20]) -> bf16[20,64] {
  %a = bf16[1000,64]{1,0} parameter(0)
  %b = s32[20]{0} parameter(1)
  %s = ((bf16[1000,64]{1,0}, s32[20]{0}), bf16[20,64]{1,0}, u32[]) call-start(%a, %b), async_execution_thread="sparsecore", to_apply=%called
  ROOT %d = bf16[20,64]{1,0} call-done(%s)
}
"""  # noqa: E501
    program = hlo.parse(text)
    assert set(program.computations) == {"gathered", "called", "main"}
    rows = 2 * 20 * 64
    assert count(program, {"data": 1}).hbm_bytes == rows + rows + 4 * 20  # read, written, and the indices


@pytest.mark.parametrize("batch", ["", "3,"])
def test_attention_kernels_of_one_sequence_and_of_several(batch):
    shapes = (f"bf16[{batch}16,1024,80]", f"bf16[{batch}4,1024,80]", f"bf16[{batch}4,1024,64]")
    q, k, v = (
        f"%{name} = {shape}{{0}} parameter({i})" for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))
    )
    text = f"""HloModule m

ENTRY %main () -> bf16[16] {{
  {q}
  {k}
  {v}
  %next = s8[1,2,2]{{2,1,0}} parameter(3)
  %ids = s32[1024,128]{{1,0}} parameter(4)
  %splash_mha_fwd.1 = bf16[16]{{0}} custom-call(%next, %next, %q, %k, %v, %ids), custom_call_target="tpu_custom_call"
  ROOT %splash_mha_dq.1 = bf16[16]{{0}} custom-call(%next, %next, %q, %k, %v, %ids), custom_call_target="tpu_custom_call"
}}
"""  # noqa: E501
    counts = count(hlo.parse(text), {"data": 1})
    pairs = 16 * 3 * 512 * 512 * (3 if batch else 1)  # three of four tiles of 512
    assert counts.kernel_flops == 2 * pairs * ((80 + 64) + (80 + 64 + 80))
    assert counts.kernel_calls == {"splash_mha_fwd": 1, "splash_mha_dq": 1}


# ---- the real step, compiled here ------------------------------------------------------------------------------------

B, T = 4, 24
ATTENTION = tiny.ATTENTION | {
    "gva materialised": tiny.replaced("gva", form="materialised"),
    "gva full rope": tiny.replaced("gva", rope_dim=None),
}


def compiled(family="gva", devices=1, **model):
    """(config, program, what the compiler says of memory)"""
    config = tiny.make(num_layers=3, attention=ATTENTION[family], **model).config
    mesh = MeshConfig(data=1, fsdp=devices)
    run = RunConfig(model=config, data=DataConfig(context_length=T, batch_size=B), mesh=mesh)
    on = sharding.make_mesh(run.mesh, jax.devices()[:devices])
    transformer, optimizer = tiny.Transformer(config), optimizers.make(OptimizerConfig(), 10)
    state = states.abstract(transformer, optimizer, 0, on)
    step = make_train_step(transformer, optimizer, optimizers.learning_rate(OptimizerConfig(), 10), state, on)
    with jax.set_mesh(on):
        done = step.jitted.lower(state, {p: jax.ShapeDtypeStruct((B, T), jnp.int32) for p in PARTS}).compile()
    return run, hlo.parse(done.as_text()), done.memory_analysis()


def widths(run):
    """Of the keys and of the values that a query meets in training."""
    attention = run.model.attention
    d, r = attention.head_dim, attention.rope_dim
    absorbed = attention.family == "gva" and attention.form == "absorbed" and r is not None
    return d + (r if absorbed else 0), d


def by_hand(run, recomputed=0):
    """Matrix products of a step: every matrix three times a token, attention's two forward and five backward."""
    model = run.model
    parts, (dk, dv) = describe(run)["parameters_by_part"], widths(run)
    # One chunk: the whole square.
    scores = 2 * B * model.attention.num_heads * T * T * ((dk + dv) + (3 * dk + 2 * dv))
    layers = parts["attention"] + parts["mlp"]
    return B * T * 6 * (layers + parts["embedding"]) + model.num_layers * scores + 2 * B * T * recomputed


@pytest.mark.parametrize("family", thinned(ATTENTION, 2))
def test_matmul_flops_are_those_of_the_formula(family):
    run, program, _ = compiled(family)
    assert count(program, {"data": 1}).flops == by_hand(run)


@pytest.mark.parametrize("remat", ["attention", "full"])
def test_rematerialisation_computes_all_again_but_the_last_product_and_what_is_kept(remat):
    run, program, _ = compiled(remat=remat)
    parts, model = describe(run)["parameters_by_part"], run.model
    again = parts["attention"] + model.num_layers * 2 * model.model_dim * model.hidden_dim
    flops = by_hand(run, again)
    if remat == "full":  # with it the weighted sums; the scores are those that attention's own backward pass makes
        flops += model.num_layers * 2 * B * model.attention.num_heads * T * T * widths(run)[1]
    assert count(program, {"data": 1}).flops == flops


@pytest.mark.parametrize("remat", ["attention", "full"])
def test_memory_is_that_of_the_state_and_of_what_layers_leave(remat):
    run, program, sizes = compiled(remat=remat)
    reported = dict(outputs=sizes.output_size_in_bytes, aliased=sizes.alias_size_in_bytes, peak=0, code=0,
                    temporaries=sizes.temp_size_in_bytes)  # fmt: skip
    memory = memory_of(program, reported)
    parameters = describe(run)["parameters"]
    assert memory["parameters"] == 4 * parameters
    assert 0 <= memory["optimizer"] - 8 * parameters < 64  # counters and the random key
    assert memory["batch"] == 4 * 4 * B * T
    # A layer's input, attention's result of all heads, the log-sum-exp of each head.
    model, heads = run.model, run.model.attention.num_heads
    width = model.model_dim + (remat == "attention") * (heads * run.model.attention.head_dim + heads)
    assert activations(program) == model.num_layers * B * T * width * 4


def test_on_a_mesh_devices_share_the_products_and_gather_parameters_only():
    run, program, _ = compiled("gqa", 4)
    counts = count(program, {"data": 1, "fsdp": 4, "tensor": 1, "context": 1})
    assert counts.flops == by_hand(run) / 4
    assert set(counts.bytes_over()) == {"fsdp"}


# ---- what a plan says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "r", "four", "five"), [("gva_350m", 16, 1_151, 921), ("gva_350m_r24", 24, 767, 613)])
def test_the_context_at_which_absorbed_gva_costs_what_gqa_does(name, r, four, five):
    config = load(name)
    # Saved a layer and token: the key projection but for M and the rotated key, 6 FLOPs a parameter. Paid: the products
    # over the keys' width, r wider, over half the square of the context.
    saved = 1024 * 4 * 64 - 16 * 64 * (64 - r) - 1024 * r
    for products, told in ((4, four), (5, five)):
        context = break_even(config, products)
        assert 6 * saved == pytest.approx(products * 16 * r * (context + 1)) and round(context) == told


def test_no_context_is_told_where_keys_are_not_absorbed():
    assert break_even(load("gqa_350m"), 4) is break_even(load("gva_350m_baseline"), 4) is None
