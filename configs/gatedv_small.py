"""Baseline row of GatedV's small size: plain multi-head attention, 2,328,192 parameters.

GatedV itself, SiLU on the values, is gatedv_small_silu; this is the row that it is measured against. The corpus is
ours, cut to about the paper's 40,001,310 tokens; the length of the run is ours too: one pass over them.
"""

from dataclasses import replace

from gatedv_medium import config as base

from gva_jax.config import AttentionConfig, OptimizerConfig, RunConfig, TrainConfig


def config() -> RunConfig:
    run = base()
    attention = AttentionConfig(family="mha", num_heads=4, head_dim=32)
    return replace(
        run,
        name="gatedv_small",
        model=replace(run.model, num_layers=6, model_dim=128, hidden_dim=384, attention=attention),
        data=replace(run.data, max_bytes=168_000_000),
        optimizer=OptimizerConfig(learning_rate=1.2e-3),
        train=TrainConfig(steps=19_532, log_every=100, eval_every=1_000, eval_batches=100, checkpoint_every=1_000),
    )
