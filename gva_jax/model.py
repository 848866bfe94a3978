"""A decoder-only transformer around any attention family: pre-RMSNorm, SwiGLU, no biases.

Letters: B batch, T positions, D model width, L layers, vocab the vocabulary size.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gva_jax.attention.depth import DepthMixer, Own
from gva_jax.attention.layers import Projection, RMSNorm, normal
from gva_jax.attention.registry import build
from gva_jax.attention.training.common import KEPT
from gva_jax.attention.values import Moments
from gva_jax.cache import Cache
from gva_jax.compat import wide_dtype
from gva_jax.config import ConfigError, ModelConfig
from gva_jax.sharding import constrain

# What layers keep, beside their inputs. Attention's result is dearest to compute again, and one activation wide.
_KEPT = jax.checkpoint_policies.save_only_these_names(KEPT)
_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_from_both_policies(_DOTS, _KEPT),
    "attention": _KEPT,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _dtypes(config: ModelConfig) -> dict:
    return {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}


def _wide(config: ModelConfig):
    """The logits' dtype: they leave the last product unrounded, whatever the activations are."""
    return wide_dtype(jnp.dtype(config.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(like, table: Float[Array, "vocab D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """`table[tokens]`, of the shape and dtype `like`.

    Its gradient is summed in float32: a batch has thousands of a frequent token, whose sum would swallow bfloat16's
    terms.
    """
    return jnp.take(table, tokens, axis=0)


def _rows_backward(like, tokens, dx):
    shape, dtype = like
    wide = wide_dtype(dtype)
    return jnp.zeros(shape, wide).at[tokens].add(dx.astype(wide)).astype(dtype), None


_rows.defvjp(lambda like, table, tokens: (_rows(like, table, tokens), tokens), _rows_backward)


class SwiGLU(nn.Module):
    """`(SiLU(x Wg) * (x Wu)) Wd` (arXiv 2002.05202)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        kw, hidden = _dtypes(self.config), (self.config.hidden_dim,)
        y = nn.silu(Projection(hidden, name="gate", **kw)(x)) * Projection(hidden, name="up", **kw)(x)
        return Projection((self.config.model_dim,), name="down", **kw)(y)


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each on normalised input and added to the residual stream."""

    config: ModelConfig
    implementation: str | None = None

    def setup(self):
        kw = _dtypes(self.config)
        self.attention_norm, self.mlp_norm = RMSNorm(**kw), RMSNorm(**kw)
        self.attention = build(self.config.attention, implementation=self.implementation, **kw)
        self.mlp = SwiGLU(self.config)
        self.dropout = nn.Dropout(self.config.dropout)

    def __call__(self, x: Float[Array, "B T D"], positions, segment_ids, earlier: tuple[Own, ...] | None = None):
        """Training forward, and what later layers may need: with `earlier` this layer's keys and values, else None."""
        x = constrain(x, "batch", "sequence", None)
        depth, mix = _depth(earlier)
        y = self.attention(self.attention_norm(x), positions=positions, segment_ids=segment_ids, **mix)
        x = x + self._drop(y)
        x = x + self._drop(self.mlp(self.mlp_norm(x)))
        return constrain(x, "batch", "sequence", None), depth.own

    def prefill(
        self,
        x: Float[Array, "B T D"],
        cache: Cache,
        lengths: Int[Array, "B"],
        earlier: tuple[Own, ...] | None = None,
    ):
        """Outputs, cache, and what later layers may need."""
        depth, mix = _depth(earlier)
        y, cache = self.attention.prefill(self.attention_norm(x), cache, lengths=lengths, **mix)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache, depth.own

    def _drop(self, x):
        return self.dropout(x, deterministic=not self.has_rng("dropout"))


def _depth(earlier: tuple[Own, ...] | None) -> tuple[DepthMixer, dict]:
    """What mixes a layer's values with earlier layers', and the keyword of attention that asks for it, if anything."""
    depth = DepthMixer(earlier or ())
    return depth, {} if earlier is None else {"mix": depth}


class Transformer(nn.Module):
    """Token ids to logits.

    Dropout is active where `apply` is given a `dropout` random key. Caches are a tuple with one `Cache` a layer.

    Attributes:
      config: sizes, attention, dtypes.
      implementation: decode kernel, see `gva_jax.kernels`; None picks the device's best.
    """

    config: ModelConfig
    implementation: str | None = None

    def __post_init__(self):
        build(self.config.attention, parent=None)  # refuses what the family cannot be, before anything is built
        super().__post_init__()

    def setup(self):
        config, kw = self.config, _dtypes(self.config)
        self.embedding = nn.Embed(config.vocab_size, config.model_dim, embedding_init=normal(), **kw)
        block = Block
        if config.remat != "none":
            block = nn.remat(Block, policy=REMAT_POLICIES[config.remat], prevent_cse=not config.scan_layers)
        if config.scan_layers:
            scanned = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=config.num_layers,
            )
            self.layers = scanned(config, self.implementation)
        else:
            self.layers = [block(config, self.implementation) for _ in range(config.num_layers)]
        self.final_norm = RMSNorm(**kw)
        if not config.tie_embeddings:
            self.unembedding = Projection((config.vocab_size,), out_dtype=_wide(config), **kw)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Training forward: float32 logits (float64 in float64 models)."""
        return self._logits(self._layers(tokens, positions, segment_ids))

    def hidden(self, tokens, positions=None, segment_ids=None) -> Float[Array, "B T D"]:
        """The same up to what the output matrix multiplies; see `output_matrix`."""
        return self.final_norm(self._layers(tokens, positions, segment_ids))

    def _layers(self, tokens, positions, segment_ids) -> Float[Array, "B T D"]:
        table = constrain(self.embedding.embedding.astype(self.config.dtype), "vocab", None)
        x = constrain(_rows((table.shape, table.dtype), table, tokens), "batch", "sequence", None)
        if self.config.scan_layers:
            x, _ = self.layers(x, positions, segment_ids)
        else:
            earlier = nothing_earlier(self.config)
            for i, layer in enumerate(self.layers):
                x, own = layer(x, positions, segment_ids, earlier)
                earlier = and_of(self.config, i, earlier, own)
        return x

    def output_matrix(self, params) -> Float[Array, "vocab D"]:
        """What `hidden` is multiplied with, in the parameters' dtype."""
        if self.config.tie_embeddings:
            return params["embedding"]["embedding"]
        return params["unembedding"]["kernel"].T

    def _logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        x = self.final_norm(x)
        if self.config.tie_embeddings:
            matrix = self.embedding.embedding.astype(x.dtype)
            logits = jnp.einsum("BTD,VD->BTV", x, matrix, preferred_element_type=_wide(self.config))
        else:
            logits = self.unembedding(x)
        return constrain(logits, "batch", "sequence", "vocab")

    # ---- decoding ----------------------------------------------------------------------------------------------------

    def init_cache(
        self, batch: int, max_length: int, dtype=None, layout: str | None = None, **pages
    ) -> tuple[Cache, ...]:
        """Empty caches, one a layer; needs no parameters. `dtype=None`: the activations'. See `gva_jax.cache`."""
        attention = build(self.config.attention, parent=None)
        dtype = jnp.dtype(dtype or self.config.dtype)
        one = lambda: attention.init_cache(batch, max_length, dtype, layout, **pages)
        return tuple(one() for _ in range(self.config.num_layers))

    def prefill(
        self, tokens: Int[Array, "B T"], caches: tuple[Cache, ...], *, lengths: Int[Array, "B"], last: bool = False
    ) -> tuple[Float[Array, "B _ vocab"], tuple[Cache, ...]]:
        """Append row b's first `lengths[b]` tokens; logits past them mean nothing.

        `last` computes only the logits behind each row's last new token, (B, 1, vocab).
        """
        x, new, earlier = self.embedding(tokens), [], nothing_earlier(self.config)
        # Unrolled even where training scans: caches as scanned inputs and outputs would be copied at every step.
        for i, (layer, cache) in enumerate(zip(self._cached_layers(), caches, strict=True)):
            x, cache, own = layer(x, cache, lengths, earlier)
            earlier = and_of(self.config, i, earlier, own)
            new.append(cache)
        if last:
            x = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        return self._logits(x), tuple(new)

    def decode(self, tokens: Int[Array, "B T"], caches: tuple[Cache, ...]):
        """Append T tokens to every row: logits (B, T, vocab) and the caches."""
        return self.prefill(tokens, caches, lengths=jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32))

    def _cached_layers(self) -> list[Callable]:
        if not self.config.scan_layers:
            return [layer.prefill for layer in self.layers]
        block, stacked = Block(self.config, self.implementation, parent=None), self.layers.variables["params"]

        def at(i):
            params = jax.tree.map(lambda p: p[i], stacked)
            return lambda *args: block.apply({"params": params}, *args, method="prefill")

        return [at(i) for i in range(self.config.num_layers)]


# ---- Depth-Attention: keys and values that layers hand on ------------------------------------------------------------


def nothing_earlier(config: ModelConfig) -> tuple[Own, ...] | None:
    """What the first layer gets: None where nothing is handed on."""
    return () if config.depth_sources else None


def and_of(config: ModelConfig, layer: int, earlier: tuple[Own, ...] | None, own: Own | None):
    """What the layer after `layer` gets."""
    return (*earlier, own) if layer in config.depth_sources else earlier


# ---- layouts of the parameters, initialisation from data -------------------------------------------------------------


def unstack(model: Transformer, variables) -> tuple[Transformer, dict]:
    """The same model with one parameter tree a layer: slicing stacked layers would copy the weights at every step."""
    if not model.config.scan_layers:
        return model, variables
    params = dict(variables["params"])
    stacked = params.pop("layers")
    for i in range(model.config.num_layers):
        params[f"layers_{i}"] = jax.tree.map(lambda p, i=i: p[i], stacked)
    return model.clone(config=replace(model.config, scan_layers=False)), {**variables, "params": params}


def stack(model: Transformer, variables) -> tuple[Transformer, dict]:
    """The inverse of `unstack`."""
    if model.config.scan_layers:
        return model, variables
    params = dict(variables["params"])
    layers = [params.pop(f"layers_{i}") for i in range(model.config.num_layers)]
    params["layers"] = jax.tree.map(lambda *p: jnp.stack(p), *layers)
    return model.clone(config=replace(model.config, scan_layers=True)), {**variables, "params": params}


def calibrate(model: Transformer, variables, tokens: Int[Array, "B T"]):
    """Freshly initialised `variables` with every layer's key maps scaled to what it really sees on `tokens`.

    Layer by layer, since a layer's input depends on those before it; see `GroupedValueAttention.calibrate`.

    Raises:
      ConfigError: an attention family whose keys are not read from values by a map.
    """
    config = model.config
    attention = build(config.attention, parent=None, **_dtypes(config))
    if not hasattr(attention, "calibrate"):
        raise ConfigError(f"attention.family = {config.attention.family!r}: has no key map to calibrate, gva has")
    flat, variables = unstack(model, variables)
    params = dict(variables["params"])
    for layer, seen in _layers_and_inputs(config, params, tokens):
        layer["attention"] = attention.calibrate({"params": layer["attention"]}, seen)["params"]
    variables = {**variables, "params": params}
    return stack(flat, variables)[1] if config.scan_layers else variables


def measure_value_moments(model: Transformer, variables, tokens: Int[Array, "B T"]) -> Moments:
    """Mean and deviation of projected values, then of their SiLU, over all layers on `tokens`.

    They are the constants of the value transforms `affine_match` and `matched_silu`: measured on freshly initialised
    variables, they go into the config as `model.attention.value_moments`. One set serves all layers, whose values
    start at the same scale.

    Raises:
      ConfigError: MLA, whose values are made behind the cache.
    """
    config = model.config
    if config.attention.family == "mla":
        raise ConfigError("attention.family = 'mla': has no cached values to measure")
    attention = build(config.attention, parent=None, **_dtypes(config))

    @jax.jit
    def of_layers(variables):
        params = dict(unstack(model, variables)[1]["params"])
        layers = _layers_and_inputs(config, params, tokens)
        return jnp.stack([attention.measure_values({"params": layer["attention"]}, seen) for layer, seen in layers])

    mean, deviation = of_layers(variables).reshape(-1, 2, 2).transpose(2, 0, 1)  # each (L, 2): of v, of SiLU(v)
    pooled = mean.mean(0)
    spread = jnp.sqrt((deviation**2 + (mean - pooled) ** 2).mean(0))
    return tuple(float(x) for pair in zip(pooled, spread, strict=True) for x in pair)


def _layers_and_inputs(config: ModelConfig, params: dict, tokens: Int[Array, "B T"]) -> Iterator[tuple[dict, Array]]:
    """Each layer's parameters, which may be replaced in place, and what its attention then sees; layers unstacked."""
    block, norm = Block(config, parent=None), RMSNorm(**_dtypes(config))
    x, earlier = params["embedding"]["embedding"].astype(config.dtype)[tokens], nothing_earlier(config)
    for i in range(config.num_layers):
        layer = params[f"layers_{i}"] = dict(params[f"layers_{i}"])
        yield layer, norm.apply({"params": layer["attention_norm"]}, x)
        x, own = block.apply({"params": layer}, x, None, None, earlier)
        earlier = and_of(config, i, earlier, own)
