"""A study that takes seconds."""

from dataclasses import replace

from gva_jax.config import AttentionConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from gva_jax.display import Display
from gva_jax.study import Search, Study, Variant

QUIET = Display(quiet=True)
GVA = AttentionConfig("gva", 2, 1, 8, 4, q_norm=True, key_init="scale_matched")


def base() -> RunConfig:
    model = ModelConfig(
        vocab_size=300, num_layers=1, model_dim=16, hidden_dim=16, attention=GVA, scan_layers=False, dropout=0.1
    )
    return RunConfig(
        model=model,
        data=DataConfig(source="docstrings:json,argparse", context_length=16, batch_size=8, holdout=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        train=TrainConfig(steps=6, eval_every=2, eval_batches=1),
    )


GQA = {"model.attention.family": "gqa", "model.attention.rope_dim": None, "model.attention.key_init": "default"}


def study(**changes) -> Study:
    """GVA and GQA, two seeds, one learning rate."""
    two = Study(
        name="small",
        base=base(),
        variants={"gqa": Variant(GQA), "gva": Variant()},
        seeds=(11, 12),
        pairs=(("gqa", "gva"),),
        learning_rates=(1e-2,),
    )
    return replace(two, **changes)


def searching(*rates: float, **changes) -> Study:
    return study(learning_rates=(), search=Search(rates, seed=1, steps=4), **changes)
