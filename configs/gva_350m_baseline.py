"""GVA baseline: key maps of std 0.02, no Q-norm, full RoPE on the reconstructed keys; otherwise gva_350m."""

from dataclasses import replace

from gva_350m import config as base

from gva_jax.config import RunConfig


def config() -> RunConfig:
    run = base()
    attention = replace(run.model.attention, rope_dim=None, q_norm=False, key_init="default")
    return replace(run, name="gva_350m_baseline", model=replace(run.model, attention=attention))
