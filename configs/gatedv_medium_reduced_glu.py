"""Values SiLU(x Wv) (x Wg) of width 43, 26,186,112 parameters; otherwise gatedv_medium."""

from dataclasses import replace

from gatedv_medium import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, value_transform="reduced_glu")
    return replace(run, name="gatedv_medium_reduced_glu", model=replace(run.model, attention=attention))
