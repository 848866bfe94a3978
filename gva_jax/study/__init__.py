"""Studies: variants compared on paired seeds, at learning rates that a search on development text chose.

A study file defines `study() -> Study`; `gva study FILE` runs it. This package loads nothing heavy until it trains.
"""

from gva_jax.study.spec import Member, Search, Study, Variant

__all__ = ["Member", "Search", "Study", "Variant"]
