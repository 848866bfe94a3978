"""AdamW with linear warm-up and cosine decay, from Optax, behind clipping and a guard against bad steps."""

import jax
import optax

from gva_jax.config import OptimizerConfig
from gva_jax.train.guard import guarded
from gva_jax.train.zclip import zclip


def learning_rate(config: OptimizerConfig, steps: int, peak=None) -> optax.Schedule:
    """Warm up over the first `config.warmup` share of `steps`, then decay to `config.final_ratio` of the peak.

    `peak` (it may be traced) replaces `config.learning_rate`.
    """
    peak, warmup = config.learning_rate if peak is None else peak, round(config.warmup * steps)
    decay = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=config.final_ratio)
    if not warmup:
        return decay
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)  # the first step already moves
    return optax.join_schedules([rise, decay], [warmup])


def decayed(params):
    """Which parameters weight decay shrinks: matrices; norms' scales, biases and the embedding are left out."""
    kept_out = ("scale", "bias", "embedding")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in kept_out, params)


def make(config: OptimizerConfig, steps: int, peak=None) -> optax.GradientTransformationExtraArgs:
    """The optimiser of a run of `steps` steps; `peak` as in `learning_rate`.

    Its `update` takes the step's `loss` too; see `guard.guarded`.
    """
    adamw = optax.adamw(
        learning_rate(config, steps, peak),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    return guarded(optax.chain(_clipping(config), adamw), config.skip_spikes)


def _clipping(config: OptimizerConfig) -> optax.GradientTransformation:
    if config.clip == "zclip":
        return zclip(config.clip_z, config.clip_norm)
    return optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
