"""The Optax chain of the policy update."""

from typing import Any

import optax
from ml_collections import ConfigDict


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW. Its counts live in the Optax state, so the schedule starts again when the state is reset."""
    c = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.adamw(learning_rate_schedule(config), b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=decayed(config)),
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


def update_count(opt_state: optax.OptState) -> object:
    """Updates since the optimizer was last reset, the int32 scalar that the schedule counts."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]
