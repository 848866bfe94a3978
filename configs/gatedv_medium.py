"""Baseline row of GatedV's medium size: plain multi-head attention, 26,158,464 parameters, 327,680 updates.

GatedV itself, SiLU on the values, is gatedv_medium_silu; this is the row that it is measured against. The corpus is
ours: about as many tokens as the paper's 512,000,068, so that the updates make 1.31 passes.
"""

from gva_jax.config import AttentionConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig


def config() -> RunConfig:
    attention = AttentionConfig(family="mha", num_heads=6, head_dim=64)
    return RunConfig(
        name="gatedv_medium",
        model=ModelConfig(vocab_size=8192, num_layers=12, model_dim=384, hidden_dim=1152, attention=attention),
        data=DataConfig(
            source="hf:HuggingFaceFW/fineweb-edu/sample-10BT:train",
            max_bytes=2_150_000_000,
            context_length=256,
            batch_size=8,
            layout="windows",
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        train=TrainConfig(steps=327_680, log_every=100, eval_every=8_192, eval_batches=100, checkpoint_every=8_192),
    )
