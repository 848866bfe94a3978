"""GatedV at its medium size: SiLU on the values; otherwise gatedv_medium."""

from dataclasses import replace

from gatedv_medium import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, value_transform="silu")
    return replace(run, name="gatedv_medium_silu", model=replace(run.model, attention=attention))
