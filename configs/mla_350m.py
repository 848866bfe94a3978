"""Latent attention at GVA's cache: latent width 256 and r = 16, 272 scalars per token and layer; otherwise gva_350m."""

from dataclasses import replace

from gva_350m import config as base

from gva_jax.config import AttentionConfig, RunConfig


def config() -> RunConfig:
    run = base()
    attention = AttentionConfig(family="mla", num_heads=16, head_dim=64, latent_dim=256, rope_dim=16)
    return replace(run, name="mla_350m", model=replace(run.model, attention=attention))
