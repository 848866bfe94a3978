"""What the README says: two set-up commands, code that runs, sizes that are so, names that exist."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest
import readme

from gva_jax import (
    GroupedTiedAttention,
    GroupedValueAttention,
    KeyIsValueAttention,
    LatentAttention,
    MultiHeadAttention,
    config,
)
from gva_jax.cli import COMMANDS
from gva_jax.compositions import CHOICES
from gva_jax.options import TrainOptions, option_names


def test_two_commands_set_up_a_fresh_machine():
    assert readme.blocks()[0].splitlines() == [
        "pip install uv && uv run gva train configs/quickstart.py",
        "uv run pytest",
    ]


def test_the_module_example(capsys):
    exec(readme.block_with("print(attn.cache_size()"), {})
    # Two rows of 128 slots in float32.
    assert capsys.readouterr().out == f"272 scalars per token; {2 * 128 * 272 * 4} bytes allocated\n"


@pytest.mark.parametrize(
    ("row", "module"),
    [
        ("MHA", MultiHeadAttention(num_heads=16)),
        ("GQA", MultiHeadAttention(num_heads=16, num_kv_heads=4)),
        ("MQA", MultiHeadAttention(num_heads=16, num_kv_heads=1)),
        ("c = 256, r = 16", LatentAttention(num_heads=16, latent_dim=256, rope_dim=16)),
        ("G d + r | r = 16", GroupedValueAttention(num_heads=16, num_kv_heads=4, rope_dim=16)),
        ("r = 24", GroupedValueAttention(num_heads=16, num_kv_heads=4, rope_dim=24)),
        ("`rope_dim=0`, `None`", GroupedValueAttention(num_heads=16, num_kv_heads=4, rope_dim=0)),
        ("`rope_dim=0`, `None`", GroupedValueAttention(num_heads=16, num_kv_heads=4, rope_dim=None)),
        ("K=V, r = 16", KeyIsValueAttention(num_heads=16, num_kv_heads=4, rope_dim=16)),
        ("tied, r = d/2", GroupedTiedAttention(num_heads=16, num_kv_heads=4)),
    ],
)
def test_the_table_of_cache_sizes(row, module):
    (line,) = [line for line in readme.TEXT.splitlines() if line.startswith("|") and f" {row} |" in line]
    cache = module.init_cache(batch=1, max_length=128, dtype=jnp.bfloat16)
    assert line.split("|")[-2].strip() == f"{cache.nbytes // cache.capacity:,}"
    assert cache.nbytes // cache.capacity == 2 * module.cache_size()


def test_the_table_of_transforms_names_all_of_them():
    named = readme.TEXT.partition("### Transforms")[2].partition("## ")[0]
    for field, names in CHOICES.items():
        assert f"`{field}`" in named
        assert all(f"| `{name}` |" in named for name in names if name != "none")


def test_commands_options_configs_and_files_that_are_named_exist():
    commands = re.findall(r"\bgva ([a-z]+)", "\n".join(readme.blocks()))
    assert set(commands) == set(COMMANDS)
    options = re.findall(r"--((?:model|data|optimizer|mesh|train)\.[\w.]+)", readme.TEXT)
    assert options and set(options) <= set(option_names(TrainOptions))
    for name in config.shipped():
        assert f"`{name}`" in readme.TEXT
    root = Path(readme.__file__).parents[1]
    for path in re.findall(r"`(gva_jax/[\w/.]+)`", readme.TEXT):
        assert (root / path).exists()
