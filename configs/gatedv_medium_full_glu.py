"""Values SiLU(x Wv) (x Wg), 27,927,936 parameters; otherwise gatedv_medium."""

from dataclasses import replace

from gatedv_medium import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, value_transform="full_glu")
    return replace(run, name="gatedv_medium_full_glu", model=replace(run.model, attention=attention))
