"""A warm-up after every reset, counted in the Optax state: what a reset leaves of the optimizer does not matter to it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class WarmupState(NamedTuple):
    """An int32 scalar, at most the warm-up's length; that much also before the first reset."""

    updates_since_reset: jax.Array


def warmup_after_resets(warmup_updates: int) -> optax.GradientTransformation:
    """Multiplies an update by `warmup_factor`; the identity until a reset sets its count to 0. Put it behind the learning rate."""

    def init(params: optax.Params) -> WarmupState:
        del params
        return WarmupState(jnp.asarray(warmup_updates, jnp.int32))

    def update(updates: optax.Updates, state: WarmupState, params: optax.Params | None = None) -> tuple[optax.Updates, WarmupState]:
        del params
        factor = warmup_factor(state.updates_since_reset, warmup_updates)
        updates = jax.tree.map(lambda x: x * factor.astype(x.dtype), updates)
        return updates, WarmupState(jnp.minimum(state.updates_since_reset + 1, warmup_updates))

    return optax.GradientTransformation(init, update)


def warmup_factor(updates_since_reset: jax.Array, warmup_updates: int) -> jax.Array:
    """min(1, (updates_since_reset + 1) / warmup_updates), float32: the first update after a reset already moves."""
    return jnp.minimum(updates_since_reset + 1, warmup_updates) / jnp.float32(warmup_updates)
