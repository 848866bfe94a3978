"""Decode attention over cached values: one contract, several implementations. Knows JAX only, no Flax."""

from gva_jax.kernels.api import decode_attention
from gva_jax.kernels.merge import merge
from gva_jax.kernels.sharded import sharded_decode_attention

__all__ = ["decode_attention", "merge", "sharded_decode_attention"]
