"""Grouped Value Attention on the docstrings of the installed packages: minutes on two CPU cores, no network.

Sized for the time: in two minutes two layers that see more text do better than four (2.06 against 2.17 bits per byte).
"""

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
        family="gva", num_heads=4, num_kv_heads=2, head_dim=32, rope_dim=8, q_norm=True, key_init="scale_matched"
    )
    return RunConfig(
        name="quickstart",
        model=ModelConfig(
            vocab_size=4096,
            num_layers=2,
            model_dim=128,
            hidden_dim=384,
            attention=attention,
            scan_layers=False,  # few layers: unrolled they run faster on a CPU and compile as fast
        ),
        data=DataConfig(source="docstrings", context_length=256, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=4e-3, final_ratio=0.02),
        train=TrainConfig(steps=1100, eval_every=400, eval_batches=20, checkpoint_every=400),
        sample=SampleConfig(prompts=("Return the", "This function", "If the"), max_new_tokens=60),
    )
