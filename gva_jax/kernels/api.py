"""The one entry to decode attention: its contract, the checks at the door, and the choice of an implementation."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from gva_jax.cache import LAYOUTS
from gva_jax.compat import compute_capability, target_platform

# Name -> module with a `decode_attention` of the same arguments, imported when it is first used.
IMPLEMENTATIONS = {
    "reference": "gva_jax.kernels.reference",
    "xla": "gva_jax.kernels.xla",
    "pallas_tpu": "gva_jax.kernels.pallas_tpu",
    "pallas_triton": "gva_jax.kernels.pallas_triton",
    "pallas_mosaic_gpu": "gva_jax.kernels.pallas_mosaic_gpu",
}


def check_implementation(name: str | None) -> None:
    """Raises `ValueError` for a name that is no implementation."""
    if name is not None and name not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation = {name!r}: must be one of {known}, or None for the best")


def decode_attention(
    q: Float[Array, "B T H d"],
    values: Num[Array, "BP G _ _"],
    *,
    keys: Num[Array, "BP G _ _"] | None = None,
    q_rope: Float[Array, "B T H r"] | None = None,
    rope_keys: Float[Array, "BP _ _"] | None = None,
    lengths: Int[Array, "B"],
    q_lengths: Int[Array, "B"] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    value_scales: Float[Array, "BP G _"] | None = None,
    key_scales: Float[Array, "BP G _"] | None = None,
    page_table: Int[Array, "B N"] | None = None,
    layout: str = "tokens_major",
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "B T H"]]:
    """Attention of a few new queries over cached tokens; the values are the keys unless `keys` is given.

        s[h] = (q[h]·k[g(h)] + q_rope[h]·rope_key) scale        g(h) = h // (H // G),  k = keys or values

    Args:
      q: queries, absorbed where the values are the keys (their width is then the values').
      values, keys, rope_keys: the cache in `layout` (see `gva_jax.cache`); keys may be of another width than values.
      q_rope: rotated queries that meet `rope_keys`; both or neither.
      lengths: valid cached tokens per row, the new ones included; may be <= 0 or exceed S.
      q_lengths: real queries per row, its first ones (default T). Query t sees positions
        `< lengths - (q_lengths - 1 - t)`.
      scale: factor on the scores; `1/sqrt` of the width that was scored, not of the absorbed width.
      window: see only the last `window` of the visible positions.
      softcap: scaled scores become `c tanh(s/c)`.
      sinks: extra logits, one per head, neither scaled nor capped, that take weight and give no value.
      value_scales, key_scales: one factor per group and token, (B, G, S), of int8 or fp8 values and keys. Without
        `keys`, the values' serve both products. Rotary keys are never scaled.
      page_table: (B, N) page of each row's n-th stretch of tokens. The cache's first axis then counts pages and its
        token axis is one page long: values (P, G, page, d), scales (P, G, page). Entries past the length may be
        anything.
      implementation: a name from `IMPLEMENTATIONS`, or None for the best on the device.
      interpret: run a Pallas implementation in an interpreter, True or that interpreter's parameters.

    Returns:
      out in q's dtype, and lse, the natural logarithm of the softmax's denominator (float32; float64 for float64
      inputs), so that partial results merge exactly. Queries that see nothing give out = 0 and lse = -inf (with a
      sink: lse = the sink); queries past `q_lengths` give 0 and -inf. What lies in dead slots, NaN included, has no
      influence.

    Raises:
      ValueError: shapes, layout or names that do not fit, naming the argument.
      TypeError: it is differentiated.
    """
    check_implementation(implementation)
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: must be one of {', '.join(LAYOUTS)}")
    for name, a, other, b in (("q_rope", q_rope, "rope_keys", rope_keys), ("keys", keys, "key_scales", key_scales)):
        if b is not None and a is None:
            raise ValueError(f"{other} is given without {name}: give both")
    if q_rope is not None and rope_keys is None:
        raise ValueError("q_rope is given without rope_keys: give both or neither")
    _check_shapes(q, values, keys, q_rope, rope_keys, lengths, q_lengths, sinks, value_scales, key_scales, page_table,
                  layout)  # fmt: skip
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} = {value}: must be above 0, or None")
    q, values, keys, q_rope, rope_keys, sinks, value_scales, key_scales = (
        None if x is None else _without_gradient(x)
        for x in (q, values, keys, q_rope, rope_keys, sinks, value_scales, key_scales)
    )
    module = importlib.import_module(IMPLEMENTATIONS[implementation or _best(q, values, keys, rope_keys, layout)])
    return module.decode_attention(
        q, values, keys=keys, q_rope=q_rope, rope_keys=rope_keys, lengths=lengths, q_lengths=q_lengths,
        scale=float(scale),  # NumPy's scalars would widen the scores where x64 is on
        window=window, softcap=None if softcap is None else float(softcap), sinks=sinks, value_scales=value_scales,
        key_scales=key_scales, page_table=page_table, layout=layout, interpret=interpret,
    )  # fmt: skip


def _best(q, values, keys, rope_keys, layout: str) -> str:
    names = {"tpu": ("pallas_tpu",), "gpu": ("pallas_triton",)}.get(target_platform(), ())
    if (compute_capability() or (0, 0))[0] in (9, 10):  # data-centre cards; on others Triton's compiler is better tried
        names = ("pallas_mosaic_gpu", *names)
    for name in names:
        module = importlib.import_module(IMPLEMENTATIONS[name])
        if module.refusal(q, values, keys=keys, rope_keys=rope_keys, layout=layout) is None:
            return name
    return "xla"


@jax.custom_jvp
def _without_gradient(x):
    return x


@_without_gradient.defjvp
def _refuse_gradient(primals, tangents):
    raise TypeError(
        "decode_attention has no gradient: it reads a cache. Differentiate the training forward instead: a module's "
        "__call__, or gva_jax.attention.dispatch.training_attention"
    )


def _check_shapes(q, values, keys, q_rope, rope_keys, lengths, q_lengths, sinks, value_scales, key_scales, page_table,
                  layout):  # fmt: skip
    for name, x in (("q", q), ("values", values)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}: must have 4 axes")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q is {q.dtype}: must be floating")
    for name, x in (("lengths", lengths), ("q_lengths", q_lengths), ("page_table", page_table)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} is {x.dtype}: must be an integer dtype")
    (B, T, H, d), (P, G) = q.shape, values.shape[:2]
    pick = lambda S, width: (S, width) if layout == "tokens_major" else (width, S)
    S, _ = pick(*values.shape[2:])
    _, key_width = pick(*(values if keys is None else keys).shape[2:])
    sizes = (
        ("rows", B),
        ("query tokens", T),
        ("heads", H),
        ("width", d),
        ("pages", P),
        ("groups", G),
        ("cached tokens", S),
    )
    for name, size in sizes:
        if size < 1:
            raise ValueError(f"{name} = {size} in q {q.shape}, values {values.shape}: must be 1 or more")
    if d != key_width:
        raise ValueError(f"q has width {d}, its keys {key_width}: an absorbed query has the values' width")
    if H % G:
        raise ValueError(f"q has {H} heads, values have {G} groups: groups must divide heads")
    if page_table is None:
        P = B
    elif page_table.ndim != 2 or page_table.shape[0] != B or not page_table.shape[1]:
        raise ValueError(f"page_table has shape {page_table.shape}, must be ({B}, N)")
    r = None if q_rope is None else q_rope.shape[-1]
    for name, x, shape in (  # an axis of 1 would be broadcast silently
        ("values", values, (P, *values.shape[1:])),
        ("keys", keys, (P, G, *pick(S, key_width))),
        ("q_rope", q_rope, (B, T, H, r)),
        ("rope_keys", rope_keys, (P, *pick(S, r))),
        ("lengths", lengths, (B,)),
        ("q_lengths", q_lengths, (B,)),
        ("sinks", sinks, (H,)),
        ("value_scales", value_scales, (P, G, S)),
        ("key_scales", key_scales, (P, G, S)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, must be {shape} beside q {q.shape}, values {values.shape}")
