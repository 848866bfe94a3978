"""Values v tanh(v); otherwise gatedv_medium."""

from dataclasses import replace

from gatedv_medium import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, value_transform="tanh_gate")
    return replace(run, name="gatedv_medium_tanh_gate", model=replace(run.model, attention=attention))
