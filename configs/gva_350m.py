"""GVA with decoupled RoPE, r = 16: 350M parameters, 30B tokens of FineWeb-Edu, context 2,048 (arXiv 2609.13285)."""

from gva_jax.config import AttentionConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig


def config() -> RunConfig:
    # Absorbed, the default: fewer bytes of memory traffic than materialised keys, against 3 % more FLOPs
    # (docs/results/plan_350m.md).
    attention = AttentionConfig(
        family="gva", num_heads=16, num_kv_heads=4, head_dim=64, rope_dim=16, q_norm=True, key_init="scale_matched"
    )
    return RunConfig(
        name="gva_350m",
        model=ModelConfig(
            vocab_size=50_304,
            num_layers=24,
            model_dim=1024,
            hidden_dim=3072,
            attention=attention,
            dtype="bfloat16",
            remat="dots",
        ),
        # Somewhat more than 30B tokens: the whole data set is 40 times that.
        data=DataConfig(
            source="hf:HuggingFaceFW/fineweb-edu:train",
            max_bytes=150_000_000_000,
            context_length=2048,
            batch_size=256,
        ),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup=0.02),
        # 256 x 2,048 tokens a step: the first step count that reaches 30B tokens. Micro-batches of 32 sequences keep
        # the logits (vocabulary 50,304, float32) within reach of one host; a larger mesh wants fewer.
        train=TrainConfig(steps=57_221, accumulation=8, eval_every=2_000, eval_batches=50, checkpoint_every=1_000),
    )
