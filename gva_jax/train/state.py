"""What a training run carries from step to step, and how it is split over a mesh."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from gva_jax import sharding
from gva_jax.model import Transformer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes. `step` counts finished steps; `rng` is the raw key of the run."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    rng: jax.Array


def initial(model: Transformer, optimizer: optax.GradientTransformation, seed) -> TrainState:
    """The state at step 0. Equal seeds give parameters of equal path and shape equal draws. `seed` may be traced."""
    init_key, run_key = jax.random.split(jax.random.key(seed))
    params = model.init(init_key, jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key_data(run_key))


def abstract(model: Transformer, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and declared shardings of a run's state; allocates nothing."""
    shapes = jax.eval_shape(lambda: initial(model, optimizer, seed))
    shardings = sharding.state_shardings(shapes, model.config, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def shardings(abstract_state: TrainState) -> TrainState:
    """The declared sharding of each array of `abstract`'s result."""
    return jax.tree.map(lambda x: x.sharding, abstract_state)


def create(model: Transformer, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """The state at step 0, made in its place on the mesh: no device ever holds all of it."""
    out = shardings(abstract(model, optimizer, seed, mesh))
    with jax.set_mesh(mesh):
        return jax.jit(lambda: initial(model, optimizer, seed), out_shardings=out)()
