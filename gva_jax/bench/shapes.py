"""One decode step's attention in each family: its sizes, and the bytes and FLOPs that it cannot do without."""

from dataclasses import dataclass

import jax.numpy as jnp

from gva_jax.config import check_heads, check_rope_dim, require

FAMILIES = ("gqa", "gva", "mla")


@dataclass(frozen=True)
class DecodeShape:
    """What is measured: `batch` rows that each hold `context` live tokens, one new token a row."""

    # Rows that decode at once, B.
    batch: int = 1
    # Live tokens a row.
    context: int = 8192
    # Query heads, H.
    num_heads: int = 16
    # Value groups (KV heads), G.
    num_kv_heads: int = 4
    # Head width, d.
    head_dim: int = 64
    # Rotary width, r.
    rope_dim: int = 16
    # MLA's latent width, c.
    latent_dim: int = 256
    # Of queries and cache.
    dtype: str = "bfloat16"

    def __post_init__(self):
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_rope_dim(self.rope_dim, self.head_dim)
        for name in ("batch", "context", "latent_dim"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be 1 or more")
        known = ("bfloat16", "float16", "float32")
        require(self.dtype in known, "dtype", self.dtype, f"must be one of {', '.join(known)}")

    def widths(self, family: str) -> tuple[int, int, int | None, int]:
        """Groups, value width, key width (None: values are keys), rotary width."""
        d, r = self.head_dim, self.rope_dim
        return {
            "gqa": (self.num_kv_heads, d, d, 0),
            "gva": (self.num_kv_heads, d, None, r),
            "mla": (1, self.latent_dim, None, r),
        }[family]

    def cost(self, family: str) -> tuple[int, int]:
        """Bytes and FLOPs of one step for one row."""
        G, dv, dk, r = self.widths(family)
        scalars = G * (dv + (dk or 0)) + r
        flops = 2 * self.num_heads * ((dk or dv) + r + dv)
        return scalars * jnp.dtype(self.dtype).itemsize * self.context, flops * self.context
