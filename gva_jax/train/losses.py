"""Cross-entropy over the vocabulary.

Where a device's logits are small they are made whole. Where they are not (8 sequences of 2,048 tokens over a vocabulary
of 32,768 are 2 GiB in float32) a loop makes them for a few tokens at a time, together with their gradients, so that
nothing of the vocabulary's width is kept or computed twice: 6 V D FLOPs a token as without the loop.

Letters: B batch, T positions, N tokens of a device, D model width, V vocabulary.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from gva_jax.compat import wide_dtype
from gva_jax.model import Transformer
from gva_jax.sharding import AXES, spec

LOGIT_BYTES = 128 * 2**20  # of one device, in memory at once
TILE = 128  # tokens of a chunk are a multiple of it


def summed_loss(model: Transformer, params, batch: dict[str, Int[Array, "B T"]], rngs=None) -> Float[Array, ""]:
    """Negative log-likelihood in nats, summed over all targets whose segment id is above 0."""
    inputs = dict(positions=batch["positions"], segment_ids=batch["segment_ids"], rngs=rngs)
    targets, counted = batch["targets"], batch["segment_ids"] > 0
    if _logit_bytes(model, targets.shape) <= LOGIT_BYTES:
        logits = model.apply({"params": params}, batch["inputs"], **inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.where(counted, losses, 0).sum()
    x = model.apply({"params": params}, batch["inputs"], **inputs, method="hidden")
    return linear_cross_entropy(x, model.output_matrix(params), targets, counted)


def _logit_bytes(model: Transformer, shape: tuple[int, int]) -> int:
    """Of one device; rows, positions and the vocabulary are split over the active mesh."""
    ways = math.prod(_active_axes().values())
    return math.prod(shape) * model.config.vocab_size * wide_dtype(jnp.dtype(model.config.dtype))(0).itemsize // ways


def _active_axes() -> dict[str, int]:
    """Axes of the active mesh that split anything; none where its axes are not those of `gva_jax.sharding`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names):
        return {}
    return {axis: size for axis, size in mesh.shape.items() if axis in AXES and size > 1}


@jax.custom_vjp
def linear_cross_entropy(
    x: Float[Array, "B T D"], matrix: Float[Array, "V D"], targets: Int[Array, "B T"], counted: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Summed cross-entropy of logits `x matrix^T`, which are never whole. Gradients reach `x` and `matrix`.

    On a mesh every device works on its own tokens: the matrix is gathered once, in the dtype of `x`, and its gradient
    summed over devices once, in that dtype too, rather than once a chunk. The vocabulary stays split over tensor.
    """
    return _over_mesh(x, matrix, targets, counted, gradients=False)[0]


def _forward(x, matrix, targets, counted):
    loss, gradients = _over_mesh(x, matrix, targets, counted, gradients=True)
    # Both or none: that of the matrix must not wait, whole, until the layers' gradients are done.
    return loss, jax.lax.optimization_barrier(gradients)


def _backward(gradients, g):
    dx, dmatrix = ((d.astype(g.dtype) * g).astype(d.dtype) for d in gradients)
    return dx, dmatrix, None, None


linear_cross_entropy.defvjp(_forward, _backward)


def _over_mesh(x, matrix, targets, counted, gradients: bool):
    """The loss, and its gradients to `x` and `matrix` where asked for."""
    manual = tuple(axis for axis in _active_axes() if axis != "tensor")
    work = functools.partial(_work, axes=manual, gradients=gradients)
    if not manual:
        return work(x, matrix, targets, counted)
    present = lambda *logical: P(*(_only(entry, manual) for entry in spec(*logical)))
    tokens, wide, whole = present("batch", "sequence"), present("batch", "sequence", None), present(None, "embed")
    run = jax.shard_map(
        work,
        in_specs=(wide, whole, tokens, tokens),
        out_specs=(P(), (wide, whole) if gradients else None),
        axis_names=set(manual),
        check_vma=False,
    )
    return run(x, matrix, targets, counted)


def _only(entry, axes):
    """An entry of a partition, of which only `axes` are left."""
    entry = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(axis for axis in entry if axis in axes) or None


def _work(x, matrix, targets, counted, axes: tuple[str, ...], gradients: bool):
    """`_over_mesh` on one device's share; over fsdp the matrix comes, and its gradient leaves, split over D."""
    wide, param_dtype = wide_dtype(x.dtype), matrix.dtype
    matrix = matrix.astype(x.dtype)
    if "fsdp" in axes:
        matrix = jax.lax.all_gather(matrix, "fsdp", axis=1, tiled=True)
    (V, D), N, vocab_ways = matrix.shape, math.prod(targets.shape), _active_axes().get("tensor", 1)
    count = max(1, -(-N * V * jnp.dtype(wide).itemsize // (LOGIT_BYTES * vocab_ways)))
    size = min(N, -(-N // count // TILE) * TILE)
    count = -(-N // size)

    def pieces(a, *width):
        a = jnp.pad(a.reshape(N, *width), [(0, count * size - N)] + [(0, 0)] * len(width))
        return a.reshape(count, size, *width)

    def step(carry, piece):
        x, targets, counted = piece
        logits = jnp.einsum("ND,VD->NV", x, matrix, preferred_element_type=wide)
        if vocab_ways > 1:
            logits = jax.lax.with_sharding_constraint(logits, P(None, "tensor"))
        top = logits.max(axis=-1, keepdims=True)
        weights = jnp.exp(logits - top)
        total = weights.sum(axis=-1, keepdims=True)
        hit = jnp.arange(V) == targets[:, None]  # rather than an index, for which a split vocabulary would be gathered
        losses = (jnp.log(total) + top)[:, 0] - jnp.where(hit, logits, 0).sum(axis=-1)
        loss = carry[0] + jnp.where(counted, losses, 0).sum()
        if not gradients:
            return (loss, None), None
        dlogits = jnp.where(counted[:, None], weights / total - hit, 0).astype(x.dtype)
        dx = jnp.einsum("NV,VD->ND", dlogits, matrix)
        return (loss, carry[1] + jnp.einsum("NV,ND->VD", dlogits, x, preferred_element_type=wide)), dx

    start = jnp.zeros((), wide), jnp.zeros((V, D), wide) if gradients else None
    (loss, dmatrix), dx = jax.lax.scan(step, start, (pieces(x, D), pieces(targets), pieces(counted)))
    if axes:
        loss = jax.lax.psum(loss, axes)
    if not gradients:
        return loss, None
    dx, dmatrix = dx.reshape(-1, D)[:N].reshape(x.shape), dmatrix.astype(x.dtype)
    if "fsdp" in axes:
        dmatrix = jax.lax.psum_scatter(dmatrix, "fsdp", scatter_dimension=1, tiled=True)
    if others := tuple(axis for axis in axes if axis != "fsdp"):
        dmatrix = jax.lax.psum(dmatrix, others)
    return loss, (dx, dmatrix.astype(param_dtype))
