"""Estimates of KL(policy || reference) from samples of the policy, per token (Schulman, "Approximating KL divergence", 2020).

With x = log(reference / policy): k1 = -x is unbiased but signed; k2 = x^2 / 2 is biased in value, its gradient is the
KL's; k3 = exp(x) - 1 - x is unbiased in value and never negative, but one improbable token can make it huge.
"""

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0  # clamp before exp: clamping the result instead leaves inf * 0 = nan in the gradient


def _log_ratio(logp_BS: jax.Array, reference_logp_BS: jax.Array) -> jax.Array:
    difference = reference_logp_BS - logp_BS.astype(jnp.promote_types(logp_BS.dtype, jnp.float32))
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logp_BS: jax.Array, reference_logp_BS: jax.Array) -> jax.Array:
    """log(policy / reference)."""
    return -_log_ratio(logp_BS, reference_logp_BS)


def k2(logp_BS: jax.Array, reference_logp_BS: jax.Array) -> jax.Array:
    """Half the squared log-ratio."""
    return 0.5 * _log_ratio(logp_BS, reference_logp_BS) ** 2


def k3(logp_BS: jax.Array, reference_logp_BS: jax.Array) -> jax.Array:
    """Reference / policy - 1 - log(reference / policy)."""
    x_BS = _log_ratio(logp_BS, reference_logp_BS)
    return jnp.expm1(x_BS) - x_BS
