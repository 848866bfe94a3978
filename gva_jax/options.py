"""Command-line options from frozen dataclasses, by tyro. A mistake is one line, with the nearest valid name."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gva_jax.config import ConfigError, RunConfig, check_numbers, load, require, shipped

# A run's config among a command's options: its fields are options by their dotted names, without a prefix.
_Config = Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
_Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class TrainOptions:
    config: _Config
    # Trace a few steps that do not compile, for xprof, into the run's folder.
    profile: _Flag = False
    # Where process 0 of several runs, HOST:PORT, the same in all. None: $GVA_JAX_COORDINATOR, or what the cluster says.
    coordinator: str | None = None
    # How many processes there are. None: $GVA_JAX_NUM_PROCESSES, or what the cluster says.
    num_processes: int | None = None
    # Which of them this is, 0, 1, ... None: $GVA_JAX_PROCESS_ID, or what the cluster says.
    process_id: int | None = None
    # Wait so many seconds for the coordinator and the other processes.
    connect_seconds: float = 300

    def __post_init__(self):
        check_numbers(self, "")
        require(self.connect_seconds > 0, "connect_seconds", self.connect_seconds, "must be above 0")


@dataclass(frozen=True)
class InfoOptions:
    config: _Config
    # Print the figures as JSON.
    json: _Flag = False


@dataclass(frozen=True)
class EvaluateOptions:
    config: _Config
    # Folder of the run: the first argument, before all options.
    run: tyro.conf.Suppress[str] = ""
    # Which documents: heldout or development.
    split: Literal["heldout", "development"] = "heldout"
    # Checkpoint to evaluate. None: the newest.
    step: int | None = None
    # Print the figures as JSON.
    json: _Flag = False


@dataclass(frozen=True)
class PlanOptions:
    config: _Config
    # Devices to compile for: a TPU slice by its torus (v5e:16x16, v6e:16x16, v5p:4x4x8, tpu7x:4x4x4) or NVIDIA GPUs by
    # hosts x GPUs a host (h100:8x8, h200:1x8, b200:1x8, a100:1x8).
    topology: str = ""
    # A mesh to plan for: AXIS=DEVICES,... such as data=2,fsdp=8; data takes what the others leave. Repeat it for
    # several, which are sorted. Default: the config's own, if it names one, and a handful more.
    mesh: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    # An option of XLA's for the compilation: NAME=VALUE. Repeat it for several.
    xla: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    # Compile anew rather than take what an equal program compiled to before.
    fresh: _Flag = False
    # Print the figures as JSON.
    json: _Flag = False


@dataclass(frozen=True)
class GenerateOptions:
    # Folder of the run, as `gva train` printed it.
    run: tyro.conf.PositionalMetavarFromFieldName[tyro.conf.Positional[str]]
    # Text to continue. Repeat it to continue several at once.
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]]
    # Stop after so many new tokens, or at the end of the text.
    max_new_tokens: int = 200
    # Divide logits by this before sampling. 0: take the likeliest token (greedy).
    temperature: float = 0.7
    # Sample among this many likeliest tokens. None: among all.
    top_k: int | None = None
    # Sample among the likeliest tokens that together have this probability.
    top_p: float = 0.95
    # Seed of the sampling.
    seed: int = 0
    # Type of the cached values: float32, bfloat16, int8, float8_e4m3fn. None: the activations'.
    cache_dtype: str | None = None
    # Implementation of the decode kernel. None: the best for the device.
    implementation: str | None = None
    # Print prompts, texts and token ids as JSON.
    json: _Flag = False

    def __post_init__(self):
        check_numbers(self, "")
        require(Path(self.run).is_dir(), "run", self.run, "no such folder; `gva train` makes one")
        require(bool(self.prompt), "prompt", self.prompt, "give one or more, as --prompt TEXT")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be 1 or more")
        require(self.temperature >= 0, "temperature", self.temperature, "must not be negative (0: greedy)")
        require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "must be 1 or more, or None")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        known = (None, "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
        require(self.cache_dtype in known, "cache_dtype", self.cache_dtype, f"must be one of {', '.join(known[1:])}")


@dataclass(frozen=True)
class PrepareOptions:
    # Where the text comes from, see above.
    source: tyro.conf.PositionalMetavarFromFieldName[tyro.conf.Positional[str]]
    # Folder that the corpus gets. It appears when all is done; until then OUT.partial holds what there is.
    out: str
    # A tokenizer's JSON file (of Hugging Face tokenizers; any that has an end-of-text token). None: train one.
    tokenizer: str | None = None
    # Size of the vocabulary that is trained, end of text included.
    vocab_size: int = 8192
    # Field of a record that holds the text (jsonl, parquet, tfds, hf).
    text_field: str = "text"
    # Use at most this many bytes of text (whole documents, the first ones). None: all.
    max_bytes: int | None = None
    # Share of the documents in each of the development and the held-out split.
    holdout: float = 0.02
    # Megabytes of text in a shard: what is lost, at most, when the preparation is killed.
    shard_megabytes: float = 256

    def __post_init__(self):
        require(bool(self.out), "out", self.out, "must be the name of a folder")
        check_numbers(self, "")
        require(self.vocab_size >= 1, "vocab_size", self.vocab_size, "must be 1 or more")
        require(self.max_bytes is None or self.max_bytes >= 1, "max_bytes", self.max_bytes, "must be 1 or more")
        require(0 < self.holdout < 0.5, "holdout", self.holdout, "must lie between 0 and 0.5")
        positive = self.shard_megabytes * 1_000_000 >= 1
        require(positive, "shard_megabytes", self.shard_megabytes, "must be above 0")


@dataclass(frozen=True)
class StudyOptions:
    # A file that defines study(), or the name of a shipped study.
    study: tyro.conf.PositionalMetavarFromFieldName[tyro.conf.Positional[str]]
    # Folder of records and report. None: studies/NAME.
    out: str | None = None
    # Train on this source of text instead of the study's (prepared:DIR, jsonl:GLOB, ...).
    data: str | None = None
    # Members that train as one program, at most. None: 1 on CPUs, 8 a device elsewhere.
    together: int | None = None
    # Stop at a checkpoint after so many seconds; the same command goes on.
    limit_seconds: float | None = None
    # Stop when so many members have finished; the same command goes on.
    members: int | None = None
    # Train nothing: write the report from what there is.
    report: _Flag = False
    # Train nothing: print the members, and what they would cost.
    plan: _Flag = False
    # Print the figures as JSON.
    json: _Flag = False

    def __post_init__(self):
        require(self.together is None or self.together >= 1, "together", self.together, "must be 1 or more")
        require(self.limit_seconds is None or self.limit_seconds > 0, "limit_seconds", self.limit_seconds,
                "must be above 0")  # fmt: skip
        require(self.members is None or self.members >= 1, "members", self.members, "must be 1 or more")
        require(not (self.report and self.plan), "plan", self.plan, "give it or --report, not both")


def parse(options: type, args: list[str], prog: str, description: str, default: Any = None) -> Any:
    """An instance of the dataclass `options` from command-line arguments. `--help` prints and raises SystemExit."""
    _check_names(args, option_names(options))
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            return tyro.cli(
                options,
                args=args,
                prog=prog,
                description=description,
                default=tyro.MISSING_NONPROP if default is None else default,
                use_underscores=default is not None,  # a config's fields are shown as Python spells them
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _refused_value(stop) or ConfigError(_sentence(report.getvalue())) from None


def parse_with_config(options: type, args: list[str], prog: str, description: str) -> Any:
    """The same for options whose field `config` starts from the config that the first plain argument names."""
    at = next((i for i, arg in enumerate(args) if not arg.startswith("-")), None)
    if at is None:
        known = f"CONFIG is a file that defines config(), or a shipped config: {', '.join(shipped())}"
        if not {"--help", "-h"} & set(args):
            raise ConfigError(f"{prog} needs a CONFIG. {known}")
        print(f"usage: {prog} CONFIG [--model.attention.rope_dim 24 ...]\n\n{description}\n\n{known}\n")
        print(f"`{prog} CONFIG --help` lists every option, with the defaults of that config.")
        raise SystemExit(0)
    default = options(config=load(args[at]))
    return parse(options, args[:at] + args[at + 1 :], f"{prog} {args[at]}", description, default)


def parse_with_run(options: type, args: list[str], prog: str, description: str) -> Any:
    """The same where the first plain argument is a run's folder, whose config the options start from."""
    at = next((i for i, arg in enumerate(args) if not arg.startswith("-")), None)
    if at is None:
        if not {"--help", "-h"} & set(args):
            raise ConfigError(f"{prog} needs a RUN, the folder that `gva train` named at its end")
        print(f"usage: {prog} RUN [--model.attention.value_transform none ...]\n\n{description}\n")
        print(f"`{prog} RUN --help` lists every option, with that run's config as defaults.")
        raise SystemExit(0)
    from gva_jax.train.folder import read_config

    default = options(config=read_config(args[at]), run=args[at])
    return parse(options, args[:at] + args[at + 1 :], f"{prog} {args[at]}", description, default)


