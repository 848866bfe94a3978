"""Generation: what is written is what full forwards would write, whatever the batch; sampling has the right odds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from tiny import ATTENTION, VOCAB, make, weights

from gva_jax import decoding
from gva_jax.decoding import generate, sample

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [2, 7, 1, 8, 2, 8, 1]]  # 1, 20 and 7


@functools.cache
def setup(family, dtype="float64", **kw):
    model = make(family, dtype=dtype, param_dtype=dtype, **kw)
    return model, weights(model, gain=1.5)


@functools.cache
def forwards(family):
    """The greedy continuation of each prompt by ten tokens, by full forwards, one prompt and one token at a time."""
    model, variables = setup(family)
    forward = jax.jit(model.apply)  # always 32 tokens: what comes after a position does not matter to it
    out = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(10):
            logits = forward(variables, jnp.array([row + [0] * (32 - len(row))], jnp.int32))
            row.append(int(logits[0, len(row) - 1].argmax()))
        out.append(row[len(prompt) :])
    return out


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# ---- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned(ATTENTION, 3))
def test_greedy_generation_is_the_argmax_of_full_forwards(family, x64):
    truth = forwards(family)
    assert len({tuple(row) for row in truth}) == 3
    found = generate(*setup(family), PROMPTS, max_new_tokens=10)
    assert found == truth
    assert all(type(token) is int for row in found for token in row)


def test_a_row_does_not_depend_on_its_company_or_the_kernel(x64):
    truth = forwards("gva")
    assert generate(*setup("gva"), PROMPTS, max_new_tokens=10, implementation="reference") == truth
    assert generate(*setup("gva"), [PROMPTS[2], PROMPTS[0]], max_new_tokens=10, max_length=128) == [truth[2], truth[0]]


def test_prompts_may_be_arrays(x64):
    prompts = np.array([PROMPTS[2], PROMPTS[2][::-1]])
    lists = generate(*setup("gva"), prompts.tolist(), max_new_tokens=3)
    assert generate(*setup("gva"), prompts, max_new_tokens=3) == lists
    assert generate(*setup("gva"), jnp.asarray(prompts), max_new_tokens=3) == lists
    assert generate(*setup("gva"), list(prompts), max_new_tokens=1) == [row[:1] for row in lists]


@pytest.mark.parametrize(("dtype", "wide"), thinned([("float32", True), ("bfloat16", False)], 2))
def test_lower_precisions_generate_where_x64_is_on_or_off(dtype, wide):
    with jax.enable_x64(wide):
        out = generate(*setup("gva", dtype, num_layers=1), PROMPTS[::2], max_new_tokens=4, temperature=0.8, top_p=0.9)
    assert [len(row) for row in out] == [4, 4]
    assert all(0 <= token < VOCAB for row in out for token in row)


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_sampling_is_reproducible_and_compiles_once(x64):
    model, variables = setup("gva")
    run = functools.partial(generate, model, variables, max_new_tokens=8)
    first = run(PROMPTS[:2], temperature=1.0, seed=1)
    programs = decoding._prefill._cache_size(), decoding._decode._cache_size()
    assert run(PROMPTS[:2], temperature=1.0, seed=1) == first
    other = run(PROMPTS[:2], temperature=1.0, seed=2)
    assert other[0] != first[0] and other[1] != first[1]
    assert run([PROMPTS[1]] * 2, temperature=1.0, seed=1)[1] == first[1]  # whatever the first row is
    twice = run([PROMPTS[1]] * 2, temperature=1.0, seed=1)
    assert twice[0] != twice[1]  # rows draw their own numbers
    assert run(PROMPTS[:2], temperature=0.7, top_k=1, seed=3) == run(PROMPTS[:2], temperature=1.3, top_p=1e-9, seed=4)
    assert (decoding._prefill._cache_size(), decoding._decode._cache_size()) == programs
    assert run(PROMPTS[:2], temperature=0.7, top_k=1) == [row[:8] for row in forwards("gva")[:2]]


LOGITS = jnp.array([0.3, 2.0, -1.0, 1.5, 0.0, -3.0])


def odds(temperature=1.0, top_k=6, top_p=1.0):
    """Exact probabilities, written plainly."""
    p = np.exp(np.asarray(LOGITS, np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    fewest = next(i for i in range(1, 7) if i == 6 or p[order[:i]].sum() >= top_p)
    p[order[min(top_k, fewest) :]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 2},
        {"top_k": 100},
        {"top_p": 0.8},
        {"top_k": 4, "top_p": 0.6},
        {"top_k": 2, "top_p": 0.95, "temperature": 2.0},
    ],
    ids=str,
)
def test_sampling_has_the_exact_odds(options):
    N = 20_000
    given = {"temperature": 1.0, "top_k": 6, "top_p": 1.0} | options
    counts = np.bincount(draws(N)(*given.values()), minlength=6)
    p = odds(**given)
    assert (counts[p == 0] == 0).all()
    expected = N * p[p > 0]
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1  # the mean of chi-square; its variance is twice that
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@functools.cache
def draws(N):
    keys = jax.random.split(jax.random.key(0), N)
    return jax.jit(lambda *sampling: jax.vmap(lambda key: sample(LOGITS, key, *sampling))(keys))


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(6, 1.0, 6), (1, 1.0, 1), (6, 0.49, 1), (6, 0.51, 2), (6, 0.74, 2), (6, 0.76, 3), (2, 0.9, 2), (6, 1e-9, 1)],
)
def test_how_many_tokens_are_kept(top_k, top_p, kept, monkeypatch):
    """p = 1/2, 1/4, ..., and a last token so unlikely that the others sum to 1 in float32."""
    monkeypatch.setattr(jax.random, "categorical", lambda key, logits: jnp.isfinite(logits).sum() - 1)
    logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.0625, 0.0625, 1e-12]))
    assert int(sample(logits, jax.random.key(0), 1.0, top_k, top_p)) == kept - 1


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_row_ends_before_the_stop_id_and_is_reported_as_it_goes(x64):
    truth = forwards("gva")
    stop = truth[1][3]
    cut = [row[: row.index(stop)] if stop in row else row for row in truth]
    seen = []
    found = generate(*setup("gva"), PROMPTS, max_new_tokens=10, stop_id=stop, on_tokens=seen.append)
    assert found == cut and len(cut[1]) <= 3
    steps = max(len(row) for row in cut) + all(len(row) < 10 for row in cut)  # the step in which the last row ends
    assert len(seen) == steps
    for b, row in enumerate(cut):
        assert [tokens[b] for tokens in seen] == row + [None] * (steps - len(row))


def test_generation_stops_when_every_row_has_ended(x64):
    first = forwards("gva")[2][0]
    seen = []
    twice = [PROMPTS[2]] * 2
    assert generate(*setup("gva"), twice, max_new_tokens=10, stop_id=first, on_tokens=seen.append) == [[], []]
    assert seen == [[None, None]]


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1], [2, VOCAB]], {}, f"prompt 1 holds token id {VOCAB}: must lie in 0 .. {VOCAB - 1}"),
        ([[-1]], {}, "prompt 0 holds token id -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens = 0: must be 1 or more"),
        ([[1]], {"temperature": -0.1}, "temperature = -0.1: must not be negative"),
        ([[1]], {"temperature": float("nan")}, "temperature = nan"),
        ([[1]], {"top_k": 0}, "top_k = 0: must be 1 or more"),
        ([[1]], {"top_p": 0.0}, "top_p = 0.0: must be above 0 and at most 1"),
        ([[1]], {"top_p": 1.5}, "top_p = 1.5: must be above 0 and at most 1"),
        ([[1] * 5], {"max_new_tokens": 4, "max_length": 8}, "max_length = 8: the cache would overflow"),
        ([[1]], {"implementation": "cuda"}, "implementation = 'cuda': must be one of"),
    ],
)
def test_mistakes_are_refused(prompts, options, message):
    with pytest.raises(ValueError) as error:
        generate(make(), {"params": {}}, prompts, **options)
    assert str(error.value).startswith(message)


def test_weights_that_are_not_finite_are_reported(x64):
    model, variables = setup("gva")
    broken = jax.tree.map(lambda a: a.at[0].set(jnp.nan), variables)
    with pytest.raises(FloatingPointError, match="row 0: logits are not finite at new token 0"):
        generate(model, broken, PROMPTS, max_new_tokens=2)
