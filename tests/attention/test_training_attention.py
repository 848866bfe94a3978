"""Training attention: every implementation that runs here against float64, which one is chosen, over a mesh, refusals.

Splash attention is simulated by the Pallas interpreter. Calls to cuDNN and tokamax are checked with another backend of
the same function: what is handed over and what comes back is judged, not their kernels.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from variants import VARIANTS, D, inputs, relative, weights

from gva_jax import sharding
from gva_jax.attention import GroupedValueAttention
from gva_jax.attention.dispatch import KERNELS, cached_attention, training_attention, training_choice
from gva_jax.attention.training import chunked, cudnn, splash, tokamax
from gva_jax.config import AttentionConfig, ConfigError, MeshConfig, ModelConfig
from gva_jax.model import Transformer

F32, BF16 = jnp.float32, jnp.bfloat16


@dataclass(frozen=True)
class Case:
    T: int
    H: int
    G: int
    dk: int
    dv: int
    segmented: bool
    B: int = 2
    scale: float = 0.3

    def __str__(self):
        return f"T={self.T},H={self.H},G={self.G},{self.dk}/{self.dv}{',segments' * self.segmented}"


CASES = [
    Case(300, 4, 2, 80, 64, True),  # absorbed GVA; three blocks of splash attention, the last one not full
    Case(129, 6, 2, 16, 16, False),  # GQA, three heads a group; one token more than a block
    Case(128, 3, 3, 24, 24, True),  # MHA
    Case(127, 4, 1, 12, 43, False),  # MQA; values wider than keys, no width a multiple of 8
    Case(1, 2, 1, 8, 8, True),
]


def operands(case: Case, dtype=F32):
    """q, k, v, and segment ids with two documents of unequal length a row, then padding of two kinds."""
    B, T = case.B, case.T
    shapes = (B, T, case.H, case.dk), (B, T, case.G, case.dk), (B, T, case.G, case.dv)
    q, k, v = (inputs(*shape, dtype=np.float32, seed=seed).astype(dtype) for seed, shape in enumerate(shapes))
    ids = None
    if case.segmented:
        rows = [[7] * (T // 3 + b) + [3] * T for b in range(B)]
        ids = np.array([row[:T] for row in rows], np.int32)
        if T > 1:
            ids[:, T - T // 5 :], ids[0, -2:] = -1, -4
    return q, k, v, None if ids is None else jnp.asarray(ids)


def expected(q, k, v, ids, dy, scale):
    """Output and gradients in float64: all scores, one after the other."""
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    ids = None if ids is None else np.asarray(ids)
    shared = q.shape[2] // k.shape[2]
    of_head = lambda x: np.repeat(x, shared, axis=2)
    of_group = lambda x: x.reshape(*x.shape[:2], -1, shared, x.shape[3]).sum(3)
    seen = np.tril(np.ones((q.shape[1],) * 2, bool))[None, None]
    if ids is not None:
        seen = seen & ((ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None])[:, None]
    s = np.where(seen, np.einsum("bthd,bshd->bhts", q, of_head(k)) * scale, -np.inf)
    p = np.exp(s - np.where(seen.any(-1, keepdims=True), s.max(-1, keepdims=True), 0))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    y = np.einsum("bhts,bshd->bthd", p, of_head(v))
    dp = np.einsum("bthd,bshd->bhts", dy, of_head(v))
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    dq, dk = np.einsum("bhts,bshd->bthd", ds, of_head(k)), np.einsum("bhts,bthd->bshd", ds, q)
    return y, dq, of_group(dk), of_group(np.einsum("bhts,bthd->bshd", p, dy))


def run(attend, q, k, v, ids, scale):
    """Output and gradients, for output gradients that differ everywhere."""

    @jax.jit
    def both(q, k, v):
        y, pull = jax.vjp(lambda *a: attend(*a, ids, scale), q, k, v)
        return y, *pull(cotangent(y))

    return jax.device_get(both(q, k, v))


def cotangent(y):
    return jnp.sin(1 + jnp.arange(y.size, dtype=F32)).reshape(y.shape).astype(y.dtype)


def simulated(q, k, v, ids, scale):
    return training_attention(q, k, v, segment_ids=ids, scale=scale, implementation="splash", interpret=True)


@pytest.fixture(params=["chunked", "splash", "cudnn", "tokamax"])
def attend(request, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)
    monkeypatch.setattr(chunked, "CHUNK", 100)
    if request.param == "splash":
        return simulated
    if request.param == "cudnn":
        monkeypatch.setattr(cudnn, "BACKEND", "xla")
        return cudnn.attention
    if request.param == "tokamax":
        pytest.importorskip("tokamax", exc_type=ImportError)
        monkeypatch.setattr(tokamax, "BACKEND", "xla")
        return tokamax.attention
    return chunked.attention


@pytest.mark.parametrize("case", thinned(CASES, 2), ids=str)
def test_values_and_gradients_equal_float64(case, attend):
    q, k, v, ids = operands(case)
    found = run(attend, q, k, v, ids, case.scale)
    truth = expected(q, k, v, ids, cotangent(found[0]), case.scale)
    for a, b in zip(found, truth, strict=True):
        assert np.isfinite(a).all()
        assert relative(a, b) < 4e-6 if np.abs(b).max() > 1e-9 else np.abs(a).max() < 1e-5
    if ids is not None and case.T > 1:
        for x in found:
            assert (x[ids < 0] == 0).all(), "padding has an output or a gradient"
        wrong = expected(q, k, v, np.maximum(ids, 0), cotangent(found[0]), case.scale)
        assert all(relative(a, b) > 1e-2 for a, b in zip(found, wrong, strict=True)), "a wrong mask would pass"


def test_padding_reaches_nothing(attend):
    case = CASES[0]
    q, k, v, ids = operands(case)
    padding = (ids < 0)[..., None, None]
    noisy = [jnp.where(padding, 50 * x[:, ::-1], x) for x in (q, k, v)]
    for a, b in zip(run(attend, q, k, v, ids, case.scale), run(attend, *noisy, ids, case.scale), strict=True):
        np.testing.assert_array_equal(a, b)


def test_lower_precision(attend):
    case = CASES[0]
    q, k, v, ids = operands(case, BF16)
    found = run(attend, q, k, v, ids, case.scale)
    assert {x.dtype for x in found} == {jnp.dtype(BF16)}
    for a, b in zip(found, expected(q, k, v, ids, cotangent(found[0]), case.scale), strict=True):
        assert relative(a, b) < 1.5e-2


# ---- over a mesh -----------------------------------------------------------------------------------------------------


@functools.cache
def on_one_device(case: Case):
    return run(simulated, *operands(case), case.scale)


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(Case(40, 4, 2, 24, 16, True), MeshConfig(data=2, tensor=2), marks=pytest.mark.long),
        (Case(33, 4, 1, 16, 16, False), MeshConfig(data=2, tensor=2)),  # one group: every device has it
        (Case(40, 4, 2, 24, 16, True, B=4), MeshConfig(data=2, fsdp=2, tensor=2)),
    ],
    ids=str,
)
def test_many_devices_equal_one(case, mesh):
    with jax.set_mesh(sharding.make_mesh(mesh, jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor])):
        many = run(simulated, *operands(case), case.scale)
    for a, b in zip(many, on_one_device(case), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_each_device_works_on_its_own_share():
    q, k, v, ids = operands(Case(40, 4, 2, 24, 16, True))
    with jax.set_mesh(sharding.make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])):
        jaxpr = jax.make_jaxpr(functools.partial(simulated, scale=1.0))(q, k, v, ids)
    [mapped] = [e for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    shares = [x.aval.shape for x in mapped.params["jaxpr"].invars]
    assert shares[-4:] == [(1, 40, 2, 24), (1, 40, 1, 24), (1, 40, 1, 16), (1, 40)]


def test_inside_a_shard_map_of_the_users():
    case = Case(40, 4, 2, 24, 16, False)
    q, k, v, _ = operands(case)
    mesh = jax.make_mesh((2,), ("mine",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        rows = P("mine")
        call = lambda q, k, v, ids, scale: jax.shard_map(
            lambda q, k, v: simulated(q, k, v, None, scale), in_specs=rows, out_specs=rows, check_vma=False
        )(q, k, v)
        found = run(call, q, k, v, None, case.scale)
    for a, b in zip(found, on_one_device(case), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


# ---- which implementation --------------------------------------------------------------------------------------------


def meant_for(platform: str, **axes: int):
    """A context in which computations are meant for devices that are not here."""
    kind = {"tpu": "TPU v5 lite", "gpu": "NVIDIA H100 80GB HBM3"}[platform]
    axes = axes or {"one": 1}
    types = (AxisType.Auto,) * len(axes)
    device = AbstractDevice(kind, 1, platform)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def choice(dtype=BF16, B=4, H=4, G=2, T=64):
    shape = lambda heads, width: jax.ShapeDtypeStruct((B, T, heads, width), dtype)
    return training_choice(shape(H, 80), shape(G, 80), shape(G, 64), segment_ids=jax.ShapeDtypeStruct((B, T), "int32"))


def test_splash_attention_on_tpus():
    assert choice() == ("chunked", {})
    with meant_for("tpu"):
        assert choice() == choice(F32) == ("splash", {})
        name, passed_over = choice("float16")
        assert name == "chunked" and "must all be bfloat16 or all float32" in passed_over["splash"]
    with meant_for("tpu", data=2, fsdp=1, tensor=2, context=1):
        assert choice() == choice(G=1) == ("splash", {})


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        (dict(data=1, context=3), "a sequence of 64 over context = 3: must be a multiple of it"),
        (dict(data=8), "a batch of 4 over data x fsdp = 8: must be a multiple of it"),
        (dict(x=2), "the mesh has the axis 'x', which is none of data, fsdp, tensor, context"),
    ],
)
def test_meshes_that_only_xla_splits(axes, told):
    q, k, v, ids = operands(Case(64, 4, 2, 80, 64, True, B=4), BF16)
    with meant_for("tpu", **axes):
        assert choice() == ("chunked", {"splash": told})
        with pytest.raises(ConfigError, match=f"training_implementation = 'splash': {told}"):
            training_attention(q, k, v, segment_ids=ids, scale=1.0, implementation="splash")


def test_heads_that_the_mesh_does_not_divide():
    with meant_for("tpu", tensor=4), pytest.raises(ValueError, match="2 groups over mesh axis tensor = 4"):
        choice()
    with meant_for("tpu", tensor=4), pytest.raises(ValueError, match="6 heads over mesh axis tensor = 4"):
        choice(H=6, G=1)


def test_gpus_take_what_serves_and_say_why_not():
    with meant_for("gpu"):
        name, passed_over = choice()
        better = [*KERNELS["gpu"], "chunked"]
        assert list(passed_over) == better[: better.index(name)] and all(passed_over.values())
        name, passed_over = choice("float64")  # which no kernel takes
        assert name == "chunked" and list(passed_over) == list(KERNELS["gpu"])


def test_gpus_take_tokamax_before_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "refusal", lambda *a: None)
    monkeypatch.setattr(tokamax, "refusal", lambda *a: "not today")
    with meant_for("gpu"):
        assert choice() == ("cudnn", {"tokamax": "not today"})
        monkeypatch.setattr(tokamax, "refusal", lambda *a: None)
        assert choice() == ("tokamax", {})


@pytest.mark.parametrize("name", ["splash", "cudnn", "tokamax"])
def test_a_named_one_that_cannot_run_says_why(name):
    q, k, v, _ = operands(CASES[2])
    with pytest.raises(ValueError, match=rf"{name}': runs on (TPU|GPU), the computation is meant for CPU"):
        training_attention(q, k, v, scale=1.0, implementation=name)
    with pytest.raises(ValueError, match="'flash': must be one of chunked, splash, tokamax, cudnn, or None"):
        training_attention(q, k, v, scale=1.0, implementation="flash")


@pytest.mark.parametrize(("name", "kernels"), [(None, True), ("chunked", False)])
def test_a_config_can_force_chunked(name, kernels):
    attention = AttentionConfig("gva", 4, 2, 8, rope_dim=4, training_implementation=name)
    model = Transformer(ModelConfig(61, 2, 16, 24, attention, dtype="bfloat16"))
    tokens = jax.ShapeDtypeStruct((2, 10), "int32")
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    with meant_for("tpu"):
        assert ("pallas_call" in str(jax.make_jaxpr(model.apply)(variables, tokens))) == kernels


def test_a_module_is_initialised_anywhere_and_trained_where_it_can_be():
    module, x = GroupedValueAttention(2, 1, 8, rope_dim=4, training_implementation="splash"), jnp.ones((1, 3, 8))
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    with pytest.raises(ConfigError, match="splash': runs on TPU, the computation is meant for CPU"):
        jax.eval_shape(module.apply, variables, x)
    with pytest.raises(ConfigError, match="training_implementation = 'flash': must be one of"):
        GroupedValueAttention(2, 1, 8, rope_dim=4, training_implementation="flash")


# ---- the door --------------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit():
    q, k, v, _ = operands(Case(6, 4, 2, 8, 8, False))
    call = functools.partial(training_attention, scale=1.0)
    with pytest.raises(ValueError, match=r"q has shape \(2, 0, 4, 8\): its axis 1, positions \(T\), is empty"):
        call(q[:, :0], k[:, :0], v[:, :0])
    with pytest.raises(ValueError, match="q has 3 heads, k has 2 groups"):
        call(q[:, :, :3], k, v)


@pytest.mark.parametrize("name", ["gqa", "mla", "gva_16", "gva_full"])
def test_no_tokens(name):
    module = VARIANTS[name]()
    variables, x = weights(module), jnp.zeros((2, 0, D))
    cache, told = module.init_cache(2, 128), r"x has shape \(2, 0, 24\): its axis 1, tokens \(T\), is empty"
    for call in (
        lambda: module.apply(variables, x),
        lambda: module.apply(variables, x, cache, lengths=jnp.zeros(2, jnp.int32), method="prefill"),
        lambda: module.apply(variables, x, cache, method="decode"),
    ):
        with pytest.raises(ValueError, match=told):
            call()
    if name == "gqa":
        with pytest.raises(ValueError, match=r"q has shape \(2, 0, 4, 8\): its axis 1, positions \(T\), is empty"):
            cached_attention(jnp.zeros((2, 0, 4, 8)), cache, new=jnp.zeros(2, jnp.int32), scale=1.0)
