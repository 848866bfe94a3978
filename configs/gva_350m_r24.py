"""GVA with decoupled RoPE, r = 24; otherwise gva_350m."""

from dataclasses import replace

from gva_350m import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, rope_dim=24)
    return replace(run, name="gva_350m_r24", model=replace(run.model, attention=attention))
