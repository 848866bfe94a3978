"""What may be done to queries, keys, values and outputs of attention, by name, and what cannot be combined and why.

Plain Python, so that a config is judged where it is made. What the names mean is in `gva_jax.attention.values` and
`gva_jax.attention.outputs`; which combinations work is listed in docs/compositions.md.
"""

from typing import Any, Literal, get_args

ValueTransform = Literal["none", "silu", "tanh_gate", "affine_match", "matched_silu", "headwise_g2", "full_glu",
                         "reduced_glu", "state_gate"]  # fmt: skip
OutputTransform = Literal["none", "headwise_g1", "elementwise_g1", "xsa"]
Activation = Literal["none", "silu"]  # of queries, of keys

VALUE_TRANSFORMS, OUTPUT_TRANSFORMS, ACTIVATIONS = map(get_args, (ValueTransform, OutputTransform, Activation))
CHOICES = {
    "value_transform": VALUE_TRANSFORMS,
    "output_transform": OUTPUT_TRANSFORMS,
    "query_transform": ACTIVATIONS,
    "key_transform": ACTIVATIONS,
}


def reduced_width(head_dim: int) -> int:
    """Width of a value of the reduced-width GLU: with two thirds its three maps have about the two maps' parameters.

    The paper names no width; two thirds, rounded, is our reading, which gives its parameter counts (43 at d = 64).
    """
    return round(2 * head_dim / 3)


def refusal(family: str, attention: Any) -> tuple[str, str] | None:
    """The field of `attention` that cannot be as it is, and what would be right; None if all goes together.

    Args:
      family: a name of the registry; what is not known there is not judged here.
      attention: has the fields of `gva_jax.config.AttentionConfig` as attributes; only those that matter are read.
    """
    for name, choices in CHOICES.items():
        if getattr(attention, name) not in choices:
            return name, f"must be one of {', '.join(choices)}"
    if attention.key_transform != "none" and (why := _keys_stay(family, attention)):
        return "key_transform", f"{why}; leave it 'none'"
    if attention.value_transform != "none" and family == "mla":
        why = "MLA caches a latent, from which the values of the heads are made after aggregation"
        return "value_transform", f"{why}; leave it 'none'"
    if attention.value_transform == "reduced_glu" and family == "kv":
        d, r = attention.head_dim, attention.rope_dim or 0
        if (width := reduced_width(d)) < d - r:
            why = f"its values of width {width} would be keys of width {d - r}, which K=V reads out of them"
            return "value_transform", f"{why}; raise rope_dim to {-(-(d - width) // 2) * 2} or more, or take another"
    if attention.value_moments is not None and attention.value_transform not in ("affine_match", "matched_silu"):
        return "value_moments", "only value_transform 'affine_match' and 'matched_silu' have constants; leave it None"
    return None


def _keys_stay(family: str, attention: Any) -> str | None:
    """Why nothing can be done to the keys of a family."""
    if family == "kv":
        return "K=V has no keys of its own: the values are the keys"
    if family in ("mla", "gta", "keyless") or (family == "gva" and attention.rope_dim is not None):
        made = " (with full RoPE, rope_dim = None, they are made)" if family == "gva" else ""
        name = "Keyless" if family == "keyless" else family.upper()
        return f"keys of {name} are never made, they are folded into the query{made}"
    return None
