"""Decode attention on Pallas' Mosaic GPU backend (JAX 0.11 and later): Hopper and later cards, tokens-major caches.

One program reads the live tokens of a few groups, or a share of them where the batch alone would not fill the card,
block by block in an online softmax. The copy engine brings each block of values once; it is used twice, as keys and as
values. Tokens are the products' long side and queries the short one, so that few queries waste no tensor cores. The
programs that share a row (splits) leave normalised float32 partials and their lse, merged afterwards.
"""

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gva_jax.cache import MULTIPLE
from gva_jax.compat import compute_capability, multiprocessors, target_platform
from gva_jax.kernels.merge import merge_splits, with_sinks
from gva_jax.kernels.pallas_mosaic_gpu import plan as planning

QUERY_DTYPES = tuple(jnp.dtype(t) for t in ("bfloat16", "float16"))
ONE_BYTE = tuple(jnp.dtype(t) for t in ("int8", "float8_e4m3fn", "float8_e5m2"))
INTERPRETED = (9, 0)  # the card that is simulated


class Operands(NamedTuple):
    """What the kernel reads, in GPU memory. Caches have a row per token: of a page, then of each group, of each page.

    P counts pages, or rows of the batch where there is no page table.
    """

    q: Any  # (B G, T H/G, d), more rows where that makes whole tiles of 8
    q_rope: Any  # (B G, T H/G, r) or None
    values: Any  # (P G page, dv)
    keys: Any  # (P G page, d) or None: the values
    rope_keys: Any  # (P page, r) or None
    value_scales: Any  # (P G page,) or None
    key_scales: Any  # (P G page,) or None: the values', where those are the keys
    page_table: Any  # (B N,) or None
    lengths: Any  # (B,)
    q_lengths: Any  # (B,) or None: all T
    ends: Any  # (B tiles, columns): what each query row sees lies before it; None where T = 1 makes that the length


class Options(NamedTuple):
    """Constants of the kernel beside its sizes."""

    scale: float
    window: int | None
    softcap: float | None
    splits: int
    out_dtype: Any


def decode_attention(
    q, values, *, keys=None, q_rope=None, rope_keys=None, lengths, q_lengths=None, scale, window=None, softcap=None,
    sinks=None, value_scales=None, key_scales=None, page_table=None, layout, interpret=False,
):  # fmt: skip
    """See `gva_jax.kernels.decode_attention`.

    Raises:
      ValueError: what this implementation cannot run (see `refusal`), or a target that is no GPU without `interpret`.
    """
    if not interpret and target_platform() != "gpu":
        target = target_platform()
        raise ValueError(f"pallas_mosaic_gpu runs on GPUs, the target is {target}: pass interpret=True there")
    capability = INTERPRETED if interpret else compute_capability()
    if why := refusal(q, values, keys=keys, rope_keys=rope_keys, layout=layout, capability=capability):
        raise ValueError(f"pallas_mosaic_gpu: {why}")
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # not in every JAX that imports this

    if not isinstance(interpret, bool | InterpretGPUParams):
        raise ValueError(f"pallas_mosaic_gpu: interpret = {interpret!r}: must be True, False or an InterpretGPUParams")
    plan = planning.make(capability, q, values, keys, rope_keys, scaled=value_scales is not None)
    capacity = plan.page * (1 if page_table is None else page_table.shape[1])
    splits = plan.splits(capacity, multiprocessors())
    whole = splits == 1 and sinks is None
    window = None if window is None else min(window, 2**30)  # positions minus a window stay int32
    options = Options(scale, window, softcap, splits, q.dtype if whole else jnp.dtype("float32"))
    x = _operands(plan, q, values, keys, q_rope, rope_keys, value_scales, key_scales, page_table, lengths, q_lengths)
    out, lse = importlib.import_module(f"{__name__}.{plan.products.module}").attend(plan, options, x, interpret)
    out, lse = (out[0], lse[0]) if splits == 1 else merge_splits(out, lse)
    out, lse = _by_query(plan, out)[..., : plan.values.width], _by_query(plan, lse)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks, x.q_lengths)
    return out.astype(q.dtype), lse


