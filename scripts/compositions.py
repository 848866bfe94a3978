"""Writes docs/compositions.md: which transforms go with which attention families, and why others do not.

    uv run python scripts/compositions.py

Every cell is what building that model says; nothing is allocated or run.
"""

from dataclasses import replace
from pathlib import Path

from gva_jax.attention import build
from gva_jax.compositions import CHOICES
from gva_jax.config import AttentionConfig, ConfigError, ModelConfig

TABLE = Path(__file__).parent.parent / "docs" / "compositions.md"

# One column each: every registry name, and the position modes in which a family has other keys.
FAMILIES = {
    "MHA": AttentionConfig("mha", 16),
    "GQA": AttentionConfig("gqa", 16, 4),
    "MQA": AttentionConfig("mqa", 16, 1),
    "MLA": AttentionConfig("mla", 16, latent_dim=256, rope_dim=16),
    "GVA, r = 16": AttentionConfig("gva", 16, 4, rope_dim=16, q_norm=True),
    "GVA, full RoPE": AttentionConfig("gva", 16, 4, q_norm=True),
    "Keyless": AttentionConfig("keyless", 16, 4),
    "K=V, r = 16": AttentionConfig("kv", 16, 4, rope_dim=16),
    "K=V, full RoPE": AttentionConfig("kv", 16, 4),
    "GTA": AttentionConfig("gta", 16, 4),
}

# One row each: a field and what it is set to; "all QKV" sets three.
ROWS = {
    **{f"`{field}={name}`": {field: name} for field, names in CHOICES.items() for name in names if name != "none"},
    "all QKV: SiLU on the three": dict.fromkeys(("query_transform", "key_transform", "value_transform"), "silu"),
    "Depth-Attention, `model.depth_sources=(0,)`": {"depth_sources": (0,)},
}


def reason(attention: AttentionConfig, change: dict) -> str | None:
    """Why `change` of this attention is refused, without the field and its value; None if it builds."""
    depth = change.get("depth_sources", ())
    fields = {name: value for name, value in change.items() if name != "depth_sources"}
    try:
        attention = replace(attention, **fields)
        build(attention, parent=None)
        ModelConfig(attention=attention, depth_sources=depth, scan_layers=False)
    except ConfigError as error:
        return str(error).partition(": ")[2]
    return None


def render() -> str:
    """The page."""
    notes: dict[str, int] = {}

    def cell(attention, change) -> str:
        why = reason(attention, change)
        return "yes" if why is None else f"no ({notes.setdefault(why, len(notes) + 1)})"

    line = lambda cells: f"| {' | '.join(cells)} |"
    rows = [line([name, *(cell(a, change) for a in FAMILIES.values())]) for name, change in ROWS.items()]
    return "\n".join([
        "# What goes with what",
        "",
        "Written by `uv run python scripts/compositions.py`. Query, key, value and output transforms are independent",
        "choices: a combination is refused exactly if one of its parts is, and works otherwise, through the cache too",
        "(`tests/attention/test_compositions.py`). Sizes are H = 16, G = 4, d = 64.",
        "",
        line(["", *FAMILIES]),
        "|---|" + "---|" * len(FAMILIES),
        *rows,
        "",
        "What is refused is refused when the config is built; the message names the field and its value, then says:",
        "",
        *(f"{number}. {why}" for why, number in notes.items()),
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    TABLE.write_text(render())
