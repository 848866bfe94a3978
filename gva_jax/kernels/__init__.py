"""Decode attention over cached values: one contract, several implementations. Knows JAX only, no Flax."""

from gva_jax.kernels.api import decode_attention
from gva_jax.kernels.merge import merge

__all__ = ["decode_attention", "merge"]
