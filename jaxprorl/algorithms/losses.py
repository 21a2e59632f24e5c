"""Policy losses: pure, unreduced functions of arrays. The caller sums, counts and divides once."""

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0  # clamp before exp; exp(20) is far beyond any clip bound and finite in float32


def log_ratio(logp_BS: jax.Array, old_logp_BS: jax.Array) -> jax.Array:
    """log(pi / pi_old) per token in float32, clamped so that exp and its gradient stay finite."""
    difference = logp_BS.astype(jnp.promote_types(logp_BS.dtype, jnp.float32)) - old_logp_BS
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_policy_loss(
    logp_BS: jax.Array, old_logp_BS: jax.Array, advantage_BS: jax.Array, clip_low: float, clip_high: float
) -> jax.Array:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = pi / pi_old.

    Decoupled bounds ("clip-higher") from DAPO, arXiv 2503.14476, section 3.1; ProRL section 2.3 uses 0.2 and 0.4.
    """
    ratio_BS = jnp.exp(log_ratio(logp_BS, old_logp_BS))
    clipped_BS = jnp.clip(ratio_BS, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio_BS * advantage_BS, clipped_BS * advantage_BS)


def clipped_low(ratio_BS: jax.Array, advantage_BS: jax.Array, clip_low: float) -> jax.Array:
    """True where the lower bound removes the gradient: the ratio is below it and the advantage negative."""
    return (ratio_BS < 1.0 - clip_low) & (advantage_BS < 0)


def clipped_high(ratio_BS: jax.Array, advantage_BS: jax.Array, clip_high: float) -> jax.Array:
    """True where the upper bound removes the gradient: the ratio is above it and the advantage positive."""
    return (ratio_BS > 1.0 + clip_high) & (advantage_BS > 0)
