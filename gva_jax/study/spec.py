"""What a study is: variants of a base config, the members that train, and in which order. Imports nothing heavy.

The protocol: a search for each variant's learning rate on the development split, with one seed and equal budgets; then
confirmation on fresh seeds at the best rate, which alone sees the held-out split. Members of one seed are paired: they
start from the same weights and read the same batches in the same order.

Same weights: the trainer draws every parameter from its seed and from its path in the model (Flax folds the path into
the key), so a parameter with the same path and shape in two variants starts from the same draw, whatever else the
variants add. Where an initialiser has another scale, the draw is the same up to that scale.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gva_jax import config as configs
from gva_jax.config import ConfigError, RunConfig, require
from gva_jax.study.statistics import MOST_PAIRS

SEARCH, CONFIRM = "search", "confirm"

# Fields in which members of one study must not differ, or their pairs would not see the same text in the same order.
_SHARED = ("data", "train.steps")


@dataclass(frozen=True)
class Variant:
    """One row of a study.

    Attributes:
      config: a whole config, or changes of the study's base by dotted fields: {"model.attention.family": "gqa"}.
      seeds: of its confirmation, if not the study's; () for none. One with seeds of its own comes after the others.
      rates_from: the variant whose learning rate it takes, instead of a search of its own.
      swap: changes of the trained model under which its held-out perplexity is measured once more: an activation
        that it was not trained with. The parameters must stay the same.
    """

    config: RunConfig | Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] | None = None
    rates_from: str | None = None
    swap: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Search:
    """Every variant is trained at each of these rates, from one seed that no confirmation uses.

    `steps` is the budget of one trial, a whole schedule of its own; None: the study's.
    """

    learning_rates: tuple[float, ...]
    seed: int
    steps: int | None = None

    def __post_init__(self):
        _check_rates("search.learning_rates", self.learning_rates)
        require(bool(self.learning_rates), "search.learning_rates", self.learning_rates, "must name one or more")
        require(self.steps is None or self.steps >= 1, "search.steps", self.steps, "must be 1 or more")


@dataclass(frozen=True)
class Member:
    """One model to train. `config` says all of it: its learning rate, its seeds, its steps."""

    phase: str
    variant: str
    config: RunConfig

    @property
    def learning_rate(self) -> float:
        return self.config.optimizer.learning_rate

    @property
    def seed(self) -> int:
        return self.config.train.seed

    @property
    def steps(self) -> int:
        return self.config.train.steps

    @property
    def name(self) -> str:
        return member_name(self.phase, self.variant, self.learning_rate, self.seed)


def member_name(phase: str, variant: str, learning_rate: float, seed: int) -> str:
    return f"{phase}-{variant}-lr{learning_rate!r}-seed{seed}"


@dataclass(frozen=True)
class Study:
    """Variants, seeds, learning rates, budget and text.

    Attributes:
      name: of its folder, unless `--out` names one.
      base: what the variants change; its `train.steps` is the budget, its `data` the text, its `train.eval_every` and
        `eval_batches` say when, and on how many batches, a member is measured on the development split on the way.
      variants: by name, in the order of the tables.
      seeds: of the confirmation; each is the seed of the weights and of the order of the text.
      pairs: (baseline, variant), compared seed by seed.
      learning_rates: of the confirmations, a row each; without them
      search: finds one for each variant. With both, the search is there to be reported.
      together: members of one program at most, unless the command says; None: what suits the device. 1 for models
        that fill the devices one at a time.
      about: what is asked, for the head of the report.
    """

    name: str
    base: RunConfig
    variants: Mapping[str, Variant]
    seeds: tuple[int, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    learning_rates: tuple[float, ...] = ()
    search: Search | None = None
    together: int | None = None
    about: str = ""

    def __post_init__(self):
        plain = re.compile(r"[A-Za-z0-9][\w.+=-]*")
        require(bool(plain.fullmatch(self.name)), "study.name", self.name, "must be a plain folder name")
        require(bool(self.variants), "study.variants", dict(self.variants), "must name one or more")
        _check_rates("study.learning_rates", self.learning_rates)
        some = bool(self.learning_rates) or self.search is not None
        require(some, "study.learning_rates", self.learning_rates, "give fixed ones, or a search for them")
        self._check_seeds("study.seeds", self.seeds)
        require(bool(self.seeds), "study.seeds", self.seeds, "must be one or more numbers")
        for name, variant in self.variants.items():
            require(bool(plain.fullmatch(name)), "study.variants", name, "must be a plain name: letters, digits, _.+=-")
            if variant.seeds is not None:
                self._check_seeds(f"variants.{name}.seeds", variant.seeds)
            if variant.rates_from is not None:
                source = self.variants.get(variant.rates_from)
                right = "must be a variant with a search of its own"
                good = self.search is not None and source is not None and source.rates_from is None
                require(good, f"variants.{name}.rates_from", variant.rates_from, right)
            with naming(name):
                config = self.config(name)
            if variant.swap is not None:
                told = configs.difference(config, changed(config, variant.swap))
                good = told and all(difference.startswith("model.") for difference in told)
                right = "must change the model: the same weights are evaluated as another one"
                require(bool(good), f"variants.{name}.swap", dict(variant.swap), right)
            for difference in configs.difference(self.base, config):
                if difference.startswith(_SHARED):
                    raise ConfigError(f"variants.{name}: {difference}: must be the base's, or pairs are none")
        right = "must be 1 or more, or None"
        require(self.together is None or self.together >= 1, "study.together", self.together, right)
        for pair in self.pairs:
            for name in pair:
                require(name in self.variants, "study.pairs", pair, f"known are {', '.join(self.variants)}")
            require(len(set(pair)) == 2 == len(pair), "study.pairs", pair, "must be two different variants")
            seeds = len(self.paired_seeds(*pair))
            right = f"must have 1 to {MOST_PAIRS} seeds in common, not {seeds}: the exact test enumerates 2^n signs"
            require(1 <= seeds <= MOST_PAIRS, "study.pairs", pair, right)

    def _check_seeds(self, name: str, seeds: tuple[int, ...]) -> None:
        whole = isinstance(seeds, tuple | list) and all(type(seed) is int for seed in seeds)
        require(whole, name, seeds, "must be a tuple of whole numbers")
        require(len(set(seeds)) == len(seeds), name, seeds, "must be different numbers")
        require(all(0 <= seed < 2**31 for seed in seeds), name, seeds, "must be at least 0 and below 2**31")
        fresh = self.search is None or self.search.seed not in seeds
        require(fresh, name, seeds, "must not hold the search's seed: a confirmation is on fresh ones")

    def config(self, variant: str) -> RunConfig:
        """A variant's config, before seeds and learning rates."""
        given = self.variants[variant].config
        return given if isinstance(given, RunConfig) else changed(self.base, given)

    def seeds_of(self, variant: str) -> tuple[int, ...]:
        return self.seeds if self.variants[variant].seeds is None else self.variants[variant].seeds

    def paired_seeds(self, baseline: str, variant: str) -> tuple[int, ...]:
        return tuple(seed for seed in self.seeds_of(variant) if seed in self.seeds_of(baseline))

    def search_members(self) -> list[Member]:
        if self.search is None:
            return []
        steps = self.search.steps or self.base.train.steps
        own = [name for name, variant in self.variants.items() if variant.rates_from is None]
        trial = lambda name, rate: self._member(SEARCH, name, rate, self.search.seed, steps)
        return [trial(name, rate) for name in own for rate in self.search.learning_rates]

    def confirm_members(self, rates: Mapping[str, tuple[float, ...]]) -> list[Member]:
        """Of the variants whose learning rates are known, in an order that finishes whole pairs first: seed by seed."""
        shared = [name for name in self.variants if self.variants[name].seeds is None]
        order = [(name, seed) for seed in self.seeds for name in shared]
        order += [(name, seed) for name in self.variants if name not in shared for seed in self.seeds_of(name)]
        make = lambda name, seed, rate: self._member(CONFIRM, name, rate, seed, self.base.train.steps)
        return [make(name, seed, rate) for name, seed in order for rate in rates.get(name, ())]

    def total_updates(self) -> int:
        """Of all members, found learning rates or not."""
        runs = sum(len(self.seeds_of(name)) for name in self.variants) * max(len(self.learning_rates), 1)
        return runs * self.base.train.steps + sum(member.steps for member in self.search_members())

    def _member(self, phase: str, variant: str, rate: float, seed: int, steps: int) -> Member:
        config = self.config(variant)
        config = replace(
            config,
            name=member_name(phase, variant, rate, seed),
            data=replace(config.data, seed=seed),
            optimizer=replace(config.optimizer, learning_rate=rate),
            train=replace(config.train, seed=seed, steps=steps),
        )
        return Member(phase, variant, config)


