"""One optimiser step and one evaluation step, as jitted functions over a mesh.

A batch is a dictionary of int32 arrays (B, T): inputs, targets, segment_ids, positions. Targets with segment id 0 are
padding and do not count.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from gva_jax import sharding
from gva_jax.model import Transformer
from gva_jax.train import guard
from gva_jax.train import state as states
from gva_jax.train.losses import summed_loss
from gva_jax.train.state import TrainState

Batch = dict[str, Int[Array, "B T"]]


def check_attention(model: Transformer, abstract_state: TrainState, batch_shape: tuple[int, int], mesh: Mesh) -> None:
    """Traces the loss of one micro-batch (B, T) where training would run.

    Raises:
      ConfigError: the training attention that the config names cannot run there.
    """
    parts = ("inputs", "targets", "segment_ids", "positions")
    batch = {name: jax.ShapeDtypeStruct(batch_shape, jnp.int32) for name in parts}
    with jax.set_mesh(mesh):
        jax.eval_shape(lambda params, batch: summed_loss(model, params, batch), abstract_state.params, batch)


def train_function(
    model: Transformer,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    accumulation: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """`step(state, batch) -> (state, metrics)`, a pure function.

    The batch is worked through in `accumulation` micro-batches. Their gradients are summed with the whole batch's count
    of targets as denominator, so padding that is spread unevenly changes nothing.

    A step whose loss or gradients are not finite changes neither parameters nor optimiser (see `train.guard`; the
    optimiser is one of `optimizer.make`).

    Metrics are scalars: loss (mean nats per target), grad_norm (before clipping), learning_rate; skipped and
    skipped_in_a_row, counts of such steps.
    """

    def step(state: TrainState, batch: Batch):
        targets = jnp.maximum((batch["segment_ids"] > 0).sum(), 1)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)

        def micro(carry, piece):
            i, batch = piece
            rngs = {"dropout": jax.random.fold_in(key, i)} if model.config.dropout else None
            share = lambda params: summed_loss(model, params, batch, rngs) / targets
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(share)(state.params)), None

        if accumulation == 1:
            nothing = (0.0, jax.tree.map(lambda _: 0.0, state.params))
            (loss, grads), _ = micro(nothing, (0, batch))
        else:
            nothing = (jnp.zeros((), _loss_dtype(model)), jax.tree.map(jnp.zeros_like, state.params))
            pieces = jnp.arange(accumulation), jax.tree.map(split, batch)
            (loss, grads), _ = jax.lax.scan(micro, nothing, pieces)

        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, loss=loss)
        params = guard.apply_updates(state.params, updates, opt_state)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(state.step)),
            **guard.counts(opt_state),
        }
        return replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics

    def split(x):
        """(B, T) to (accumulation, B / accumulation, T), each micro-batch spread over all devices."""
        x = x.reshape(x.shape[0] // accumulation, accumulation, x.shape[1]).swapaxes(0, 1)
        return sharding.constrain(x, None, "batch", "sequence")

    return step


def make_train_step(
    model: Transformer,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    abstract_state: TrainState,
    mesh: Mesh,
    accumulation: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """`train_function` compiled for a mesh; the old state is donated."""
    declared = states.shardings(abstract_state)
    step = train_function(model, optimizer, schedule, accumulation)
    return _on(
        mesh,
        jax.jit(
            step,
            in_shardings=(declared, sharding.batch_sharding(mesh)),
            out_shardings=(declared, NamedSharding(mesh, P())),
            donate_argnums=0,
        ),
    )


def _loss_dtype(model: Transformer):
    return jnp.promote_types(model.config.dtype, jnp.float32)


def eval_function(model: Transformer, token_bytes: np.ndarray) -> Callable[[dict, Batch], jax.Array]:
    """`step(params, batch) -> (3,)`: nats, targets and bytes of text in the batch. `token_bytes` is (vocab,)."""

    def step(params, batch: Batch):
        nats = summed_loss(model, params, batch)
        counted = batch["segment_ids"] > 0
        text = jnp.where(counted, jnp.asarray(token_bytes)[batch["targets"]], 0)
        return jnp.stack([nats, counted.sum().astype(nats.dtype), text.sum().astype(nats.dtype)])

    return step


def make_eval_step(
    model: Transformer, abstract_state: TrainState, mesh: Mesh, token_bytes: np.ndarray
) -> Callable[[dict, Batch], jax.Array]:
    """`eval_function` compiled for a mesh."""
    step = eval_function(model, token_bytes)
    inputs = (states.shardings(abstract_state).params, sharding.batch_sharding(mesh))
    return _on(mesh, jax.jit(step, in_shardings=inputs, out_shardings=NamedSharding(mesh, P())))


def put(batch: dict[str, np.ndarray], mesh: Mesh) -> Batch:
    """The rows of a batch that this process loads (see `sharding.share`), whole sequences, as global arrays."""
    where, share = sharding.batch_sharding(mesh), sharding.share(mesh, jax.process_index())

    def place(x: np.ndarray) -> jax.Array:
        size = len(x) // len(share.blocks)

        def part(at: tuple[slice, slice]) -> np.ndarray:
            first = share.blocks.index((at[0].start or 0) // size) * size
            return x[first : first + size, at[1]]

        return jax.make_array_from_callback((len(x) * share.count, *x.shape[1:]), where, part)

    return {name: place(x) for name, x in batch.items()}


def _on(mesh: Mesh, jitted):
    """`jitted` under the mesh that its sharding constraints need."""

    def call(*args):
        with jax.set_mesh(mesh):
            return jitted(*args)

    call.jitted = jitted
    return call
