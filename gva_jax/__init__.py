"""Attention that caches values only, in JAX: Grouped Value Attention, GatedV and the baselines beside them.

Everything here is loaded on first use, so that `import gva_jax` stays light.
"""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "GroupedTiedAttention": "attention",
    "GroupedValueAttention": "attention",
    "KeyIsValueAttention": "attention",
    "LatentAttention": "attention",
    "MultiHeadAttention": "attention",
    "Transformer": "model",
    "calibrate": "model",
    "generate": "decoding",
    "load": "train.checkpoint",
    "measure_value_moments": "model",
}
__all__ = [*sorted(_WHERE), "__version__"]


def __getattr__(name):
    if name not in _WHERE:
        raise AttributeError(f"module 'gva_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gva_jax.{_WHERE[name]}"), name)


def __dir__():
    return sorted([*globals(), *_WHERE])
