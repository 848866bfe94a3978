"""Members on devices: one alone over the run's mesh, as the trainer runs it, or several together as one program.

Members share a program if they differ only in learning rate, seeds and initialisation. Together their states have a
leading axis of members, M; over several devices that axis is split, and nothing crosses the network.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gva_jax import sharding
from gva_jax.config import ModelConfig, RunConfig
from gva_jax.model import Transformer
from gva_jax.study.spec import Member
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.evaluation import totals
from gva_jax.train.state import TrainState
from gva_jax.train.step import eval_function, make_eval_step, make_train_step, put, train_function

# Members of a program on accelerators, unless told otherwise: for each device.
_TOGETHER = 8


def default_together() -> int:
    """How many members run as one program: on CPUs one, where a batched product gains nothing and cores are full."""
    return 1 if jax.default_backend() == "cpu" else _TOGETHER * jax.device_count()


def shared(member: Member) -> tuple:
    """Equal for members that can be one program: the forward, the optimiser and the layout of batches are the same."""
    config = member.config
    attention = replace(config.model.attention, key_init="default")  # a matter of initial values alone
    optimizer = replace(config.optimizer, learning_rate=1.0)
    data = replace(config.data, seed=0)
    model = replace(config.model, attention=attention)
    return member.phase, model, data, optimizer, config.mesh, replace(config.train, seed=0)


class Alone:
    """One member on the mesh of its config; it serves others that differ in seeds only."""

    def __init__(self, config: RunConfig, token_bytes: np.ndarray):
        self._token_bytes = token_bytes
        self._model, steps, accumulation = Transformer(config.model), config.train.steps, config.train.accumulation
        self._mesh = sharding.make_mesh(config.mesh)
        sharding.check(config, self._mesh)
        schedule = optimizers.learning_rate(config.optimizer, steps)
        optimizer = optimizers.make(config.optimizer, steps)
        self.abstract = states.abstract(self._model, optimizer, 0, self._mesh)
        self._step = make_train_step(self._model, optimizer, schedule, self.abstract, self._mesh, accumulation)
        initial = lambda seed: states.initial(self._model, optimizer, seed)
        self._create = jax.jit(initial, out_shardings=states.shardings(self.abstract))

    def create(self, members: Sequence[Member]) -> TrainState:
        """The initial state of the one member."""
        with jax.set_mesh(self._mesh):
            return self._create(members[0].seed)

    def step(self, state: TrainState, batches: Sequence[dict]) -> tuple[TrainState, dict]:
        return self._step(state, put(batches[0], self._mesh))

    @functools.cache  # noqa: B019  (programs live as long as the study runs)
    def evaluator(self, model: ModelConfig | None = None):
        """`evaluate(params, batches, most) -> (M, 3)`, sums as those of `train.evaluation.totals`.

        `model`: another that has the same parameters.
        """
        network = self._model if model is None else Transformer(model)
        step = make_eval_step(network, self.abstract, self._mesh, self._token_bytes)
        place = lambda batch: put(batch, self._mesh)
        return lambda params, batches, most=0: totals(step, params, batches, place, most)[None]


class Together:
    """Members that share a program, over as many of the devices as divide their number."""

    def __init__(self, members: Sequence[Member], token_bytes: np.ndarray):
        self._count, self._token_bytes = len(members), token_bytes
        count = max(n for n in range(1, jax.device_count() + 1) if len(members) % n == 0)
        self._mesh = jax.make_mesh((count,), ("members",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
        self.config = config = members[0].config
        self._model, accumulation = Transformer(config.model), config.train.accumulation
        axes = TrainState(step=None, params=0, opt_state=0, rng=0)  # all are at the same step

        def one(state: TrainState, batch: dict, peak):
            schedule = optimizers.learning_rate(config.optimizer, config.train.steps, peak)
            optimizer = optimizers.make(config.optimizer, config.train.steps, peak)
            return train_function(self._model, optimizer, schedule, accumulation)(state, batch)

        parts = jax.tree.map(lambda axis: P("members") if axis == 0 else P(), axes, is_leaf=lambda axis: axis is None)
        step = jax.vmap(one, in_axes=(axes, 0, 0), out_axes=(axes, 0))
        step = self._split(step, (parts, P("members"), P("members")), (parts, P("members")))
        self._step = jax.jit(step, donate_argnums=0)
        self._peaks = self._put(np.array([member.learning_rate for member in members], np.float32))
        self.abstract = self._abstract(axes)

    def _split(self, function, inputs, outputs):
        """`function` with each device on its own members."""
        return jax.shard_map(function, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    def _put(self, x):
        return jax.device_put(x, NamedSharding(self._mesh, P("members")))

    def _abstract(self, axes: TrainState) -> TrainState:
        one = jax.eval_shape(lambda: self._initial(self.config)(0))
        many, whole = NamedSharding(self._mesh, P("members")), NamedSharding(self._mesh, P())
        stack = lambda x: jax.ShapeDtypeStruct((self._count, *x.shape), x.dtype, sharding=many)
        state = jax.tree.map(stack, one)
        return replace(state, step=jax.ShapeDtypeStruct((), one.step.dtype, sharding=whole))

    def _initial(self, config: RunConfig):
        optimizer = optimizers.make(config.optimizer, config.train.steps)
        return lambda seed: states.initial(Transformer(config.model), optimizer, seed)

    def create(self, members: Sequence[Member]) -> TrainState:
        """Each member's own initial state: of its model and its seed."""
        compiled = {}
        for member in members:
            compiled.setdefault(member.config.model, jax.jit(self._initial(member.config)))
        ones = [compiled[member.config.model](member.seed) for member in members]
        stacked = jax.tree.map(lambda *x: np.stack(x), *ones)
        return jax.device_put(replace(stacked, step=ones[0].step), jax.tree.map(lambda x: x.sharding, self.abstract))

    def step(self, state: TrainState, batches: Sequence[dict]) -> tuple[TrainState, dict]:
        batch = {name: self._put(np.stack([batch[name] for batch in batches])) for name in batches[0]}
        return self._step(state, batch, self._peaks)

    def evaluator(self, model: ModelConfig | None = None):
        """As `Alone.evaluator`; every member reads the same batches."""
        one = eval_function(self._model if model is None else Transformer(model), self._token_bytes)
        step = jax.jit(self._split(jax.vmap(one, in_axes=(0, None)), (P("members"), P()), P("members")))
        place = lambda batch: jax.tree.map(jnp.asarray, batch)
        return lambda params, batches, most=0: totals(step, params, batches, place, most)


class Programs:
    """What the members of a study run; a member alone finds compiled what one of another seed has left."""

    def __init__(self, token_bytes: np.ndarray):
        self._token_bytes = token_bytes
        self._alone = functools.cache(lambda config: Alone(config, token_bytes))

    def of(self, members: Sequence[Member]) -> Alone | Together:
        if len(members) > 1:
            return Together(members, self._token_bytes)
        config = members[0].config
        return self._alone(
            replace(config, name="any", data=replace(config.data, seed=0), train=replace(config.train, seed=0))
        )
