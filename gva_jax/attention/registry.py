"""Name -> attention family. A new family is one file and one line here.

Transforms have registries of their own, one line each, in `gva_jax.attention.values` and `gva_jax.attention.outputs`.
"""

import dataclasses

import jax.numpy as jnp

from gva_jax.attention.base import Attention
from gva_jax.attention.gta import GroupedTiedAttention
from gva_jax.attention.gva import GroupedValueAttention
from gva_jax.attention.kv import KeyIsValueAttention
from gva_jax.attention.mla import LatentAttention
from gva_jax.attention.multihead import MultiHeadAttention
from gva_jax.config import AttentionConfig, ConfigError, require

FAMILIES = {
    "mha": MultiHeadAttention,
    "gqa": MultiHeadAttention,
    "mqa": MultiHeadAttention,
    "mla": LatentAttention,
    "gva": GroupedValueAttention,
    "keyless": GroupedValueAttention,
    "kv": KeyIsValueAttention,
    "gta": GroupedTiedAttention,
}

# Why families lack a field, where it is not its name that says it.
_REASONS = {"k_norm": " (a norm of keys would not fold into the query)"}


def build(config: AttentionConfig, *, dtype=jnp.float32, param_dtype=jnp.float32, **kwargs) -> Attention:
    """The module that `config` describes. `kwargs` are Linen's own (`name`, `parent`) or fields of the module.

    Raises:
      ConfigError: an unknown family, or a field set that the family does not have.
    """
    if config.family not in FAMILIES:
        raise ConfigError(f"attention.family = {config.family!r}: must be one of {', '.join(FAMILIES)}")
    if config.family == "mha":
        right = f"MHA has one group per head; leave it None, or {config.num_heads}"
        require(config.num_kv_heads in (None, config.num_heads), "attention.num_kv_heads", config.num_kv_heads, right)
    if config.family == "mqa":
        require(config.num_kv_heads == 1, "attention.num_kv_heads", config.num_kv_heads, "MQA has one group: must be 1")
    if config.family == "keyless":
        right = "Keyless attention is GVA without position in the scores; leave it None, or 0"
        require(config.rope_dim in (None, 0), "attention.rope_dim", config.rope_dim, right)
        config = dataclasses.replace(config, rope_dim=0)
    module = FAMILIES[config.family]
    known = {f.name for f in dataclasses.fields(module)}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name in known:
            kwargs[f.name] = value
        elif f.name != "family" and value != f.default:
            why = _REASONS.get(f.name, "")
            right = f"family {config.family!r} has no such field{why}; leave it {f.default!r}"
            raise ConfigError(f"attention.{f.name} = {value!r}: {right}")
    return module(dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype), **kwargs)
