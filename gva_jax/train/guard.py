"""Steps that must not be taken: a loss or gradients that are not finite, and, if asked for, spikes.

On the device such a step leaves parameters and optimiser as they are, in the same compiled program and without another
collective: the gradient norm decides, which every device knows. The host reads of it one step later, as of all metrics,
and ends the run after too many in a row; a checkpoint that was saved meanwhile holds nothing of them.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from gva_jax.train.zclip import NormStatistics, admitted, bounded, nothing_seen

if TYPE_CHECKING:
    from gva_jax.display import Display
    from gva_jax.train.checkpoint import Checkpoints


class GuardState(NamedTuple):
    """Skipped steps, in all and in a row up to now; the norms that spikes are told by; what is guarded."""

    skipped: Int[Array, ""]
    in_a_row: Int[Array, ""]
    norms: NormStatistics | optax.EmptyState
    inner: optax.OptState


def guarded(
    inner: optax.GradientTransformation, skip_spikes: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """`inner`, but a step is skipped where the gradients' global norm, or the `loss` passed along, is not finite.

    The state of `inner` then stays, but for schedules: the learning rate remains a function of the step. The updates
    are `inner`'s in any case and must be applied by `apply_updates` below, which leaves the parameters alone.

    With `skip_spikes`, steps are skipped too whose norm is more than so many standard deviations above its running
    mean; the first 25 never are. The running statistics are ZClip's, of norms before clipping, and a skipped spike
    enters them as the norm that ZClip would have clipped it to: few leave them as they were, a lasting moderate rise
    is soon taken for usual.
    """

    def init(params):
        norms = optax.EmptyState() if skip_spikes is None else nothing_seen(params)
        return GuardState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), norms, inner.init(params))

    def update(grads, state: GuardState, params=None, *, loss=None):
        norm = optax.tree.norm(grads)
        good = finite = jnp.isfinite(norm) & (True if loss is None else jnp.isfinite(loss))
        norms = state.norms
        if skip_spikes is not None:
            usual = bounded(norms, norm, skip_spikes)
            good = finite & ~(norm > usual)
            norms = admitted(norms, jnp.where(finite, usual, jnp.nan))
        updates, after = inner.update(grads, state.inner, params)
        kept = jax.tree.map(lambda new, old: _either(good, new, old), after, state.inner, is_leaf=_is_schedule)
        bad = (~good).astype(jnp.int32)
        return updates, GuardState(state.skipped + bad, (state.in_a_row + 1) * bad, norms, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_schedule(state) -> bool:
    return isinstance(state, optax.ScaleByScheduleState)


def _either(good: jax.Array, new, old):
    return new if _is_schedule(new) else jnp.where(good, new, old)


def apply_updates(params, updates, state: GuardState):
    """Parameters after the step that led to `state`: unchanged in every bit if it was skipped.

    The choice comes after the sum, not before: a compiler may then round a step that is taken as it did without.
    """
    good = state.in_a_row == 0
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), optax.apply_updates(params, updates), params)


def counts(state: GuardState) -> dict[str, jax.Array]:
    """For a step's metrics."""
    return {"skipped": state.skipped, "skipped_in_a_row": state.in_a_row}


class SkipLimit:
    """Reads each step's metrics: tells of skipped steps, and ends the run when more than `most` come in a row."""

    def __init__(self, most: int, checkpoints: "Checkpoints", display: "Display"):
        self._most, self._checkpoints, self._display = most, checkpoints, display

    def check(self, step: int, metrics: dict) -> None:
        """Raises:
        FloatingPointError: naming the step, its learning rate, what was wrong and the last good checkpoint.
        """
        in_a_row = int(metrics["skipped_in_a_row"])
        if not in_a_row:
            return
        rate, norm = float(metrics["learning_rate"]), float(metrics["grad_norm"])
        found = {"loss": float(metrics["loss"]), "gradient norm": norm}
        wrong = [f"{name} {value}" for name, value in found.items() if not math.isfinite(value)]
        told = f"step {step:,} at learning rate {rate:.3g}: {', '.join(wrong) or f'gradient norm {norm:.4g}, a spike'}"
        if in_a_row <= self._most:
            self._display.say(f"skipped {told} ({in_a_row} in a row, {int(metrics['skipped'])} in all)")
            return
        self._checkpoints.wait()  # then the newest one is complete
        latest = self._checkpoints.latest
        last = "no checkpoint yet" if latest is None else f"last good checkpoint: step {latest:,}"
        limit = f"{in_a_row} skipped in a row, train.max_skips = {self._most}"
        raise FloatingPointError(f"{told}; {limit}; {last}")
