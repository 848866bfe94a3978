"""What a run is, as frozen dataclasses; every mistake is refused here, before anything is built or written.

A file in `configs/` defines `config() -> RunConfig`; variants modify a base with `dataclasses.replace`. The command
line overrides single fields by their dotted names (`--train.steps 50`). This module imports nothing heavy.
"""

import dataclasses
import importlib.util
import json
import math
import os
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gva_jax.compositions import Activation, OutputTransform, ValueTransform, refusal

# How attention is computed in training; see gva_jax.attention.dispatch.
TrainingImplementation = Literal["chunked", "splash", "tokamax", "cudnn"]
TRAINING_IMPLEMENTATIONS = typing.get_args(TrainingImplementation)


class ConfigError(ValueError):
    """A user's mistake, told in one line: the field, the value it has, and what would be right."""


class RunError(RuntimeError):
    """What ended work that was asked for rightly (a full disk, damaged files), told in one line."""


def require(condition: bool, name: str, value: Any, right: str) -> None:
    """Raises `ConfigError("name = value: right")` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{name} = {value!r}: {right}")


def check_numbers(config: Any, part: str) -> None:
    """Refuses, in the fields of a dataclass, what is not finite and what does not fit a counter (32 bits; text 64)."""
    for one in dataclasses.fields(config):
        value, bits = getattr(config, one.name), 63 if one.name == "max_bytes" else 31
        if one.name == "seed":
            require(0 <= value < 2**32, f"{part}seed", value, "must be at least 0 and below 2**32")
        elif isinstance(value, float):
            require(math.isfinite(value), f"{part}{one.name}", value, "must be a finite number")
        elif isinstance(value, int):
            require(abs(value) < 2**bits, f"{part}{one.name}", value, f"must be below 2**{bits}")


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuses head counts that no attention family can have. G divides H."""
    require(num_heads >= 1, "num_heads", num_heads, "must be 1 or more")
    require(num_kv_heads >= 1, "num_kv_heads", num_kv_heads, "must be 1 or more")
    require(num_heads % num_kv_heads == 0, "num_kv_heads", num_kv_heads, f"must divide num_heads = {num_heads}")
    require(head_dim >= 1, "head_dim", head_dim, "must be 1 or more")


def check_rope_dim(rope_dim: int | None, head_dim: int) -> None:
    """Refuses a rotary width r that is odd, negative, or leaves no content width (None: full RoPE, d even)."""
    if rope_dim is None:
        require(head_dim % 2 == 0, "head_dim", head_dim, "must be even for full RoPE (rope_dim = None)")
        return
    require(rope_dim >= 0 and rope_dim % 2 == 0, "rope_dim", rope_dim, "must be even and not negative")
    right = f"must be below head_dim = {head_dim}; for full RoPE on the reconstructed keys leave it None"
    require(rope_dim < head_dim, "rope_dim", rope_dim, right)


def check_training_implementation(name: str | None) -> None:
    """Refuses a name that is no way to compute training attention."""
    right = f"must be one of {', '.join(TRAINING_IMPLEMENTATIONS)}, or None for the best"
    require(name is None or name in TRAINING_IMPLEMENTATIONS, "training_implementation", name, right)


