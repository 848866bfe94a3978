"""The Triton kernel's own: splits, one-byte caches, what is read, the default, refusals. Interpreted, without a GPU."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import F32, LENGTHS, B, Case, Run, S, assert_same_bits, brute_force, error, make, plain_einsum, rms_error

from gva_jax.kernels import decode_attention, pallas_triton


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    """Three splits a row, some of them empty where the row is short."""
    monkeypatch.setattr(pallas_triton, "SPLIT", 128)


def kernel(case: Case, dtype=F32, **options) -> Run:
    return Run(case, "pallas_triton", dtype, interpret=True, **options)


@pytest.mark.parametrize("x64", [False, True])
def test_one_split_needs_no_merge(x64, monkeypatch):
    """And with x64 on, 64-bit lengths and no `q_lengths`, float32 stays what it is."""
    monkeypatch.setattr(pallas_triton, "PROGRAMS", 0)
    case = Case(6, 2, T=2, d=16, keys=24, r=16, window=130)
    operands = make(case, F32) | {"q_lengths": np.full(B, 2)}
    given = operands | {"q_lengths": None, "lengths": LENGTHS.astype(np.int64 if x64 else np.int32)}
    for a, b in zip(kernel(case, x64=x64)(given), brute_force(case, **operands), strict=True):
        assert error(a, b) < 2e-6


def test_float16_is_no_worse_than_a_plain_einsum():
    case, dtype = Case(6, 2, d=64, r=16), jnp.dtype("float16")
    operands = make(case, dtype) | {"lengths": np.full(B, S, np.int32), "q_lengths": np.ones(B, np.int32)}
    truth, _ = brute_force(case, **operands)
    found, _ = kernel(case, dtype)(operands)
    plain = jax.device_get(jax.jit(functools.partial(plain_einsum, case, dtype=dtype))(operands))
    assert rms_error(found, truth) <= 1.5 * rms_error(plain, truth)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_of_float8(dtype):
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.dtype(dtype))
    assert_same_bits([pallas_triton._widen(every, F32)], [np.asarray(every).astype(np.float32)])


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_dead_blocks_are_not_read(monkeypatch):
    """With the masks of the cache's loads taken away, NaN shows in every block that is read, and in no other."""
    case, block, triton = Case(16, 1, d=16, window=100), 128, pallas_triton.plt

    def load(ref, *, mask, other):
        return triton.load(ref) if ref.shape == (block, 16) else triton.load(ref, mask=mask, other=other)

    unmasked = types.SimpleNamespace(load=load, store=triton.store, CompilerParams=triton.CompilerParams)
    monkeypatch.setattr(pallas_triton, "plt", unmasked)
    operands, run = make(case, F32) | {"q_lengths": np.ones(B, np.int32)}, kernel(case)
    clean = run(operands)
    length, token = np.clip(LENGTHS, 0, S)[:, None], np.arange(S)
    read = (token < -(-length // block) * block) & (token >= np.maximum(LENGTHS[:, None] - 100, 0) // block * block)
    nan = lambda where: operands | {"values": np.where(where[:, None, :, None], np.nan, operands["values"])}
    assert_same_bits(clean, run(nan(~read)))
    out, _ = run(nan(read & (token >= length)))
    np.testing.assert_array_equal(np.isnan(out).any((1, 2, 3)), (read & (token >= length)).any(1))


@pytest.mark.parametrize(("keys", "loads"), [(None, {"values": 1}), (80, {"values": 1, "keys": 1})])
def test_a_step_loads_each_tile_once(keys, loads, monkeypatch):
    """The values too, which are keys at the same time; splits and blocks part the tokens, so once a step is once."""
    seen, triton = [], pallas_triton.plt
    widths = {128: "values", 80: "keys", 32: "rope_keys"}  # as they lie in memory

    def load(ref, *, mask, other):
        array = ref.ref if hasattr(ref, "ref") else ref
        if array.shape[-1] in widths and array.shape[-2] == S:
            seen.append(widths[array.shape[-1]])
        return triton.load(ref, mask=mask, other=other)

    counting = types.SimpleNamespace(load=load, store=triton.store, CompilerParams=triton.CompilerParams)
    monkeypatch.setattr(pallas_triton, "plt", counting)
    case = Case(4, 2, d=128, r=32, keys=keys)
    kernel(case)(make(case, F32))
    assert {name: seen.count(name) for name in set(seen)} == loads | {"rope_keys": 1}


def traced(B, S, *, H=16, G=4, d=64, dtype="bfloat16", cache=None, layout="tokens_major", **options):
    """The kernel's equation in the program for an H100, or None where another implementation is the default."""
    shape = jax.ShapeDtypeStruct
    values = shape((B, G, *((S, d) if layout == "tokens_major" else (d, S))), cache or dtype)
    call = functools.partial(decode_attention, scale=1.0, layout=layout, **options)
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        jaxpr = jax.make_jaxpr(lambda q, v, lengths: call(q, v, lengths=lengths))(
            shape((B, 1, H, d), dtype), values, shape((B,), "int32")
        )
    return next((e for e in jaxpr.eqns if e.primitive.name == "pallas_call"), None)


@pytest.mark.parametrize(("B", "S", "splits"), [(1, 131072, 132), (1, 8192, 32), (16, 32768, 8), (256, 131072, 1)])
def test_small_batches_fill_the_card(B, S, splits, monkeypatch):
    monkeypatch.undo()
    assert traced(B, S).outvars[0].aval.shape[0] == splits


# ---- the default, and refusals ---------------------------------------------------------------------------------------


def test_the_default_on_gpus_where_it_can_run():
    assert traced(2, 384)
    assert not traced(2, 380)
    assert not traced(2, 384, layout="tokens_minor")
    with jax.enable_x64(True):
        assert not traced(2, 384, dtype="float64")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"S": 380}, "values have 380 tokens: must be a multiple of 128"),
        ({"layout": "tokens_minor"}, "layout = 'tokens_minor': must be tokens_major"),
        ({"dtype": "float8_e5m2"}, "q is float8_e5m2: must be one of float32, bfloat16, float16"),
        ({"cache": "int16"}, "values are int16: must be one of float32"),
        ({"B": 64, "S": 2**17 + 128, "cache": "int8"}, "elements of one byte: must be at most 2\\^31, or more than"),
        ({"interpret": "races"}, "interpret = 'races': must be True or False"),
    ],
)
def test_what_it_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        traced(**{"B": 2, "S": 384, "implementation": "pallas_triton"} | change)


def test_one_byte_caches_beside_the_refused_sizes():
    assert traced(64, 2**17, cache="int8") and traced(128, 2**17 + 128, cache="int8")


def test_another_platform_is_refused():
    q, values = jnp.ones((1, 1, 4, 16)), jnp.ones((1, 2, 128, 16))
    call = functools.partial(decode_attention, q, values, lengths=jnp.array([3]), scale=1.0)
    with pytest.raises(ValueError, match="pallas_triton runs on GPUs, the target is cpu: pass interpret=True"):
        call(implementation="pallas_triton")


def test_a_jax_without_the_backend_is_refused(monkeypatch):
    monkeypatch.setattr(pallas_triton, "plt", None)
    with pytest.raises(ValueError, match="no longer has the Pallas Triton backend; use pallas_mosaic_gpu or xla"):
        traced(2, 384, implementation="pallas_triton")
    assert not traced(2, 384)
