"""GatedV on GVA: SiLU on the values, which keys are read from too; otherwise gva_350m."""

from dataclasses import replace

from gva_350m import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, value_transform="silu")
    return replace(run, name="gva_350m_silu", model=replace(run.model, attention=attention))
