"""GatedV at the small size in full: the paper's five pairs, one pass over 40M tokens. For an accelerator."""

from _small_studies import NONE, SILU

from gva_jax.config import load
from gva_jax.study import Search, Study, Variant


def study() -> Study:
    return Study(
        name="gatedv_small_full",
        about="SiLU on the values (GatedV) against plain multi-head attention, 2,328,192 parameters, 40M tokens.",
        base=load("gatedv_small"),
        variants={"baseline": Variant(swap=SILU), "gatedv": Variant(SILU, swap=NONE)},
        seeds=(101, 102, 103, 104, 105),
        pairs=(("baseline", "gatedv"),),
        search=Search((6e-4, 1.2e-3, 2.4e-3, 4.8e-3), seed=1),
    )
