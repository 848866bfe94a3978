"""GVA against GQA at a small size, with and without SiLU on the values; text as in gatedv_small, 1,200 updates each.

Two groups of two heads of 32. MLA has GVA's cache, 72 scalars per token and layer; GQA has 128.
"""

from _small_studies import REDUCED, SILU

from gva_jax.config import load
from gva_jax.study import Search, Study, Variant
from gva_jax.study.spec import changed

_A = "model.attention."
_GQA = {_A + "family": "gqa", _A + "num_kv_heads": 2}
_FULL_ROPE = {_A + "family": "gva", _A + "num_kv_heads": 2}
_MATCHED = {_A + "q_norm": True, _A + "key_init": "scale_matched"}


def _gva(r: int) -> dict:
    return {**_FULL_ROPE, **_MATCHED, _A + "rope_dim": r}


def study() -> Study:
    once = lambda changes, rates: Variant(changes, seeds=(201,), rates_from=rates)
    return Study(
        name="gva_small",
        about="Grouped value attention (72 scalars of cache per token and layer at r = 8) against grouped-query "
        "attention (128), each with and without SiLU on the values: 6 layers, width 128, 4 heads of 32 in 2 groups. "
        "GVA and gated GVA as the paper's baseline initialises them (gva_baseline_*: no Q-norm) at GQA's learning rate "
        "too. The other rows on the first seed: GQA and gated GVA at GVA's rate, the others at GQA's.",
        base=changed(load("gatedv_small"), REDUCED | {"train.steps": 1200}),
        variants={
            "gqa": Variant(_GQA),
            "gqa_silu": Variant(_GQA | SILU),
            "gva_r8": Variant(_gva(8)),
            "gva_r8_silu": Variant(_gva(8) | SILU),
            "gqa_other_rate": once(_GQA, "gva_r8"),
            "gva_r8_other_rate": Variant(_gva(8), rates_from="gqa"),
            "gva_r8_silu_other_rate": once(_gva(8) | SILU, "gva_r8"),
            "gva_baseline": once(_FULL_ROPE, "gqa"),
            "gva_scale_matched": once(_FULL_ROPE | _MATCHED, "gqa"),
            "gva_q_norm": once(_FULL_ROPE | {_A + "q_norm": True}, "gqa"),
            "gva_key_init": once(_FULL_ROPE | {_A + "key_init": "scale_matched"}, "gqa"),
            "gva_baseline_r8": once(_FULL_ROPE | {_A + "rope_dim": 8}, "gqa"),
            "gva_baseline_r8_silu": Variant(_FULL_ROPE | {_A + "rope_dim": 8} | SILU, rates_from="gqa"),
            "gva_r16": once(_gva(16), "gqa"),
            "gva_r24": once(_gva(24), "gqa"),
            "gva_r16_silu": once(_gva(16) | SILU, "gqa"),
            "mla": once({_A + "family": "mla", _A + "latent_dim": 64, _A + "rope_dim": 8}, "gqa"),
        },
        seeds=(201, 202, 203),
        pairs=(
            ("gqa", "gqa_silu"),
            ("gqa", "gva_r8"),
            ("gqa", "gva_r8_silu"),
            ("gva_r8", "gva_r8_silu"),
            ("gqa_silu", "gva_r8_silu"),
            ("gqa", "gva_r8_other_rate"),
            ("gqa_other_rate", "gva_r8"),
            ("gqa_other_rate", "gva_r8_silu_other_rate"),
            ("gqa", "gva_baseline"),
            ("gqa", "gva_baseline_r8"),
            ("gqa", "gva_baseline_r8_silu"),
            ("gqa_silu", "gva_baseline_r8_silu"),
            ("gva_r8_silu", "gva_baseline_r8_silu"),
            ("gva_baseline", "gva_scale_matched"),
            ("gva_baseline", "gva_q_norm"),
            ("gva_baseline", "gva_key_init"),
            ("gva_scale_matched", "gva_r8_other_rate"),
            ("gva_r8_other_rate", "gva_r8_silu"),
            ("gqa", "gva_r16"),
            ("gqa", "gva_r24"),
            ("gqa", "gva_r16_silu"),
            ("gqa", "mla"),
        ),
        search=Search((6e-4, 1.2e-3, 2.4e-3, 4.8e-3), seed=1, steps=300),
    )
