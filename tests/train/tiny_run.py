"""A tiny run on tokens of its own: no corpus, no folder."""

import functools
from dataclasses import replace

import jax
import numpy as np

from gva_jax import sharding
from gva_jax.config import (
    AttentionConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    load,
)
from gva_jax.model import Transformer
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.step import make_train_step, put

FAMILIES = {
    "gva": AttentionConfig("gva", 4, 2, 8, 4, q_norm=True, key_init="scale_matched"),
    "gqa": AttentionConfig("gqa", 4, 2, 8, q_norm=True, k_norm=True),
    "mqa": AttentionConfig("mqa", 4, 1, 8),
    "mla": AttentionConfig("mla", 4, None, 8, 4, latent_dim=16),
    "gva_full_rope": AttentionConfig("gva", 4, 2, 8, None),
}


def config(family: str = "gva", *, mesh: MeshConfig | None = None, accumulation: int = 1, **model) -> RunConfig:
    """2 layers of width 32, 16 sequences of 16 tokens."""
    sizes = dict(vocab_size=64, num_layers=2, model_dim=32, hidden_dim=64, attention=FAMILIES[family])
    return RunConfig(
        model=ModelConfig(**{**sizes, **model}),
        data=DataConfig(context_length=16, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        mesh=mesh or MeshConfig(),
        train=TrainConfig(steps=20, accumulation=accumulation),
    )


def quickstart(mesh: MeshConfig | None, dtype: str) -> RunConfig:
    """The shipped config's model and optimiser, on 8 sequences of 64 a step."""
    run = load("quickstart")
    return replace(
        run, model=replace(run.model, dtype=dtype, param_dtype=dtype), mesh=mesh or MeshConfig(),
        data=replace(run.data, batch_size=8, context_length=64),
    )  # fmt: skip


def batch(step: int, run: RunConfig, *, ragged: bool = False) -> dict[str, np.ndarray]:
    """Tokens that can be learnt (each follows from the last), two documents a row; `ragged` pads rows unevenly."""
    B, T, vocab = run.data.batch_size, run.data.context_length, run.model.vocab_size
    rng = np.random.default_rng(step)
    tokens = (rng.integers(0, vocab, (B, 1)) + 5 * np.arange(T + 1)) % vocab
    first = rng.integers(1, T - 1, (B, 1))
    segment_ids = 1 + (np.arange(T) >= first)
    positions = np.where(segment_ids == 1, np.arange(T), np.arange(T) - first)
    if ragged:
        segment_ids = np.where(np.arange(T) < rng.integers(2, T, (B, 1)), segment_ids, 0)
    arrays = dict(inputs=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=segment_ids, positions=positions)
    return {name: x.astype(np.int32) for name, x in arrays.items()}


@functools.cache
def _initial_state(model: ModelConfig, seed: int, optimizer: OptimizerConfig, steps: int):
    transformer, plan = Transformer(model), optimizers.make(optimizer, steps)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    return jax.tree.map(np.asarray, states.create(transformer, plan, seed, mesh))


def initial_state(run: RunConfig) -> states.TrainState:
    """The state at step 0 as NumPy arrays; compiled once for all tests that start from it."""
    return _initial_state(run.model, run.train.seed, run.optimizer, run.train.steps)


class Run:
    """Model, state and step of `run` on its mesh over `devices`, from `state` or (True) the run's own initial one."""

    def __init__(self, run: RunConfig, devices=None, state: states.TrainState | bool = True):
        self.config, self.model = run, Transformer(run.model)
        self.mesh = sharding.make_mesh(run.mesh, devices)
        sharding.check(run, self.mesh)
        steps, seed = run.train.steps, run.train.seed
        self.optimizer = optimizers.make(run.optimizer, steps)
        self.schedule = optimizers.learning_rate(run.optimizer, steps)
        self.abstract = states.abstract(self.model, self.optimizer, seed, self.mesh)
        self.step = make_train_step(
            self.model, self.optimizer, self.schedule, self.abstract, self.mesh, run.train.accumulation
        )
        if state:
            state = initial_state(run) if state is True else state
            self.state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, self.abstract)

    def optimised(self) -> "Run":
        """With the step compiled as users have it. The tests' quick compilation is exact in float64 to 1e-8 only."""
        data = self.config.data
        rows = jax.ShapeDtypeStruct((data.batch_size, data.context_length), "int32",
                                    sharding=sharding.batch_sharding(self.mesh))  # fmt: skip
        with jax.set_mesh(self.mesh):
            lowered = self.step.jitted.lower(self.abstract, dict.fromkeys(batch(0, self.config), rows))
            self.step = lowered.compile(compiler_options={"xla_backend_optimization_level": 3})
        return self

    def advance(self, count: int, *, ragged: bool = False, start: int = 0) -> list[dict[str, float]]:
        """Take `count` steps; their metrics."""
        metrics = []
        for i in range(start, start + count):
            self.state, m = self.step(self.state, put(batch(i, self.config, ragged=ragged), self.mesh))
            metrics.append({name: float(x) for name, x in m.items()})
        return metrics


def one_device(run: RunConfig, state: states.TrainState | bool = True) -> Run:
    return Run(replace(run, mesh=MeshConfig()), jax.devices()[:1], state)


def drawn_state(run: RunConfig) -> states.TrainState:
    """A state at step 0 drawn in NumPy, at a scale where every part matters; nothing to compile."""
    rng = np.random.default_rng(0)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    plan = optimizers.make(run.optimizer, run.train.steps)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), states.abstract(Transformer(run.model), plan, 0, mesh))

    def draw(path, x):
        noise = rng.normal(size=x.shape)
        drawn = 1 + 0.3 * noise if "norm" in jax.tree_util.keystr(path) else noise * x.shape[-2] ** -0.5
        return drawn.astype(x.dtype)

    return replace(zeros, params=jax.tree_util.tree_map_with_path(draw, zeros.params))


def float64(run: RunConfig) -> RunConfig:
    return replace(run, model=replace(run.model, dtype="float64", param_dtype="float64"))
