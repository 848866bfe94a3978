"""One learned gate a head on the values, 26,186,112 parameters; otherwise gatedv_medium."""

from dataclasses import replace

from gatedv_medium import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, value_transform="headwise_g2")
    return replace(run, name="gatedv_medium_headwise_g2", model=replace(run.model, attention=attention))