def _check_rates(name: str, rates: tuple[float, ...]) -> None:
    number = lambda rate: isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
    good = isinstance(rates, tuple | list) and all(map(number, rates)) and len(set(rates)) == len(rates)
    require(good, name, rates, "must be a tuple of different numbers above 0")


@contextlib.contextmanager
def naming(variant: str) -> Iterator[None]:
    """A mistake that is found within is one of this variant."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"variants.{variant}: {error}") from error


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """`config` with the dotted fields replaced, judged together. Raises `ConfigError` for an unknown one."""
    values = configs.to_dict(config)
    for path, value in changes.items():
        *parents, last = path.split(".")
        at = values
        for i, name in enumerate(parents):
            if not isinstance(at.get(name), dict):
                known = ", ".join(at)
                raise ConfigError(f"{'.'.join(parents[: i + 1])} (in {path!r}): no such part; known are {known}")
            at = at[name]
        at[last] = value
    return configs.from_dict(RunConfig, values)


# ---- files -----------------------------------------------------------------------------------------------------------


def shipped() -> list[str]:
    """Names of the shipped studies."""
    return sorted(path.stem for path in (configs.configs_folder() / "studies").glob("[!_]*.py"))


def load(name: str) -> Study:
    """A study by the path of its file or by the name of a shipped one.

    Raises:
      ConfigError: no such file, or one that defines no `study() -> Study`.
    """
    path = Path(name)
    if path.suffix != ".py" and not path.is_file():  # a folder of that name may hold its records
        path = configs.configs_folder() / "studies" / f"{path.name}.py"
    if not path.is_file():
        raise ConfigError(f"study {str(name)!r}: no such file or shipped study; shipped are {', '.join(shipped())}")
    return configs.returned(path, "study", Study)


def with_source(study: Study, source: str) -> Study:
    """The study on other text, in every variant."""
    data = lambda config: replace(config, data=replace(config.data, source=source))
    moved = lambda v: replace(v, config=data(v.config)) if isinstance(v.config, RunConfig) else v
    variants = {name: moved(variant) for name, variant in study.variants.items()}
    return replace(study, base=data(study.base), variants=variants)


def every(study: Study, rates: Mapping[str, tuple[float, ...]]) -> Iterator[Member]:
    """All members that can be named by now."""
    yield from study.search_members()
    yield from study.confirm_members(rates)
