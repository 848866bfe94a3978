"""Attention families as Linen modules, each usable alone in someone else's model."""

from gva_jax.attention.gta import GroupedTiedAttention
from gva_jax.attention.gva import GroupedValueAttention
from gva_jax.attention.kv import KeyIsValueAttention
from gva_jax.attention.mla import LatentAttention
from gva_jax.attention.multihead import MultiHeadAttention
from gva_jax.attention.registry import FAMILIES, build

__all__ = [
    "FAMILIES",
    "GroupedTiedAttention",
    "GroupedValueAttention",
    "KeyIsValueAttention",
    "LatentAttention",
    "MultiHeadAttention",
    "build",
]
