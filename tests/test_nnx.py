"""NNX users: the README's example runs, and a wrapped module computes what the Linen module does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from readme import block_with

from gva_jax import GroupedValueAttention, LatentAttention, MultiHeadAttention


@pytest.mark.long
def test_the_readmes_example():
    names = {}
    exec(block_with("ToNNX"), names)
    assert names["y"].shape == (2, 1, 32)
    assert names["cache"].lengths.tolist() == [11, 8]
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(names["gradients"]))


@pytest.mark.parametrize(
    "attn",
    [
        GroupedValueAttention(num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=8),
        LatentAttention(num_heads=4, head_dim=16, latent_dim=24, rope_dim=8),
        MultiHeadAttention(num_heads=4, num_kv_heads=2, head_dim=16),
    ],
    ids=lambda attn: type(attn).__name__,
)
def test_a_wrapped_module_is_the_linen_module(attn):
    x = jax.random.normal(jax.random.key(0), (2, 9, 32))
    module = nnx.bridge.ToNNX(attn, rngs=nnx.Rngs(0)).lazy_init(x)
    variables = {"params": nnx.to_pure_dict(nnx.state(module, nnx.Param))}
    np.testing.assert_array_equal(module(x), attn.apply(variables, x))

    cache = attn.init_cache(batch=2, max_length=128, dtype=jnp.float32)
    lengths = jnp.array([9, 5])
    mine = module(x, cache, lengths=lengths, method="prefill")
    theirs = attn.apply(variables, x, cache, lengths=lengths, method="prefill")
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
