"""From text to batches: `sources` finds documents, `prepare` makes them a corpus, `loader` lays it out in batches."""

import importlib
import types

from gva_jax.config import ConfigError


def needs_extra(module: str, extra: str = "train") -> types.ModuleType:
    """Import a package of an extra on first use. Raises `ConfigError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module}: needs the extra: pip install 'gva-jax[{extra}]' ({error})") from error
