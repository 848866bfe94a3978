"""The 350M family on 30B tokens, three seeds, as in arXiv 2609.13285 (its table 2).

One member at a time over all devices of a host; several hosts share the members (docs/studies.md).
"""

from gva_jax.config import load
from gva_jax.study import Study, Variant


def study() -> Study:
    rows = ("gqa_350m", "mla_350m", "gva_350m_baseline", "gva_350m_scale_matched", "gva_350m", "gva_350m_r24")
    return Study(
        name="gva_350m",
        about="Grouped value attention against GQA and MLA: 350M parameters, context 2,048, 30B tokens.",
        base=load("gqa_350m"),
        variants={name: Variant(load(name)) for name in rows},
        seeds=(1, 2, 3),
        pairs=tuple(("gqa_350m", name) for name in rows[1:]),
        learning_rates=(6e-4,),
        together=1,
    )