def option_names(options: type, prefix: str = "") -> list[str]:
    """Names of all options: fields, those of nested dataclasses dotted."""
    names = []
    for name, kind in typing.get_type_hints(options).items():
        if kind is RunConfig:
            names += option_names(kind)
        elif dataclasses.is_dataclass(kind):
            names += option_names(kind, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def nearest(name: str, known: list[str]) -> str:
    """The known name most like `name`, as a whole or in its last part."""

    def likeness(other: str) -> float:
        whole, last = (name, other), (name.rpartition(".")[2], other.rpartition(".")[2])
        ratio = lambda pair: difflib.SequenceMatcher(None, *pair).ratio()
        return max(ratio(whole), 0.9 * ratio(last))

    return max(known, key=likeness)


def _check_names(args: list[str], known: list[str]) -> None:
    for given in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
        name = given[2:].replace("-", "_")
        if name not in (*known, "help"):
            raise ConfigError(f"no option {given}; did you mean --{nearest(name, known)}?")


def _refused_value(error: BaseException | None) -> ConfigError | None:
    """The `ConfigError` of a dataclass's validation, which tyro reports in its own words and then exits."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__context__
    return error


def _sentence(report: str) -> str:
    """What tyro printed in a box (title, message, rule, further help): the message, in one line."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", row).strip(" │") for row in report.splitlines()[1:]]
    is_rule = lambda row: not row.strip("─-╰╯")
    message = itertools.takewhile(lambda row: not is_rule(row), itertools.dropwhile(is_rule, rows))
    return " ".join(message).removeprefix("Error parsing ")
