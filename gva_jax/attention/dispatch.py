"""Which attention computation runs: over a training batch, and over a cache."""

import importlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.attention.layers import joined
from gva_jax.attention.training import sharded
from gva_jax.cache import Cache
from gva_jax.compat import target_platform
from gva_jax.config import ConfigError, check_training_implementation
from gva_jax.kernels import decode_attention

PREFILL_CHUNK = 128  # queries of a prompt whose scores are in memory at once
DECODE_QUERIES = 16  # the most new tokens a decode kernel takes at once

# Kernels of a platform, the best first; chunked where none serves. For an H100 tokamax before cuDNN: its Hopper kernels
# take absorbed GVA's two widths and a boolean mask as they are, where cuDNN pads values and reads the mask as a bias.
KERNELS = {"tpu": ("splash",), "gpu": ("tokamax", "cudnn")}


def training_attention(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B T G dc"] | None,
    v: Float[Array, "B T G dv"],
    *,
    k_rope: Float[Array, "B T r"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H dv"]:
    """Causal grouped attention; query head h reads group `h // (H // G)`. dk and dv may differ. Reverse-mode only.

    Args:
      k: keys. None: the values are the keys.
      k_rope: one more key per token, which all groups share and the last r columns of q meet; dk = dc + r.
      segment_ids: keep packed documents apart: a position sees its own segment only. A negative id is padding: it sees
        nothing, nothing sees it, its output is 0 and so are its gradients.
      scale: factor on the scores, `1/sqrt` of the width that was scored, not of an absorbed query's. The softmax is
        float32 (float64 for float64 inputs).
      implementation: `chunked` (plain XLA, anywhere), `splash` (TPU), `tokamax` or `cudnn` (GPU), see
        `gva_jax.attention.training`; None takes what `training_choice` says. Under an active mesh (`jax.set_mesh`)
        whose axes are those of `gva_jax.sharding`, kernels run under `shard_map`, each device on its rows and heads;
        where its context axis splits the sequence, all implementations do, each device on its queries as well.
      interpret: run `splash` in the Pallas interpreter, on any platform.

    Raises:
      ConfigError (a ValueError): a name that is none, or one that cannot run here, with the reason.
      ValueError: shapes that do not fit or are empty, naming the axis; heads that a mesh axis does not divide.
    """
    tokens = tuple(x for x in (k, v, k_rope) if x is not None)
    read = partial(_read, separate=k is not None)
    how = dict(segment_ids=segment_ids, scale=scale, implementation=implementation, interpret=interpret)
    return attention_from(q, tokens, read, **how)


def _read(*tokens, separate: bool):
    """Keys and values from `k` (if they are `separate`), `v` and, if there, `k_rope`."""
    k, v, *k_rope = tokens if separate else (tokens[0], *tokens)
    return joined(k, *k_rope), v


def attention_from(
    q: Float[Array, "B T H dk"],
    tokens: tuple[jax.Array, ...],
    read: Callable[..., tuple[jax.Array, jax.Array]],
    maps: tuple[Float[Array, "_ H _"], ...] = (),
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H dv"]:
    """`training_attention` over the keys (B, T, G, dk) and values (B, T, G, dv) that `read(*tokens, *maps)` makes.

    For families whose keys or values are larger than what they are made from: where a mesh splits the sequence,
    `tokens` are what travels, and `read` runs on what has arrived. Elsewhere it makes no difference.

    Args:
      tokens: arrays that `read` takes token by token: (B, T, G, w) by groups, (B, T, c) or (B, T) the same for all.
      read: gets all tokens, or those of a device's rows, groups and heads, so it goes by shapes only.
      maps: the weights that it reads with, by heads. A closure would not be split.
    """
    split = sharded.splits_sequence()
    k, v = jax.eval_shape(read, *tokens, *maps) if split else read(*tokens, *maps)
    _check_shapes(q, k, v, segment_ids)
    check_training_implementation(implementation)
    if implementation is None:
        implementation, _ = training_choice(q, k, v, segment_ids=segment_ids)
    elif (reason := _refusal(implementation, q, k, v, segment_ids, interpret)) is not None:
        raise ConfigError(f"training_implementation = {implementation!r}: {reason}")
    attention = partial(_module(implementation).attention, scale=float(scale), interpret=interpret)
    if split and sharded.refusal(q, k) is None:
        return sharded.over_context(attention, q, tokens, read, maps, segment_ids)
    if split:
        k, v = read(*tokens, *maps)
    if implementation == "chunked":  # which XLA splits by itself
        return attention(q, k, v, segment_ids)
    return sharded.over_mesh(attention, q, k, v, segment_ids)


def training_choice(q, k, v, *, segment_ids=None) -> tuple[str, dict[str, str]]:
    """The best implementation for these operands (or their shapes), and why each better one was passed over.

    The platform is the active mesh's, else the default backend's.
    """
    passed_over = {}
    for name in KERNELS.get(target_platform(), ()):
        if (reason := _refusal(name, q, k, v, segment_ids)) is None:
            return name, passed_over
        passed_over[name] = reason
    return "chunked", passed_over


def _refusal(name: str, q, k, v, segment_ids, interpret: bool = False) -> str | None:
    here = target_platform()
    meant = next((platform for platform, names in KERNELS.items() if name in names), here)
    if here != meant and not interpret:
        return f"runs on {meant.upper()}, the computation is meant for {here.upper()}"
    if name != "chunked" and (reason := sharded.refusal(q, k)) is not None:
        return reason
    whole = (sharded.share(x, sequence=None) for x in (k, v, segment_ids))
    return _module(name).refusal(sharded.share(q), *whole)


def _module(name: str):
    return importlib.import_module(f"gva_jax.attention.training.{name}")


def _check_positions(q) -> None:
    if q.shape[1] == 0:
        raise ValueError(f"q has shape {q.shape}: its axis 1, positions (T), is empty")


def _check_shapes(q, k, v, segment_ids) -> None:
    (B, T, H, dk), (G, dv) = q.shape, (k.shape[2], v.shape[3])
    _check_positions(q)
    if G == 0 or H % G:
        raise ValueError(f"q has {H} heads, k has {G} groups: groups must divide heads")
    for name, x, shape in (("k", k, (B, T, G, dk)), ("v", v, (B, T, G, dv)), ("segment_ids", segment_ids, (B, T))):
        if x is not None and x.shape != shape:  # an axis of 1 would be broadcast silently
            raise ValueError(f"{name} has shape {x.shape}, must be {shape} beside q {q.shape}")


def cached_attention(
    q: Float[Array, "B T H d"],
    cache: Cache,
    *,
    q_rope: Float[Array, "B T H r"] | None = None,
    new: Int[Array, "B"],
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B T H dv"]:
    """Row b's first `new[b]` queries, whose tokens were just appended, attend over all that is live before them.

    A few queries go to the decode kernel `implementation`; a prompt goes through in chunks. Outputs past `new[b]` are
    0; a row that overflowed its cache is NaN.

    Raises:
      ValueError: no queries.
    """
    _check_positions(q)
    T = q.shape[1]

    def attend(q, q_rope, lengths, new, implementation):
        out, _ = decode_attention(
            q, cache.values, keys=cache.keys, q_rope=q_rope, rope_keys=cache.rope_keys, lengths=lengths,
            q_lengths=new, scale=scale, value_scales=cache.value_scales, key_scales=cache.key_scales,
            page_table=cache.page_table, layout=cache.layout, implementation=implementation,
        )  # fmt: skip
        return out

    if T <= DECODE_QUERIES:
        out = attend(q, q_rope, cache.lengths, new, implementation)
    else:
        out = in_chunks(lambda q, lengths, new: attend(q[0], q[1], lengths, new, None), (q, q_rope), cache.lengths, new)
    return jnp.where(cache.overflowed[:, None, None, None], jnp.nan, out)


def in_chunks(attend, queries, lengths: Int[Array, "B"], new: Int[Array, "B"]):
    """Runs `attend(queries, lengths, new)` over chunks of the query axis (1) of the pytree `queries`, one at a time.

    `lengths` count the live tokens with all `new` ones; each chunk gets its own, as if later chunks had not come yet.
    """
    T = jax.tree.leaves(queries)[0].shape[1]
    count = -(-T // PREFILL_CHUNK)
    size = -(-T // count)  # chunks of equal size: little is padded

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - T)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    def step(_, chunk):
        start, queries = chunk
        here = jnp.clip(new - start, 0, size)
        return None, attend(queries, lengths - jnp.maximum(new - start - size, 0), here)

    starts = jnp.arange(count, dtype=lengths.dtype) * size
    _, out = jax.lax.scan(step, None, (starts, jax.tree.map(split, queries)))
    out = out.swapaxes(0, 1)
    return out.reshape(out.shape[0], count * size, *out.shape[3:])[:, :T]
