"""The grouped-query baseline of the 350M family: full RoPE, 4 key-value heads; otherwise gva_350m."""

from dataclasses import replace

from gva_350m import config as base

from gva_jax.config import AttentionConfig, RunConfig


def config() -> RunConfig:
    run = base()
    attention = AttentionConfig(family="gqa", num_heads=16, num_kv_heads=4, head_dim=64)
    return replace(run, name="gqa_350m", model=replace(run.model, attention=attention))
