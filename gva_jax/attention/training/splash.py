"""Training attention on TPUs by JAX's splash attention: tiles stay on the chip, blocks above the diagonal are skipped.

The kernel takes grouped heads (head h reads group h // (H // G)) and values of another width than keys, so absorbed GVA
runs as it is, keys [v | k_rope] of width d + r and values of width d. It does not scale, and takes whole blocks only.

Letters: B batch, T positions of queries, S of keys, H query heads, G groups, dk and dv widths of keys and values.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from gva_jax.attention.training.common import KEPT, Shard, pad_tokens, without_padding

LANES = 128
BLOCK = 512  # positions of queries and of keys a tile, fewer where T is shorter


def refusal(q, k, v, segment_ids) -> str | None:
    dtypes = {str(x.dtype) for x in (q, k, v)}
    if dtypes not in ({"bfloat16"}, {"float32"}):
        return f"q, k and v are {', '.join(sorted(dtypes))}: must all be bfloat16 or all float32"
    T, S = q.shape[1], k.shape[1]
    if T != S and T % LANES:  # padding would lie between the stretches
        return f"a device has {T} of the sequence's {S} positions: must be a multiple of {LANES}"
    return None


def attention(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B S G dk"],
    v: Float[Array, "B S G dv"],
    segment_ids: Int[Array, "B S"] | None,
    scale: float,
    interpret: bool = False,
    shard: Shard | None = None,
) -> Float[Array, "B T H dv"]:
    """See `gva_jax.attention.dispatch.training_attention`."""
    T, ids = q.shape[1], segment_ids
    if shard is None:
        block = min(BLOCK, -(-T // LANES) * LANES)
        size = -(-T // block) * block
        q, k, v, ids = pad_tokens(size, q, k, v, ids)
        mine, key, index = ids, (size, q.shape[2], block, 1, interpret), None
    else:
        block = next(size for size in range(BLOCK, 0, -LANES) if T % size == 0)
        mine = segment_ids = None if ids is None else shard.own(ids)
        key, index = (k.shape[1], q.shape[2], block, shard.count, interpret), shard.index
    B, _, H, _ = q.shape
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)  # after the transposition: its gradient's is not float32's
    y = _folded(key, q, k, v, mine, ids, index)
    return without_padding(y[:, :T].reshape(B, T, H, -1), segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _folded(key, q: Float[Array, "B H T dk"], k, v, mine, ids, index) -> Float[Array, "B T _"]:
    """The kernel `_kernel(*key)`, (B, T, H dv). Its output is also what its gradient needs, and is kept as it is
    returned: one row of all heads a token, since a minor axis of dv = 64 occupies 128 lanes, twice the memory in every
    layer.
    """
    return _fold(_run(key, q, k, v, mine, ids, index))


def _forward(key, q, k, v, mine, ids, index):
    y, pull = jax.vjp(lambda *operands: _run(key, *operands, mine, ids, index), q, k, v)
    folded = checkpoint_name(_fold(y), KEPT)
    leaves, tree = jax.tree.flatten(pull)
    known = lambda leaf: any(leaf is x for x in (q, k, v)) or not jnp.issubdtype(leaf.dtype, jnp.floating)
    leaves = [None if x is y else x if known(x) else checkpoint_name(x, KEPT) for x in leaves]  # the log-sum-exp
    return folded, (jax.tree.unflatten(tree, leaves), folded)


def _backward(key, kept, dy):
    pull, folded = kept
    unfold = lambda x: x.reshape(*x.shape[:2], key[1], -1).swapaxes(1, 2)
    pull = jax.tree.map(lambda leaf: unfold(folded) if leaf is None else leaf, pull, is_leaf=lambda x: x is None)
    return *pull(unfold(dy)), None, None, None


_folded.defvjp(_forward, _backward)


def _fold(y):
    """(B, H, T, dv) to (B, T, H dv)."""
    return y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], -1)


def _run(key, q, k, v, mine, ids, index):
    """The kernel `_kernel(*key)` on (B, H or G, positions, width); with `index`, on that stretch of its queries."""
    kernel = _kernel(*key)
    if index is not None:
        kernel = _rows(kernel, Shard(index, key[3]))
    return jax.vmap(kernel)(q, k, v, None if ids is None else splash.SegmentIds(q=mine, kv=ids))


class _CausalMask(splash.CausalMask):
    """The same mask, faster to look through: a block off the diagonal is told by its corners."""

    def __getitem__(self, at) -> np.ndarray:
        rows, columns = at
        shape = rows.stop - rows.start, columns.stop - columns.start
        if rows.start >= columns.stop - 1:
            return _filled(shape, True)
        if rows.stop - 1 < columns.start:
            return _filled(shape, False)
        return super().__getitem__(at)


@functools.cache
def _filled(shape: tuple[int, int], value: bool) -> np.ndarray:
    return np.full(shape, value)


@functools.cache
def _kernel(size: int, heads: int, block: int, shards: int, interpret: bool):
    """The kernel of a sequence length, its queries in `shards` stretches. How its blocks lie to the diagonal is found
    on the host, in time that grows with T squared: once, not at every trace.
    """

    def make():
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([_CausalMask((size, size))] * heads),
            # Of the two backward passes not the fused one: it keeps dq once a block of keys.
            block_sizes=splash.BlockSizes(
                block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block,
                block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=shards,
            residual_checkpoint_name=KEPT,
            interpret=interpret,
        )  # fmt: skip
        return jax.tree.map(np.asarray, kernel)

    # In a thread of its own no trace is active, so that what is kept are arrays, not one trace's tracers.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _rows(kernel, shard: Shard):
    """The kernel of one stretch of queries: its rows of what the kernel of all knows about each block."""

    def of(mask):
        blocks = ("data_next", "mask_next", "block_mask")  # (1, blocks of queries, blocks of keys)
        axes = {**dict.fromkeys(blocks, 1), "q_sequence": 0}
        found = {name: (getattr(mask, name), axis) for name, axis in axes.items()}
        return mask._replace(**{n: shard.own(jnp.asarray(x), axis) for n, (x, axis) in found.items() if x is not None})

    masks, settings = kernel.tree_flatten()
    return type(kernel).tree_unflatten(settings, [of(mask) for mask in masks])
