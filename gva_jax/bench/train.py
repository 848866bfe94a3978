"""What a variant costs in training: full-context forward, training step and peak memory, beside the first config's.

Steps are the real ones of `gva_jax.train.step` on synthetic tokens: the forward pass is evaluation's, loss included, on
one micro-batch; the training step is the whole one, optimiser included. Rounds are interleaved (A B A B ...) and wait
for the device, and medians over rounds are reported. All variants' states are on the device together meanwhile.

Peak memory is of one device, in a training step. Where the device keeps statistics, each variant is alone on it for a
step, the smallest one first: what the device reports is the highest mark of the whole process, so it tells a variant's
own peak only where that rises. Elsewhere, and where it does not rise, it is the compiled program's: arguments, outputs
that reuse none of them, and temporaries.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from gva_jax import runtime, sharding
from gva_jax.config import ConfigError, RunConfig, load, require
from gva_jax.display import Display
from gva_jax.model import Transformer
from gva_jax.options import parse
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states
from gva_jax.train.step import make_eval_step, make_train_step, put


@dataclass(frozen=True)
class TrainBenchOptions:
    """The options of `gva bench train`."""

    # Configs to measure; ratios are to the first.
    configs: tyro.conf.PositionalMetavarFromFieldName[tyro.conf.Positional[tuple[str, ...]]]
    # Sequences a step, in one micro-batch, for all configs. None: each config's own, which must agree.
    batch_size: int | None = None
    # Tokens a sequence, for all configs. None: each config's own, which must agree.
    context: int | None = None
    # Interleaved rounds; medians over them are reported.
    rounds: int = 20
    # Print the figures as JSON.
    json: tyro.conf.FlagCreatePairsOff[bool] = False

    def __post_init__(self):
        require(bool(self.configs), "configs", self.configs, "give one or more, the first to compare the others with")
        for name in ("batch_size", "context", "rounds"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be 1 or more")


def main(args: list[str], description: str) -> None:
    """`gva bench train`: measure and print."""
    options = parse(TrainBenchOptions, args, "gva bench train", description)
    configs = [_resized(load(name), options.batch_size, options.context) for name in options.configs]
    check(configs)
    display = Display(console=Console(stderr=True, highlight=False, soft_wrap=True))
    runtime.start(display)
    found = measure(configs, rounds=options.rounds, display=display)
    if options.json:
        device, data = jax.devices()[0], configs[0].data
        shape = {"batch_size": data.batch_size, "context": data.context_length}
        about = {"device": device.device_kind, "devices": jax.device_count(), **shape, "rounds": options.rounds}
        print(json.dumps({**about, "variants": [dataclasses.asdict(m) for m in found]}, indent=2))
    else:
        Display().show(table(configs, found))


@dataclass(frozen=True)
class Measurement:
    """Median seconds, peak bytes of a device and where they come from ("device" or "compiled"), and ratios."""

    name: str
    parameters: int
    forward_seconds: float
    step_seconds: float
    peak_bytes: int
    peak_source: str
    forward_ratio: float
    step_ratio: float
    peak_ratio: float


def check(configs: list[RunConfig]) -> None:
    """Raises ConfigError for configs whose steps are of different size, or that need float64."""
    shape = lambda c: (c.data.batch_size // c.train.accumulation, c.train.accumulation, c.data.context_length)
    first = configs[0]
    for config in configs:
        runtime.check_float64(config.model)
        if shape(config) != shape(first):
            a, b = ("{} x {} sequences of {:,} tokens".format(*shape(c)) for c in (first, config))
            raise ConfigError(f"{first.name} takes {a} a step, {config.name} {b}: give --batch-size and --context")


def measure(configs: list[RunConfig], *, rounds: int = 20, display: Display | None = None) -> list[Measurement]:
    """Every config, in the order given."""
    display = display or Display(quiet=True)
    with display.task("compile", len(configs)) as task:
        variants = []
        for config in configs:
            variants.append(Variant(config))
            task.advance(figures=config.name)
    peaks = _peaks(variants)
    for variant in variants:
        variant.begin()
    runs: dict[tuple[str, int], Callable[[], None]] = {}
    for kind in ("forward", "step"):
        runs |= {(kind, i): getattr(variant, kind) for i, variant in enumerate(variants)}
    times: dict = {key: [] for key in runs}
    with display.task("bench", (rounds + 1) * len(runs)) as task:
        for at in range(rounds + 1):
            for key, run in runs.items():
                begun = time.perf_counter()
                run()
                if at:  # the first round warms up
                    times[key].append(time.perf_counter() - begun)
                task.advance()
    medians = {key: statistics.median(seconds) for key, seconds in times.items()}
    found = []
    for i, variant in enumerate(variants):
        forward, step, (peak, source) = medians["forward", i], medians["step", i], peaks[i]
        ratios = (forward / medians["forward", 0], step / medians["step", 0], peak / peaks[0][0])
        found.append(Measurement(variant.name, variant.parameters, forward, step, peak, source, *ratios))
    return found


class Variant:
    """A config's compiled steps, with state and batch of their own."""

    def __init__(self, config: RunConfig):
        self.name, self._config = config.name, config
        self._model, self._mesh = Transformer(config.model), sharding.make_mesh(config.mesh)
        sharding.check(config, self._mesh)
        self._optimizer = optimizers.make(config.optimizer, config.train.steps)
        schedule = optimizers.learning_rate(config.optimizer, config.train.steps)
        abstract = states.abstract(self._model, self._optimizer, config.train.seed, self._mesh)
        self.parameters = sum(x.size for x in jax.tree.leaves(abstract.params))
        accumulation = config.train.accumulation
        self._batch = put(_synthetic(config, config.data.batch_size), self._mesh)
        self._part = put(_synthetic(config, config.data.batch_size // accumulation), self._mesh)
        step = make_train_step(self._model, self._optimizer, schedule, abstract, self._mesh, accumulation)
        forward = make_eval_step(self._model, abstract, self._mesh, np.zeros(config.model.vocab_size, np.int32))
        with jax.set_mesh(self._mesh):
            self._step = step.jitted.lower(abstract, self._batch).compile()
            self._forward = forward.jitted.lower(abstract.params, self._part).compile()
        self._state = None

    def begin(self) -> None:
        """Make the state."""
        self._state = states.create(self._model, self._optimizer, self._config.train.seed, self._mesh)

    def end(self) -> None:
        """Free the state."""
        self._state = None

    def step(self) -> None:
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))

    def forward(self) -> None:
        jax.block_until_ready(self._forward(self._state.params, self._part))

    @property
    def compiled_bytes(self) -> int:
        """Peak of a training step on one device, by the compiled program."""
        sizes = self._step.memory_analysis()
        kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return kept + sizes.temp_size_in_bytes


