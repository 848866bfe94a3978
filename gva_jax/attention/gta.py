"""Grouped Tied Attention: one tied state serves as values and, with half its width, as keys (arXiv 2505.21487).

    kv[g]     = x Wkv[g]                                 width d            -> cached
    k_rope    = RoPE(x Wkr)                              width d/2, shared  -> cached rotated
    keys      [kv[g][:d/2] | k_rope], values kv[g]
    o[h]      = softmax((q[h][:d/2]·kv[g(h)][:d/2] + RoPE(q[h][d/2:])·k_rope) / sqrt(d)) kv[g(h)]

This is K=V attention with a rotary width of half the head, under its own name; all four parts are those of `kv.py`. In
the decode kernel the content query is padded with zeros to d, so that it meets the second half of a value with 0.
"""

from gva_jax.attention.kv import KeyIsValueAttention
from gva_jax.config import require


class GroupedTiedAttention(KeyIsValueAttention):
    """Causal attention whose cache is `G d + d/2` scalars per token. Attributes as of `KeyIsValueAttention`.

    Raises:
      ConfigError: a head width that is no multiple of 4, a rotary width other than None (or d/2, which it is).
    """

    family = "gta"

    def __post_init__(self):
        half = self.head_dim / 2
        require(half % 2 == 0, "head_dim", self.head_dim, "GTA rotates half of it: must be a multiple of 4")
        right = f"GTA rotates half of each head; leave it None, or {self.head_dim // 2}"
        require(self.rope_dim in (None, half), "rope_dim", self.rope_dim, right)
        super().__post_init__()

    @property
    def _rotary(self) -> int:
        """r."""
        return self.head_dim // 2
