"""What a config costs: parameters, cache and FLOPs, without training anything or allocating a parameter.

FLOPs per token (multiply and add count two; normalisation, softmax and other elementwise work is left out):

    forward   2 P + L H (k + v) (T + 1)             training   3 forward (recomputation by remat is left out)
    decode    2 P + L H (k' + v') 2 S               at a full context, S = T

P are the parameters that multiply every token: all matrices of attention, SwiGLU and the output (the embedding counts
where it is tied: as the output), not the look-up of the embedding. Scores of width k and values of width v are taken
over the (T + 1)/2 positions that a causal token sees on average. In training k = d and v = w, but k = w + r in absorbed
GVA. In decoding k' is the width of what a query meets in the cache, rotary key included, and v' that of the cached
value (c in MLA). Where GVA rebuilds keys (full RoPE), its key map multiplies every cached token: 2 w d L H (S - 1)
more. Depth-Attention on GVA makes each layer's own keys, from its first source on: 2 w n H a layer more; what it does
with them is elementwise. XSA on MLA makes each token's own value once more: 2 c d L H.

Letters: T context length, S cached tokens, L layers, H query heads, G groups, d head width, r rotary width, n = d - r,
w value width (d unless values are transformed to narrower ones).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Group
from rich.table import Table

from gva_jax.attention.gva import GroupedValueAttention
from gva_jax.attention.mla import LatentAttention
from gva_jax.attention.registry import build
from gva_jax.cache import Cache
from gva_jax.config import AttentionConfig, ModelConfig, RunConfig
from gva_jax.model import Transformer


def describe(config: RunConfig) -> dict[str, Any]:
    """Figures of a config; see the module for FLOPs. Cache bytes are those of arrays really allocated."""
    with jax.enable_x64(config.model.dtype == "float64"):
        parts = _parameters(config.model)
        caches, matching = _caches(config.model), _caches(matching_gqa(config.model))
    scalars, nbytes = _per_token(caches)
    gqa_bytes = _per_token(matching)[1]
    return {
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "cache_scalars_per_token": scalars,
        "cache_scalars_per_token_per_layer": scalars // len(caches),
        "cache_bytes_per_token": nbytes,
        "cache_bytes_per_token_per_layer": nbytes // len(caches),
        "gqa_cache_bytes_per_token": gqa_bytes,
        "cache_ratio_to_gqa": nbytes / gqa_bytes,
        "flops_per_token": _flops(config, parts, caches[0]),
    }


def training_flops(config: RunConfig) -> int:
    """FLOPs per token of a training step, by the formula of the module; allocates nothing."""
    return 3 * _forward_flops(config, _parameters(config.model))


def matching_gqa(model: ModelConfig) -> ModelConfig:
    """The same model with grouped-query attention of the same heads, groups and head width.

    MLA has no groups: it is measured against the largest group count up to H/4 that divides H, four query heads a group
    as in the 350M family where that fits.
    """
    attention = model.attention
    heads, groups = attention.num_heads, attention.num_kv_heads or attention.num_heads
    if attention.family == "mla":
        groups = max(g for g in range(1, max(1, heads // 4) + 1) if heads % g == 0)
    gqa = AttentionConfig(family="gqa", num_heads=heads, num_kv_heads=groups, head_dim=attention.head_dim)
    return dataclasses.replace(model, attention=gqa)


# ---- counting --------------------------------------------------------------------------------------------------------

_PARTS = {"embedding": "embedding", "attention": "attention", "mlp": "mlp", "unembedding": "output"}


def _parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters of each part, from shapes alone."""
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "output"), 0)
    for names, leaf in _leaves(model):
        norm = any(name.endswith("norm") for name in names)
        counts["norms" if norm else next(_PARTS[name] for name in names if name in _PARTS)] += leaf.size
    if model.tie_embeddings:
        del counts["output"]
    return counts


@functools.cache
def _leaves(model: ModelConfig) -> list[tuple[list[str], jax.ShapeDtypeStruct]]:
    """Every parameter's path and shape."""
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    variables = jax.eval_shape(Transformer(model).init, jax.random.key(0), tokens)
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    return [([key.key for key in path], leaf) for path, leaf in leaves]


