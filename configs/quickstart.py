"""Grouped Value Attention on the docstrings of the installed packages: minutes on two CPU cores, no network."""

from gva_jax.config import (
    AttentionConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)


def config() -> RunConfig:
    attention = AttentionConfig(
        family="gva", num_heads=6, num_kv_heads=2, head_dim=32, rope_dim=8, q_norm=True, key_init="scale_matched"
    )
    return RunConfig(
        name="quickstart",
        model=ModelConfig(vocab_size=2048, num_layers=4, model_dim=192, hidden_dim=512, attention=attention),
        data=DataConfig(source="docstrings", context_length=256, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        train=TrainConfig(steps=600),
        sample=SampleConfig(prompts=("Return the", "This function")),
    )
