"""GatedV at the small size, reduced: what two CPU cores do in some hours, on 6.8M tokens of general prose.

The text, in the folder where the study is run:

    python scripts/prose.py prose.jsonl
    gva prepare jsonl:prose.jsonl --vocab-size 8192 --holdout 0.03 --out prose

Anything else that `--data` names will do, with another result.
"""

from _small_studies import NONE, REDUCED, SILU

from gva_jax.config import load
from gva_jax.study import Search, Study, Variant
from gva_jax.study.spec import changed


def study() -> Study:
    once = {"seeds": (101,), "rates_from": "baseline"}
    values = lambda name: Variant({"model.attention.value_transform": name}, **once)
    on = lambda *parts: Variant({f"model.attention.{part}_transform": "silu" for part in parts}, **once)
    return Study(
        name="gatedv_small",
        about="SiLU on the values (GatedV) against plain multi-head attention: 6 layers, width 128, 4 heads of 32, "
        "2,328,192 parameters. The baseline at GatedV's learning rate too; on the first seed GatedV at the baseline's, "
        "and ablations there.",
        base=changed(load("gatedv_small"), REDUCED),
        variants={
            "baseline": Variant(swap=SILU),
            "gatedv": Variant(SILU, swap=NONE),
            "baseline_other_rate": Variant(rates_from="gatedv"),
            "gatedv_other_rate": Variant(SILU, **once),
            "q_only": on("query"),
            "all_qkv": on("query", "key", "value"),
            "affine_match": values("affine_match"),
            "matched_silu": values("matched_silu"),
        },
        seeds=(101, 102, 103),
        pairs=(
            ("baseline", "gatedv"),
            ("baseline", "gatedv_other_rate"),
            ("baseline_other_rate", "gatedv"),
            ("baseline", "q_only"),
            ("baseline", "all_qkv"),
            ("baseline", "affine_match"),
            ("baseline", "matched_silu"),
            ("gatedv_other_rate", "affine_match"),
            ("gatedv_other_rate", "matched_silu"),
        ),
        search=Search((6e-4, 1.2e-3, 2.4e-3, 4.8e-3), seed=1, steps=400),
    )
