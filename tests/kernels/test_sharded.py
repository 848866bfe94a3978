"""Decode attention over simulated meshes: one device and many give the same, and what cannot be split is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gva_jax.kernels import decode_attention, sharded_decode_attention

B, T, H, G, d, r, S = 4, 2, 8, 4, 16, 8, 512
CACHE_ARRAYS = ("values", "rope_keys", "value_scales")
WIDE = dict(rtol=2e-5, atol=2e-6)


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def problem(layout="tokens_major", groups=G, with_keys=False, pages=False):
    keys = iter(jax.random.split(jax.random.key(7), 12))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    pick = (lambda x: x) if layout == "tokens_major" else (lambda x: x.swapaxes(-1, -2))
    page, count = (128, 20) if pages else (S, B)
    args = dict(
        q=normal(B, T, H, d),
        values=pick(normal(count, groups, page, d)),
        q_rope=normal(B, T, H, r),
        rope_keys=pick(normal(count, page, r)),
        lengths=jnp.array([500, 0, 130, 1]),
        q_lengths=jnp.array([2, 1, 2, 1]),
        sinks=normal(H),
        value_scales=jnp.abs(normal(count, groups, page)) + 0.1,
    )
    if with_keys:
        args |= dict(keys=pick(normal(count, groups, page, d)), key_scales=jnp.abs(normal(count, groups, page)) + 0.1)
    if pages:
        args["page_table"] = jax.random.permutation(next(keys), count)[: B * 4].reshape(B, 4)
    return args, dict(scale=0.3, layout=layout, window=300, softcap=20.0)


@pytest.mark.parametrize("layout", thinned(["tokens_major", "tokens_minor"], 2))
@pytest.mark.parametrize(
    "axes",
    [dict(tensor=4), dict(context=4), dict(data=2, tensor=2, context=2), dict(data=2, fsdp=2, tensor=2)],
    ids=lambda axes: "x".join(f"{k}{v}" for k, v in axes.items()),
)
def test_many_devices_equal_one(axes, layout):
    args, options = problem(layout, with_keys="data" in axes)
    devices = int(np.prod(list(axes.values())))
    where = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes),
                          devices=jax.devices()[:devices])  # fmt: skip
    out, lse = decode_attention(**args, **options)
    out_mesh, lse_mesh = jax.jit(lambda a: sharded_decode_attention(**a, **options, mesh=where))(args)
    np.testing.assert_allclose(out_mesh, out, **WIDE)
    np.testing.assert_allclose(lse_mesh, lse, **WIDE)
    assert np.isfinite(out_mesh).all() and float(jnp.abs(out).max()) > 0.1


@pytest.mark.long
def test_one_group_is_replicated():
    args, options = problem(groups=1)
    out, lse = decode_attention(**args, **options)
    out_mesh, lse_mesh = sharded_decode_attention(**args, **options, mesh=mesh(tensor=4, context=2))
    np.testing.assert_allclose(out_mesh, out, **WIDE)
    np.testing.assert_allclose(lse_mesh, lse, **WIDE)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("pages", [False, True])
def test_inside_a_shard_map_of_the_callers_own(implementation, pages):
    """Which checks what varies over the mesh, unless told not to."""
    args, options = problem(pages=pages)
    out, lse = decode_attention(**args, **options)
    names = ("q", "q_rope", "lengths", "q_lengths") + (("page_table",) if pages else CACHE_ARRAYS)
    where = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    specs = {name: P("data") if name in names else P() for name in args}
    run = jax.shard_map(
        lambda a: decode_attention(**a, **options, implementation=implementation),
        mesh=where, in_specs=(specs,), out_specs=P("data"),
    )  # fmt: skip
    out_mesh, lse_mesh = jax.jit(run)(args)
    np.testing.assert_allclose(out_mesh, out, **WIDE)
    np.testing.assert_allclose(lse_mesh, lse, **WIDE)


def test_pages():
    args, options = problem(pages=True)
    out, _ = decode_attention(**args, **options)
    out_mesh, _ = sharded_decode_attention(**args, **options, mesh=mesh(data=2, tensor=4))
    np.testing.assert_allclose(out_mesh, out, **WIDE)
    with pytest.raises(ValueError, match="page ids are global"):
        sharded_decode_attention(**args, **options, mesh=mesh(tensor=4, context=2))


@pytest.mark.parametrize(
    ("implementation", "layout"), [("pallas_tpu", "tokens_minor"), ("pallas_triton", "tokens_major")]
)
def test_kernels_of_accelerators_interpreted(implementation, layout):
    args, options = problem(layout)
    out, lse = decode_attention(**args, **options)
    options |= {"implementation": implementation, "interpret": True}
    run = jax.jit(lambda a: sharded_decode_attention(**a, **options, mesh=mesh(tensor=4, context=2)))
    out_mesh, lse_mesh = run(args)
    np.testing.assert_allclose(out_mesh, out, **WIDE)
    np.testing.assert_allclose(lse_mesh, lse, **WIDE)


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        (dict(tensor=8), "4 groups over mesh axis tensor of 8"),
        (dict(data=8), "4 batch over mesh axis"),
    ],
)
def test_what_does_not_divide_is_refused(axes, told):
    args, options = problem()
    with pytest.raises(ValueError, match=told):
        sharded_decode_attention(**args, **options, mesh=mesh(**axes))


def test_only_outputs_cross_the_network():
    args, options = problem()
    del options["window"]
    run = jax.jit(lambda a: sharded_decode_attention(**a, **options, mesh=mesh(tensor=4, context=2)))
    text = run.lower(args).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text and "all-reduce" in text
