"""Text from the cache: prefill, the decode loop, sampling."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gva_jax.kernels.api import check_implementation
from gva_jax.model import Transformer, unstack

Sampling = tuple[float, int, float]  # temperature, top_k, top_p: dynamic, so that changing them compiles nothing


def generate(
    model: Transformer,
    variables,
    prompts,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    max_length: int | None = None,
    cache_dtype: str | None = None,
    implementation: str | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """Continue `prompts` (a list of ragged lists of token ids, or an array (B, T)); returns the new ids of each.

    Args:
      temperature: 0 takes the likeliest token; otherwise logits are divided by it before sampling.
      top_k, top_p: sample among the k likeliest, and among the fewest whose probabilities reach p (both: their
        intersection).
      seed: a row's text depends on the seed and its place in the list, not on the other rows.
      stop_id: a row ends before this token.
      max_length: capacity of the cache, in tokens a row; None: what the prompts and new tokens need.
      cache_dtype: of the cached values; None: the activations'. int8 and fp8 halve the cache again.
      implementation: decode kernel, see `gva_jax.kernels`.
      on_tokens: called after each step with every row's new id, None once a row has ended.

    Raises:
      ValueError: an argument out of range, an empty prompt, an id outside the vocabulary, a cache too short.
      FloatingPointError: the model gave NaN (weights that are not finite).
    """
    rows = [[int(token) for token in prompt] for prompt in prompts]
    longest = _check(rows, model.config.vocab_size, max_new_tokens, temperature, top_k, top_p, max_length)
    check_implementation(implementation)
    if implementation is not None:
        model = model.clone(implementation=implementation)
    model, variables = unstack(model, variables)

    T = max(16, 1 << (longest - 1).bit_length())  # prompts are padded to a power of two: few programs are compiled
    tokens = np.zeros((len(rows), T), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    caches = model.init_cache(len(rows), max_length or longest + max_new_tokens, cache_dtype)
    greedy = temperature == 0
    sampling = (temperature or 1.0, top_k or model.config.vocab_size, 1.0 if top_p is None else top_p)
    key = jax.random.key(seed)

    out: list[list[int]] = [[] for _ in rows]
    live = [True] * len(rows)
    ids, finite, caches = _prefill(model, variables, tokens, caches, lengths, key, sampling, greedy)
    for step in range(max_new_tokens):
        pending, ok = ids, finite
        if step + 1 < max_new_tokens:  # dispatch the next step before reading this one's tokens
            ids, finite, caches = _decode(model, variables, pending, caches, key, step + 1, sampling, greedy)
        emitted: list[int | None] = []
        for b, (token, good) in enumerate(zip(np.asarray(pending).tolist(), np.asarray(ok).tolist(), strict=True)):
            if live[b] and not good:
                raise FloatingPointError(f"row {b}: logits are not finite at new token {step}; are the weights finite?")
            live[b] = live[b] and token != stop_id
            emitted.append(token if live[b] else None)
            if live[b]:
                out[b].append(token)
        if on_tokens is not None:
            on_tokens(emitted)
        if not any(live):
            break
    return out


def _check(rows, vocab_size, max_new_tokens, temperature, top_k, top_p, max_length) -> int:
    """Refuses what cannot be generated; returns the longest prompt's length."""
    if not rows:
        raise ValueError("prompts is empty: give one or more")
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {b} is empty: give token ids (a document begins with the end-of-text id)")
        if bad := [token for token in row if not 0 <= token < vocab_size]:
            raise ValueError(f"prompt {b} holds token id {bad[0]}: must lie in 0 .. {vocab_size - 1}, the vocabulary")
    for name, value, good, right in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "must be 1 or more"),
        ("temperature", temperature, temperature >= 0, "must not be negative (0: greedy)"),
        ("top_k", top_k, top_k is None or top_k >= 1, "must be 1 or more, or None"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "must be above 0 and at most 1, or None"),
    ):
        if not good:
            raise ValueError(f"{name} = {value}: {right}")
    longest = max(len(row) for row in rows)
    if max_length is not None and max_length < longest + max_new_tokens:
        need = f"the longest prompt has {longest} tokens and {max_new_tokens} are to come"
        raise ValueError(f"max_length = {max_length}: the cache would overflow; {need}")
    return longest


@functools.partial(jax.jit, static_argnames=("model", "greedy"), donate_argnames="caches")
def _prefill(model, variables, tokens, caches, lengths, key, sampling: Sampling, greedy: bool):
    logits, caches = model.apply(variables, tokens, caches, lengths=lengths, last=True, method="prefill")
    return *_choose(logits[:, -1], key, 0, sampling, greedy), caches


@functools.partial(jax.jit, static_argnames=("model", "greedy"), donate_argnames="caches")
def _decode(model, variables, ids, caches, key, step, sampling: Sampling, greedy: bool):
    logits, caches = model.apply(variables, ids[:, None], caches, method="decode")
    return *_choose(logits[:, -1], key, step, sampling, greedy), caches


def _choose(logits, key, step, sampling: Sampling, greedy: bool):
    """Next ids (B,), and whether each row's logits were finite."""
    finite = jnp.isfinite(logits).all(axis=-1)
    if greedy:
        return logits.argmax(axis=-1).astype(jnp.int32), finite
    one = lambda row, logits: sample(logits, jax.random.fold_in(jax.random.fold_in(key, row), step), *sampling)
    return jax.vmap(one)(jnp.arange(logits.shape[0]), logits), finite


def sample(logits, key, temperature, top_k, top_p):
    """One id from logits (vocab,): the k likeliest, cut to the fewest whose probabilities reach p."""
    order = jnp.argsort(-logits)
    ranked = logits[order] / temperature
    probability = jax.nn.softmax(ranked)
    before = jnp.cumsum(probability) - probability  # what likelier tokens already hold
    kept = (jnp.arange(logits.shape[0]) < top_k) & ((before < top_p) | (top_p >= 1))  # 1: all, rounding or not
    return order[jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))].astype(jnp.int32)


def token_lists(prompts: Sequence[str], tokenizer) -> list[list[int]]:
    """Prompts as generation takes them: the end-of-text id begins every document."""
    return [[tokenizer.eot_id, *tokenizer.encode(prompt)] for prompt in prompts]