def check_transforms(family: str, attention: Any) -> None:
    """Refuses transforms that are none, or that the family cannot have; see `gva_jax.compositions`."""
    if (wrong := refusal(family, attention)) is not None:
        name, right = wrong
        raise ConfigError(f"{name} = {getattr(attention, name)!r}: {right}")
    if (moments := attention.value_moments) is not None:
        four = isinstance(moments, tuple | list) and len(moments) == 4
        numbers = four and all(isinstance(x, int | float) and math.isfinite(x) for x in moments)
        right = "must be mean and deviation of v, then of SiLU(v); both deviations above 0"
        require(numbers and moments[1] > 0 and moments[3] > 0, "value_moments", moments, right)


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer. A family takes the fields it knows; one that it does not know must keep its default."""

    # Attention family: a name from gva_jax.attention.registry (mha, gqa, mqa, mla, gva, keyless, kv, gta).
    family: str = "gva"
    # Query heads, H.
    num_heads: int = 16
    # Value groups (KV heads), G; divides H. None: one per query head.
    num_kv_heads: int | None = None
    # Head width, d.
    head_dim: int = 64
    # Rotary width, r (GVA, K=V, MLA): even and below d; 0 for no position; None for full RoPE.
    rope_dim: int | None = None
    # Base of the rotary frequencies.
    rope_base: float = 10_000.0
    # RMS-normalise queries over the head width, before the rotary split.
    q_norm: bool = False
    # RMS-normalise keys (MHA, GQA, MQA only: normalised keys would not fold into the query).
    k_norm: bool = False
    # Latent width, c (MLA only).
    latent_dim: int | None = None
    # Initialisation of the key map (GVA only): std 0.02, or keys that start at the queries' RMS.
    key_init: Literal["default", "scale_matched"] = "default"
    # Training form (GVA only): fold the key map into the query, or make the keys.
    form: Literal["absorbed", "materialised"] = "absorbed"
    # What is done to values before they are cached and aggregated; silu is GatedV. See gva_jax.attention.values.
    value_transform: ValueTransform = "none"
    # What is done to the heads' outputs: a gate (G1), or the token's own value taken out (xsa).
    output_transform: OutputTransform = "none"
    # SiLU on queries, after their projection, before Q-norm and RoPE.
    query_transform: Activation = "none"
    # The same on keys, where keys are made (MHA, GQA, MQA, GVA with full RoPE).
    key_transform: Activation = "none"
    # Constants of affine_match and matched_silu: mean and deviation of v, then of SiLU(v). None: of a Gaussian v at
    # its initial scale. gva_jax.measure_value_moments measures them.
    value_moments: tuple[float, float, float, float] | None = None
    # How training attention is computed: chunked (XLA, anywhere), splash (TPU), tokamax, cudnn (GPU). None: the best.
    training_implementation: TrainingImplementation | None = None

    def __post_init__(self):
        check_numbers(self, "model.attention.")
        groups = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        check_heads(self.num_heads, groups, self.head_dim)
        check_rope_dim(self.rope_dim, self.head_dim)
        require(self.rope_base > 1, "rope_base", self.rope_base, "must be above 1")
        require(self.latent_dim is None or self.latent_dim >= 1, "latent_dim", self.latent_dim, "must be 1 or more")
        check_training_implementation(self.training_implementation)
        check_transforms(self.family, self)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: pre-RMSNorm, SwiGLU, no biases."""

    # Vocabulary size.
    vocab_size: int = 8192
    # Layers, L.
    num_layers: int = 6
    # Model width, D.
    model_dim: int = 128
    # SwiGLU hidden width.
    hidden_dim: int = 384
    # Attention: family, heads, widths.
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    # Depth-Attention: layers (0 is the first) whose values all later ones mix into theirs, token by token. (): none.
    depth_sources: tuple[int, ...] = ()
    # Use the embedding as the output matrix.
    tie_embeddings: bool = True
    # Dropout on each residual branch while training.
    dropout: float = 0.0
    # Scan over stacked layers (compile time independent of depth) rather than unrolling them.
    scan_layers: bool = True
    # What layers keep for the backward pass, which recomputes the rest. none: all that it needs. dots: matrix products'
    # and attention's results. attention: attention's result, so that no flash kernel runs twice. full: their inputs.
    remat: Literal["none", "dots", "attention", "full"] = "none"
    # Activations. Softmax, norms' statistics and logits are float32 whatever this says.
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    # Parameters and optimiser state.
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"

    def __post_init__(self):
        check_numbers(self, "model.")
        for name in ("vocab_size", "num_layers", "model_dim", "hidden_dim"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "must be 1 or more")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "must be at least 0 and below 1")
        if self.depth_sources:
            self._check_depth()

    def _check_depth(self) -> None:
        sources, name = self.depth_sources, "model.depth_sources"
        right = f"must be layers in rising order, 0 to {self.num_layers - 2}: no layer comes after the last"
        require(list(sources) == sorted({i for i in sources if 0 <= i < self.num_layers - 1}), name, sources, right)
        right = "MLA makes its values after aggregation, none is there to be mixed and cached; leave it ()"
        require(self.attention.family != "mla", name, sources, right)
        right = "a scan would save once a layer what layers hand on; set model.scan_layers False"
        require(not self.scan_layers, name, sources, right)