def _caches(model: ModelConfig) -> tuple[Cache, ...]:
    return Transformer(model).init_cache(batch=1, max_length=128)


def _per_token(caches: tuple[Cache, ...]) -> tuple[int, int]:
    """Scalars and bytes of all layers over their capacity."""
    parts = [(a, cache.capacity) for cache in caches for a in (cache.values, cache.keys, cache.rope_keys)]
    parts = [(a, capacity) for a, capacity in parts if a is not None]
    return sum(a.size // capacity for a, capacity in parts), sum(a.nbytes // capacity for a, capacity in parts)


def _matrices(model: ModelConfig, parameters: dict[str, int]) -> int:
    """P: parameters that multiply every token."""
    every = parameters["attention"] + parameters["mlp"] + parameters.get("output", parameters["embedding"])
    every -= sum(leaf.size for names, leaf in _leaves(model) if names[-1] == "bias")
    attention = build(model.attention, parent=None)
    if isinstance(attention, GroupedValueAttention) and model.depth_sources:
        n = attention.head_dim - (attention.rope_dim or 0)
        every += (model.num_layers - model.depth_sources[0]) * attention.num_heads * attention.value_width * n
    if isinstance(attention, LatentAttention) and attention.output_transform == "xsa":  # reads its own token's values
        every += model.num_layers * attention.num_heads * attention.latent_dim * attention.head_dim
    return every


def _forward_flops(config: RunConfig, parameters: dict[str, int]) -> int:
    model, T = config.model, config.data.context_length
    attention = build(model.attention, parent=None)
    scores_and_values = model.num_layers * attention.num_heads * sum(attention.training_widths())
    return 2 * _matrices(model, parameters) + scores_and_values * (T + 1)


def _flops(config: RunConfig, parameters: dict[str, int], cache: Cache) -> dict[str, int]:
    """FLOPs per token by the formulas of the module."""
    model, T = config.model, config.data.context_length
    forward, matrices = _forward_flops(config, parameters), _matrices(model, parameters)
    attention = build(model.attention, parent=None)
    per_width = model.num_layers * attention.num_heads

    groups = cache.values.shape[1]
    width = lambda a: 0 if a is None else a.size // (cache.capacity * (groups if a.ndim == 4 else 1))
    keys = width(cache.values if cache.keys is None else cache.keys) + width(cache.rope_keys)
    rebuilt = 0
    if isinstance(attention, GroupedValueAttention) and attention.rope_dim is None:
        keys, rebuilt = attention.head_dim, attention.value_width * attention.head_dim * (T - 1)
    decode = 2 * matrices + per_width * 2 * ((keys + width(cache.values)) * T + rebuilt)
    return {"forward": forward, "training": 3 * forward, "decode": decode}


# ---- printing --------------------------------------------------------------------------------------------------------


def table(config: RunConfig, figures: dict[str, Any]) -> Group:
    """The figures for a person."""
    attention, layers = config.model.attention, config.model.num_layers
    parameters = _columns("parameters", "")
    for part, count in figures["parameters_by_part"].items():
        parameters.add_row(part, f"{count:,}")
    parameters.add_section()
    parameters.add_row("total", f"{figures['parameters']:,}")

    cache = _columns(f"cache per token ({config.model.dtype})", attention.family, "matching GQA", "ratio")
    ratio, gqa = figures["cache_ratio_to_gqa"], figures["gqa_cache_bytes_per_token"]
    scalars, nbytes = figures["cache_scalars_per_token"], figures["cache_bytes_per_token"]
    for name, mine, theirs in (
        ("scalars a layer", scalars // layers, gqa * scalars // nbytes // layers),
        ("bytes a layer", nbytes // layers, gqa // layers),
        (f"bytes, {layers} layers", nbytes, gqa),
    ):
        cache.add_row(name, f"{mine:,}", f"{theirs:,}", f"{ratio:.6g}")

    flops = _columns(f"FLOPs per token, context {config.data.context_length:,}", "")
    for name, count in figures["flops_per_token"].items():
        flops.add_row(name, f"{count:,}")
    return Group(parameters, cache, flops)


def _columns(first: str, *others: str) -> Table:
    columns = Table(first)
    for other in others:
        columns.add_column(other, justify="right")
    return columns
