"""The Optax chain of the policy update."""

import optax
from ml_collections import ConfigDict


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW with a constant learning rate after a linear warm-up counted in updates.

    The warm-up's count lives in the Optax state, so it starts again when the state is reset.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            b1=config.optimizer.b1,
            b2=config.optimizer.b2,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        ),
    )


def learning_rate_schedule(config: ConfigDict) -> optax.Schedule:
    """Learning rate by update; the first update already moves (1 / warmup of the full rate)."""
    peak, warmup = config.optimizer.learning_rate, max(1, config.optimizer.warmup_updates)
    return optax.linear_schedule(peak / warmup, peak, warmup - 1) if warmup > 1 else optax.constant_schedule(peak)


def update_count(opt_state: optax.OptState) -> object:
    """Updates since the optimizer was last reset, the int32 scalar that the schedule counts."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]