@dataclass(frozen=True)
class DataConfig:
    """Which text, how it is tokenised and how it is laid out in batches."""

    # Where the text comes from: docstrings[:NAME,NAME] (of installed packages), text:GLOB, jsonl:GLOB, parquet:GLOB,
    # tfds:NAME[/CONFIG]:SPLIT, hf:NAME[/CONFIG]:SPLIT, or prepared:DIR, which `gva prepare` wrote.
    source: str = "docstrings"
    # Field of a record that holds the text (jsonl, parquet, tfds, hf).
    text_field: str = "text"
    # A tokenizer's JSON file (of Hugging Face tokenizers). None: train one of model.vocab_size ids on the text.
    tokenizer: str | None = None
    # Use at most this many bytes of text (whole documents, the first ones). None: all.
    max_bytes: int | None = None
    # Tokens a sequence, T.
    context_length: int = 256
    # Sequences in a batch, over all devices and accumulation steps.
    batch_size: int = 8
    # packed: documents do not see each other, positions restart; windows: contiguous windows over the token stream.
    layout: Literal["packed", "windows"] = "packed"
    # Seed of the global shuffle.
    seed: int = 0
    # Share of the documents in each of the development and the held-out split.
    holdout: float = 0.02
    # Where prepared corpora are kept. None: $GVA_JAX_CACHE, else ~/.cache/gva_jax.
    directory: str | None = None

    def __post_init__(self):
        check_numbers(self, "data.")
        for name in ("context_length", "batch_size"):
            require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "must be 1 or more")
        require(0 < self.holdout < 0.5, "data.holdout", self.holdout, "must lie between 0 and 0.5")
        require(self.max_bytes is None or self.max_bytes >= 1, "data.max_bytes", self.max_bytes, "must be 1 or more")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    # Peak learning rate.
    learning_rate: float = 1e-3
    # Final learning rate over the peak.
    final_ratio: float = 0.1
    # Share of the steps that warm up.
    warmup: float = 0.05
    # Decay of the gradients' running mean.
    b1: float = 0.9
    # Decay of the squared gradients' running mean.
    b2: float = 0.95
    # Added to the root of the squared gradients' mean.
    eps: float = 1e-8
    # Decoupled weight decay; norms and embeddings are left out.
    weight_decay: float = 0.1
    # Clip gradients to this global norm. None: do not clip.
    clip_norm: float | None = 1.0
    # norm: by clip_norm alone. zclip: by the norms so far as well; one that stands out from them is clipped (ZClip).
    clip: Literal["norm", "zclip"] = "norm"
    # A norm stands out if it is so many standard deviations above the running mean (zclip only).
    clip_z: float = 2.5
    # Skip steps whose norm is so many standard deviations above the running mean. None: only those not finite.
    skip_spikes: float | None = None

    def __post_init__(self):
        check_numbers(self, "optimizer.")
        require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "must be above 0")
        require(0 <= self.final_ratio <= 1, "optimizer.final_ratio", self.final_ratio, "must lie between 0 and 1")
        require(0 <= self.warmup < 1, "optimizer.warmup", self.warmup, "must be at least 0 and below 1")
        require(0 <= self.b1 < 1, "optimizer.b1", self.b1, "must be at least 0 and below 1")
        require(0 <= self.b2 < 1, "optimizer.b2", self.b2, "must be at least 0 and below 1")
        require(self.eps > 0, "optimizer.eps", self.eps, "must be above 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must not be negative")
        positive = self.clip_norm is None or self.clip_norm > 0
        require(positive, "optimizer.clip_norm", self.clip_norm, "must be above 0, or None")
        require(self.clip in ("norm", "zclip"), "optimizer.clip", self.clip, "must be norm or zclip")
        require(self.clip_z > 0, "optimizer.clip_z", self.clip_z, "must be above 0")
        positive = self.skip_spikes is None or self.skip_spikes > 0
        require(positive, "optimizer.skip_spikes", self.skip_spikes, "must be above 0, or None")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the number of devices."""

    # Replicas that split the batch. -1: all devices that the other axes leave.
    data: int = -1
    # Split the batch and the parameters.
    fsdp: int = 1
    # Split heads, value groups, hidden width and vocabulary.
    tensor: int = 1
    # Split the sequence, for contexts too long for a device; attention gathers values (GQA: keys and values).
    context: int = 1

    def __post_init__(self):
        check_numbers(self, "mesh.")
        require(self.data == -1 or self.data >= 1, "mesh.data", self.data, "must be -1 or a positive integer")
        for name in ("fsdp", "tensor", "context"):
            require(getattr(self, name) >= 1, f"mesh.{name}", getattr(self, name), "must be 1 or more")


@dataclass(frozen=True)
class TrainConfig:
    """How long, and what happens on the way."""

    # Optimiser steps.
    steps: int = 1000
    # Micro-batches a step; divides the batch size.
    accumulation: int = 1
    # Seed of the initial weights and of dropout.
    seed: int = 0
    # Report every so many steps.
    log_every: int = 10
    # Evaluate on the development split every so many steps (and at the end). 0: only at the end.
    eval_every: int = 0
    # Batches an evaluation on the way; the last one reads the whole split. 0: the whole split each time.
    eval_batches: int = 0
    # Save every so many steps (and at the end). 0: only at the end.
    checkpoint_every: int = 0
    # Newest checkpoints kept.
    keep: int = 2
    # Checkpoints at multiples of so many steps are kept for good. 0: none.
    keep_every: int = 0
    # So many checkpoints with the lowest development loss are kept too. 0: none.
    keep_best: int = 0
    # Steps in a row that may be skipped, because loss or gradients are not finite, or spike; one more ends the run.
    max_skips: int = 10
    # With several processes: end all when one has not reached the next step (evaluation batch, save) for so many
    # seconds, and name it. The first step, which is compiled, may take 6 times as long. 0: wait for ever.
    stall_seconds: float = 600

    def __post_init__(self):
        check_numbers(self, "train.")
        for name in ("steps", "accumulation", "log_every", "keep"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be 1 or more")
        for name in ("eval_every", "eval_batches", "checkpoint_every", "keep_every", "keep_best", "max_skips"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "must not be negative")
        saved, measured = self.checkpoint_every, self.eval_every
        right = f"must be a multiple of train.checkpoint_every = {saved}, the steps that are saved"
        met = not self.keep_every or (saved and self.keep_every % saved == 0)
        require(met, "train.keep_every", self.keep_every, right)
        right = f"needs train.checkpoint_every = {saved} to be a multiple of train.eval_every = {measured}"
        met = not self.keep_best or (saved and measured and saved % measured == 0)
        require(met, "train.keep_best", self.keep_best, right)
        require(self.stall_seconds >= 0, "train.stall_seconds", self.stall_seconds, "must not be negative (0: off)")


@dataclass(frozen=True)
class SampleConfig:
    """What is written from the cache when training ends."""

    # Texts to continue. None given: a document from its beginning.
    prompts: tuple[str, ...] = ()
    # Stop after so many new tokens, or at the end of the text.
    max_new_tokens: int = 100
    # Divide logits by this before sampling. 0: take the likeliest token (greedy).
    temperature: float = 0.7
    # Sample among the likeliest tokens that together have this probability.
    top_p: float = 0.95

    def __post_init__(self):
        check_numbers(self, "sample.")
        require(self.max_new_tokens >= 1, "sample.max_new_tokens", self.max_new_tokens, "must be 1 or more")
        require(self.temperature >= 0, "sample.temperature", self.temperature, "must not be negative (0: greedy)")
        require(0 < self.top_p <= 1, "sample.top_p", self.top_p, "must be above 0 and at most 1")


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    # Name of the run; its folder is RUNS/NAME.
    name: str = "run"
    # Folder that holds the runs' folders.
    runs: str = "runs"
    # The transformer.
    model: ModelConfig = field(default_factory=ModelConfig)
    # Text, tokens, batches.
    data: DataConfig = field(default_factory=DataConfig)
    # AdamW and its schedule.
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # Devices.
    mesh: MeshConfig = field(default_factory=MeshConfig)
    # Steps, reports, checkpoints.
    train: TrainConfig = field(default_factory=TrainConfig)
    # What is written when training ends.
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self):
        plain = bool(self.name) and not set(self.name) & set("/\\") and self.name not in (".", "..")
        require(plain, "name", self.name, "must be a plain folder name")
        right = f"must divide data.batch_size = {self.data.batch_size}"
        divides = self.data.batch_size % self.train.accumulation == 0
        require(divides, "train.accumulation", self.train.accumulation, right)

    @property
    def folder(self) -> Path:
        return Path(self.runs) / self.name


# ---- to and from JSON and files --------------------------------------------------------------------------------------


def to_dict(config: Any) -> dict:
    """The config as plain dictionaries, lists and scalars."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(cls: type, values: dict, path: str = "") -> Any:
    """The inverse of `to_dict`. Raises `ConfigError` for a field that `cls` does not have."""
    hints = typing.get_type_hints(cls)
    unknown = set(values) - set(hints)
    if unknown:
        raise ConfigError(f"{path}{min(unknown)}: no such field; known are {', '.join(hints)}")
    kwargs = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            value = from_dict(hints[name], value, f"{path}{name}.")
        elif isinstance(value, list):
            value = tuple(value)
        kwargs[name] = value
    return cls(**kwargs)


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """The fields in which two configs differ, as `path: old -> new`."""
    found = []
    for f in dataclasses.fields(old):
        a, b = getattr(old, f.name), getattr(new, f.name)
        if dataclasses.is_dataclass(a):
            found += difference(a, b, f"{path}{f.name}.")
        elif a != b and not (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)):
            found.append(f"{path}{f.name}: {a!r} -> {b!r}")
    return found


