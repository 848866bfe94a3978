"""GatedV at the medium size as in the paper: one shared seed for every gate at three learning rates, then three pairs
of GatedV at two of them. 327,680 updates each. For an accelerator.
"""

from _small_studies import NONE, SILU

from gva_jax.config import load
from gva_jax.study import Search, Study, Variant


def study() -> Study:
    gate = lambda name: Variant({"model.attention.value_transform": name}, seeds=())  # compared in the search only
    return Study(
        name="gatedv_medium",
        about="SiLU on the values (GatedV) and other gates against plain multi-head attention, 26,158,464 parameters.",
        base=load("gatedv_medium"),
        variants={
            "baseline": Variant(swap=SILU),
            "gatedv": Variant(SILU, swap=NONE),
            "headwise_g2": gate("headwise_g2"),
            "full_glu": gate("full_glu"),
            "reduced_glu": gate("reduced_glu"),
            "tanh_gate": gate("tanh_gate"),
        },
        seeds=(20270211, 20270212, 20270213),
        pairs=(("baseline", "gatedv"),),
        learning_rates=(3e-4, 6e-4),
        search=Search((1e-4, 3e-4, 6e-4), seed=20270201),
    )