def _peaks(variants: list[Variant]) -> list[tuple[int, str]]:
    """Bytes, and "device" or "compiled"; see the module."""
    peaks = [(variant.compiled_bytes, "compiled") for variant in variants]
    mark = _high_mark()
    if mark is None:
        return peaks
    for i in sorted(range(len(variants)), key=lambda i: peaks[i][0]):
        variants[i].begin()
        variants[i].step()
        variants[i].end()
        if (now := _high_mark()) > mark:
            mark, peaks[i] = now, (now, "device")
    return peaks


def _high_mark() -> int | None:
    """The most bytes that the first device ever had in use; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _synthetic(config: RunConfig, rows: int) -> dict[str, np.ndarray]:
    """Random tokens, a document a row."""
    T, vocab = config.data.context_length, config.model.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, T + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (rows, T))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions,
            "segment_ids": np.ones((rows, T), np.int32)}  # fmt: skip


def _resized(config: RunConfig, batch_size: int | None, context: int | None) -> RunConfig:
    data, train = config.data, config.train
    if batch_size is not None:
        data, train = replace(data, batch_size=batch_size), replace(train, accumulation=1)
    if context is not None:
        data = replace(data, context_length=context)
    return replace(config, data=data, train=train)


def table(configs: list[RunConfig], found: list[Measurement]) -> Table:
    data = configs[0].data
    title = f"training, {data.batch_size:,} sequences of {data.context_length:,} tokens a step (ratio to the first)"
    compiled = any(m.peak_source == "compiled" for m in found)
    rows = Table(title=title, title_justify="left", caption="* of the compiled program" if compiled else None)
    for column in ("config", "parameters", "forward ms", "step ms", "peak MiB"):
        rows.add_column(column, justify="left" if column == "config" else "right")
    for m in found:
        mark = "*" if m.peak_source == "compiled" else ""
        rows.add_row(m.name, f"{m.parameters:,}", f"{m.forward_seconds * 1e3:.2f} ({m.forward_ratio:.3f})",
                     f"{m.step_seconds * 1e3:.2f} ({m.step_ratio:.3f})",
                     f"{m.peak_bytes / 2**20:,.1f}{mark} ({m.peak_ratio:.3f})")  # fmt: skip
    return rows
