"""Training attention on TPUs by JAX's splash attention: tiles stay on the chip, blocks above the diagonal are skipped.

The kernel takes grouped heads (head h reads group h // (H // G)) and values of another width than keys, so absorbed GVA
runs as it is, keys [v | k_rope] of width d + r and values of width d. It does not scale, and takes whole blocks only.

Letters: B batch, T positions, H query heads, G groups, dk and dv widths of keys and values.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from gva_jax.attention.training.common import KEPT, pad_tokens, without_padding

LANES = 128
BLOCK = 512  # positions of queries and of keys a tile, fewer where T is shorter


def refusal(q, k, v, segment_ids) -> str | None:
    dtypes = {str(x.dtype) for x in (q, k, v)}
    if dtypes not in ({"bfloat16"}, {"float32"}):
        return f"q, k and v are {', '.join(sorted(dtypes))}: must all be bfloat16 or all float32"
    return None


def attention(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B T G dk"],
    v: Float[Array, "B T G dv"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B T H dv"]:
    """See `gva_jax.attention.dispatch.training_attention`."""
    T, ids = q.shape[1], segment_ids
    block = min(BLOCK, -(-T // LANES) * LANES)
    size = -(-T // block) * block
    B, _, H, _ = q.shape
    q, k, v, ids = pad_tokens(size, q, k, v, ids)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)  # after the transposition: its gradient's is not float32's
    y = _folded((size, H, block, interpret), q, k, v, ids)
    return without_padding(y[:, :T].reshape(B, T, H, -1), segment_ids)


def _run(key, q, k, v, ids):
    return jax.vmap(_kernel(*key))(q, k, v, None if ids is None else splash.SegmentIds(q=ids, kv=ids))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _folded(key, q: Float[Array, "B H T dk"], k, v, ids) -> Float[Array, "B T H*dv"]:
    """The kernel `_kernel(*key)`. Its output is also what its gradient needs, and is kept as it is returned: one row of
    all heads a token, since a minor axis of dv = 64 occupies 128 lanes, twice the memory in every layer.
    """
    return _fold(_run(key, q, k, v, ids))


def _forward(key, q, k, v, ids):
    y, pull = jax.vjp(lambda *operands: _run(key, *operands, ids), q, k, v)
    folded = checkpoint_name(_fold(y), KEPT)
    leaves, tree = jax.tree.flatten(pull)
    known = lambda leaf: any(leaf is x for x in (q, k, v)) or not jnp.issubdtype(leaf.dtype, jnp.floating)
    leaves = [None if x is y else x if known(x) else checkpoint_name(x, KEPT) for x in leaves]  # the log-sum-exp
    return folded, (jax.tree.unflatten(tree, leaves), folded)


def _backward(key, kept, dy):
    pull, folded = kept
    unfold = lambda x: x.reshape(*x.shape[:2], key[1], -1).swapaxes(1, 2)
    pull = jax.tree.map(lambda leaf: unfold(folded) if leaf is None else leaf, pull, is_leaf=lambda x: x is None)
    return *pull(unfold(dy)), None


_folded.defvjp(_forward, _backward)


def _fold(y):
    """(B, H, T, dv) to (B, T, H dv)."""
    return y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], -1)


@functools.cache
def _kernel(size: int, heads: int, block: int, interpret: bool):
    """The kernel of a sequence length. How its blocks lie to the diagonal is found on the host, in time that grows with
    T squared (half a second at 4,096 positions): once, not at every trace.
    """

    def make():
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([splash.CausalMask((size, size))] * heads),
            # Of the two backward passes not the fused one: it keeps dq once a block of keys.
            block_sizes=splash.BlockSizes(
                block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block,
                block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )  # fmt: skip
        return jax.tree.map(np.asarray, kernel)

    # In a thread of its own no trace is active, so that what is kept are arrays, not one trace's tracers.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