def refusal(q, values, *, keys=None, rope_keys=None, layout, capability=None) -> str | None:
    """Why this implementation cannot run on these operands, or None.

    `capability`: the card's, by default that of the card that computations are meant for.
    """
    if jax.__version_info__ < (0, 11):
        return f"JAX {jax.__version__}: must be 0.11 or newer; use pallas_triton or xla"
    if layout != "tokens_major":
        return f"layout = {layout!r}: must be tokens_major"
    capability = capability or compute_capability()
    if capability is None or capability[0] not in planning.PRODUCTS:
        known = ", ".join(f"{major}.x" for major in planning.PRODUCTS)
        found = "unknown" if capability is None else ".".join(map(str, capability))
        return f"the card's compute capability is {found}: must be one of {known}; use pallas_triton"
    if values.shape[2] % MULTIPLE:
        return f"values have {values.shape[2]} tokens: must be a multiple of {MULTIPLE}"
    names = lambda dtypes: ", ".join(str(t) for t in dtypes)
    if q.dtype not in QUERY_DTYPES:
        return f"q is {q.dtype}: must be one of {names(QUERY_DTYPES)}, the tensor cores' own"
    for name, x in (("values", values), ("keys", keys), ("rope_keys", rope_keys)):
        if x is None:
            continue
        dtypes = (q.dtype, *ONE_BYTE) if q.dtype == jnp.bfloat16 and name != "rope_keys" else (q.dtype,)
        if x.dtype not in dtypes:
            return f"{name} are {x.dtype} beside q in {q.dtype}: must be one of {names(dtypes)}"
        if x.size // x.shape[-1] >= 2**31:
            return f"{name} have {x.size // x.shape[-1]} rows: must be below 2^31"
    scaled = values.dtype in ONE_BYTE or (keys is not None and keys.dtype in ONE_BYTE)
    plan = planning.make(capability, q, values, keys, rope_keys, scaled=scaled)
    return plan if isinstance(plan, str) else None


def _operands(plan, q, values, keys, q_rope, rope_keys, value_scales, key_scales, page_table, lengths, q_lengths):
    B, T, G, h = plan.B, plan.T, plan.G, plan.heads
    int32 = lambda a: None if a is None else a.astype(jnp.int32)
    lengths, q_lengths = int32(lengths), int32(q_lengths)

    def query(x):
        if x is None:
            return None
        x = x.astype(q.dtype).reshape(B, T, G, h, -1).swapaxes(1, 2).reshape(B * G, T * h, -1)
        extra = 0 if T * h < 8 else -T * h % 8  # the copy engine fills up one tile, not several
        return jnp.pad(x, ((0, 0), (0, extra), (0, 0))) if extra else x

    ends = None
    if T > 1:
        t = jnp.arange(plan.tiles * plan.rows, dtype=jnp.int32) // h
        real = jnp.full((B, 1), T, jnp.int32) if q_lengths is None else q_lengths[:, None]
        ends = jnp.where(t < real, lengths[:, None] - (real - 1 - t), 0).reshape(B * plan.tiles, plan.rows)
        ends = jnp.tile(ends, (1, plan.groups))
    tokens = lambda x: None if x is None else x.reshape(-1, x.shape[-1])
    scales = lambda x: None if x is None else x.astype(jnp.float32).reshape(-1)
    return Operands(
        query(q), query(q_rope), tokens(values), tokens(keys), tokens(rope_keys), scales(value_scales),
        scales(key_scales), None if page_table is None else int32(page_table).reshape(-1), lengths, q_lengths, ends,
    )  # fmt: skip


def _by_query(plan, x):
    """(programs, columns, ...) as (B, T, H, ...)."""
    B, T, H, G, h, rest = plan.B, plan.T, plan.H, plan.G, plan.heads, x.shape[2:]
    x = x.reshape(B, G // plan.groups, plan.tiles, plan.groups, plan.rows, *rest).swapaxes(2, 3)
    x = x.reshape(B, G, plan.tiles * plan.rows, *rest)[:, :, : T * h].reshape(B, G, T, h, *rest)
    return x.swapaxes(1, 2).reshape(B, T, H, *rest)