def configs_folder() -> Path:
    """Where the shipped configs lie: in the wheel inside the package, in a checkout beside it."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def shipped() -> list[str]:
    """Names of the shipped configs."""
    return sorted(p.stem for p in configs_folder().glob("*.py"))


def load(name: str | os.PathLike) -> RunConfig:
    """Load a config by the path of its file or by the name of a shipped one (`quickstart`)."""
    path = Path(name)
    if path.suffix != ".py" and not path.is_file():
        path = configs_folder() / f"{path.name}.py"
    if not path.is_file():
        raise ConfigError(f"config {str(name)!r}: no such file or shipped config; shipped are {', '.join(shipped())}")
    return returned(path, "config", RunConfig)


def returned(path: Path, name: str, cls: type) -> Any:
    """What the function `name` of a Python file returns, which must be a `cls`."""
    function = getattr(import_file(path), name, None)
    if not isinstance(function, types.FunctionType):
        raise ConfigError(f"{name} {str(path)!r}: must define a function {name}() that returns a {cls.__name__}")
    try:
        found = function()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} {str(path)!r}: {name}() raised {type(error).__name__}: {error}") from error
    if not isinstance(found, cls):
        raise ConfigError(f"{name} {str(path)!r}: {name}() returned {type(found).__name__}, must be a {cls.__name__}")
    return found


def import_file(path: Path) -> types.ModuleType:
    """Run a config file; its folder is importable meanwhile, so that a variant can import its base."""
    spec = importlib.util.spec_from_file_location(f"gva_jax_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"config {str(path)!r} does not load: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def cache_folder(directory: str | None = None) -> Path:
    """Where prepared corpora and compiled programs are kept."""
    return Path(directory or os.environ.get("GVA_JAX_CACHE") or Path.home() / ".cache" / "gva_jax")
