"""Members on devices: one alone over the run's mesh, as the trainer runs it, or several together as one program.

Members share a program if their parameters have the same shapes and they differ in nothing but learning rate, seeds and
model. Together their states have a leading axis of members, M, over which each model's forward is `vmap`ped for those
that are of it; over several devices that axis is split, and nothing crosses the network.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gva_jax import sharding
from gva_jax.config import MeshConfig, ModelConfig, RunConfig, require
from gva_jax.model import Transformer
from gva_jax.study.spec import Member, Study, changed, naming
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


def group(pending: Sequence[Member], most: int) -> list[Member]:
    """The first pending member and those, `most` in all, that can be one program with it.

    Of each model equally many, as `Together` splits them over the devices.
    """
    first = pending[0]
    if most == 1 or first.config.mesh != MeshConfig():  # or it asks for devices of its own
        return [first]
    rows: dict[ModelConfig, list[Member]] = {}
    shared = _shared(first)
    for member in pending:
        if _shared(member) == shared:
            rows.setdefault(_forward(member), []).append(member)
    models = list(rows.values())[:most]
    count, devices = min(len(models[0]), most // len(models)), jax.device_count()
    if count > devices:
        count -= count % devices  # as many on each
    each = count // _spread(count)
    models = [row for row in models if len(row) >= count]
    return [m for start in range(0, count, each) for row in models for m in row[start : start + each]]


def _spread(count: int) -> int:
    """The most devices that `count` members can be split over."""
    return max(n for n in range(1, jax.device_count() + 1) if count % n == 0)


def _shared(member: Member) -> tuple:
    """Equal for members that can be one program: parameters, optimiser and the layout of batches are the same."""
    config = member.config
    optimizer, data = replace(config.optimizer, learning_rate=1.0), replace(config.data, seed=0)
    return member.phase, _shapes(_forward(member)), data, optimizer, config.mesh, replace(config.train, seed=0)


def _forward(member: Member) -> ModelConfig:
    """The model but for its initial values."""
    model = member.config.model
    return replace(model, attention=replace(model.attention, key_init="default"))


@functools.cache
def _shapes(model: ModelConfig) -> tuple:
    return tuple((jax.tree_util.keystr(path), x.shape, x.dtype)
                 for path, x in jax.tree_util.tree_leaves_with_path(parameter_shapes(model)))  # fmt: skip


def parameter_shapes(model: ModelConfig) -> dict:
    """The abstract parameters of a model."""
    return jax.eval_shape(Transformer(model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), np.int32))


def check_swaps(study: Study) -> None:
    """Raises ConfigError for a swap that changes the parameters: it has no weights to be evaluated with."""
    for name, variant in study.variants.items():
        if variant.swap is None:
            continue
        config = study.config(name)
        with naming(name):
            same = parameter_shapes(config.model) == parameter_shapes(changed(config, variant.swap).model)
            right = "must leave the parameters as they are: they are evaluated, not trained anew"
            require(same, "swap", dict(variant.swap), right)


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
    """Members that share a program, in the order of `group`, over as many of the devices as divide them evenly."""

    def __init__(self, members: Sequence[Member], token_bytes: np.ndarray):
        self._count, self._token_bytes = len(members), token_bytes
        count = _spread(len(members) // len(set(map(_forward, members))))
        self._models = self._of_each_device(members[: len(members) // count])
        self._mesh = jax.make_mesh((count,), ("members",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
        self.config = config = members[0].config
        axes = TrainState(step=None, params=0, opt_state=0, rng=0)  # all are at the same step

        def one(model: Transformer, state: TrainState, batch: dict, peak):
            schedule = optimizers.learning_rate(config.optimizer, config.train.steps, peak)
            optimizer = optimizers.make(config.optimizer, config.train.steps, peak)
            return train_function(model, optimizer, schedule, config.train.accumulation)(state, batch)

        parts = jax.tree.map(lambda axis: P("members") if axis == 0 else P(), axes, is_leaf=lambda axis: axis is None)
        step = self._split(
            self._each(one, (axes, 0, 0), (axes, 0)), (parts, P("members"), P("members")), (parts, P("members"))
        )
        self._step = jax.jit(step, donate_argnums=0)
        self._peaks = self._put(np.array([member.learning_rate for member in members], np.float32))
        self.abstract = self._abstract(axes)

    @staticmethod
    def _of_each_device(members: Sequence[Member]) -> list[tuple[Transformer, slice]]:
        """The models of the members on a device, and where their members are."""
        models, start = [], 0
        for model, some in itertools.groupby(members, _forward):
            stop = start + len(list(some))
            models.append((Transformer(model), slice(start, stop)))
            start = stop
        return models

    def _each(self, function, in_axes: tuple, out_axes):
        """`function(model, *args)`, `vmap`ped, for each model's members on a device; results in the members' order."""

        def call(*args):
            found = []
            for model, at in self._models:
                some = [_along(axes, lambda x, at=at: x[at], arg) for axes, arg in zip(in_axes, args, strict=True)]
                found.append(jax.vmap(functools.partial(function, model), in_axes, out_axes)(*some))
            return _along(out_axes, lambda *x: jnp.concatenate(x), *found)

        return call

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
        """As `Alone.evaluator`; every member reads the same batches, and all are `model`, if one is given."""
        own = lambda network, params, batch: eval_function(network, self._token_bytes)(params, batch)
        one = own if model is None else lambda _, params, batch: own(Transformer(model), params, batch)
        step = jax.jit(self._split(self._each(one, (0, None), 0), (P("members"), P()), P("members")))
        place = lambda batch: jax.tree.map(jnp.asarray, batch)
        return lambda params, batches, most=0: totals(step, params, batches, place, most)


def _along(axes, function, *trees):
    """`function` of the leaves that have an axis of members, the first tree's others as they are.

    `axes` is a prefix of the trees, as in `jax.vmap`.
    """
    is_none = lambda axis: axis is None
    under = lambda axis, *parts: parts[0] if axis is None else jax.tree.map(function, *parts)
    return jax.tree.map(under, axes, *trees, is_leaf=is_none)


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
