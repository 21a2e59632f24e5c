"""The Optax chain of the policy update."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jaxprorl.resets.warmup import WarmupState, warmup_after_resets, warmup_factor


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW, then the warm-up after resets if there is one. All counts live in the Optax state."""
    c, warmup_updates = config.optimizer, config.resets.warmup_updates
    return optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.adamw(learning_rate_schedule(config), b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=decayed(config)),
        *([warmup_after_resets(warmup_updates)] if warmup_updates else []),
    )


def decayed(config: ConfigDict) -> Any:
    """Which parameters weight decay applies to: params -> {name: bool}. Norm scales and biases only with `decay_vectors`."""
    return lambda params: {name: bool(config.optimizer.decay_vectors) or not name.endswith(("_norm", "_bias")) for name in params}


def learning_rate_schedule(config: ConfigDict) -> optax.Schedule:
    """Learning rate by update: a linear warm-up (the first update already moves, by 1 / warmup), then constant or a cosine.

    The cosine reaches `final_share` of the full rate at update `cosine_updates` (the warm-up counted in) and stays there.
    """
    c = config.optimizer
    peak, warmup = c.learning_rate, max(1, c.warmup_updates)
    after = optax.constant_schedule(peak)
    if c.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, c.cosine_updates - (warmup - 1), c.final_share)
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup - 1), after], [warmup - 1]) if warmup > 1 else after


def learning_rate(opt_state: optax.OptState, config: ConfigDict) -> jax.Array:
    """The rate of the next update, float32: the schedule's, times the factor of the warm-up after resets."""
    rate, warmup_updates = learning_rate_schedule(config)(update_count(opt_state)), config.resets.warmup_updates
    if warmup_updates:
        rate = rate * warmup_factor(_only(opt_state, WarmupState).updates_since_reset, warmup_updates)
    return jnp.asarray(rate, jnp.float32)


def update_count(opt_state: optax.OptState) -> jax.Array:
    """Updates since the schedule last started, the int32 scalar that it counts; AdamW's bias correction has a count of its own."""
    count: jax.Array = _only(opt_state, optax.ScaleByScheduleState).count
    return count


def _only(opt_state: optax.OptState, kind: type) -> Any:
    """The one state of this type inside."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    (node,) = [node for node in nodes if isinstance(node, kind)]
    return node
