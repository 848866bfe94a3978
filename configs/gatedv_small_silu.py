"""GatedV at its small size: SiLU on the values; otherwise gatedv_small."""

from dataclasses import replace

from gatedv_small import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, value_transform="silu")
    return replace(run, name="gatedv_small_silu", model=replace(run.model, attention=attention))
