"""Estimates of KL(policy || reference) from samples of the policy, per token (Schulman, "Approximating KL divergence", 2020).

With x = log(policy / reference):

| estimator | value | unbiased in value | gradient by log policy | gradient is the KL's |
| --- | --- | --- | --- | --- |
| k1 | x | yes, but signed | 1 | no: zero on average, k1 in the loss does nothing but add noise |
| k2 | x^2 / 2 | no | x | yes |
| k3 | exp(-x) - 1 + x | yes; never negative, but a rare token can make it huge | 1 - exp(-x) | no: KL(reference || policy)'s |
| k1_straight_through | x | yes | x | yes |

The KL's gradient is E[x grad log policy] (+ E[grad log policy], which is 0), so an estimator in the loss is right when its derivative by
log policy is x (arXiv 2506.09477; arXiv 2510.01555). Averages are over samples of the policy as it is: for samples of an older policy all
four are biased. And they are the KL's of one token given those before it: summed over an answer, a loss leaves out how a token changes
the divergence of later ones, which the KL in the reward counts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxprorl.algorithms.losses import log_ratio


def k1(logp_BS: jax.Array, reference_logp_BS: jax.Array) -> jax.Array:
    """log(policy / reference), clamped like every log-ratio; the same clamp serves the others, before exp and before the square."""
    return log_ratio(logp_BS, reference_logp_BS)


def k2(logp_BS: jax.Array, reference_logp_BS: jax.Array) -> jax.Array:
    """Half the squared log-ratio."""
    return 0.5 * log_ratio(logp_BS, reference_logp_BS) ** 2


def k3(logp_BS: jax.Array, reference_logp_BS: jax.Array) -> jax.Array:
    """Reference / policy - 1 - log(reference / policy)."""
    x_BS = log_ratio(logp_BS, reference_logp_BS)
    return jnp.expm1(-x_BS) + x_BS


def k1_straight_through(logp_BS: jax.Array, reference_logp_BS: jax.Array) -> jax.Array:
    """Exactly k1's value with k2's gradient: the form of k1 that belongs in a loss."""
    x_BS = log_ratio(logp_BS, reference_logp_BS)
    fixed_BS = jax.lax.stop_gradient(x_BS)
    return fixed_BS * (1.0 + (x_BS - fixed_BS))


# What the loss may use, by name.
KL_ESTIMATORS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1_gradient": k1_straight_through,
}


def in_reward_kl(reward_PN: np.ndarray, kl_sum_PN: np.ndarray, coefficient: float) -> np.ndarray:
    """Reward - coefficient x KL of the whole answer, before the group statistics (host side).

    Args:
        reward_PN: rewards.
        kl_sum_PN: sum over the answer's response tokens of k1 between the policy that sampled it and the reference.
        coefficient: beta.

    The policy gradient of this reward has that of the whole answer's KL, later tokens' share included (arXiv 2510.01555); an advantage that
    divides by a standard deviation divides the KL too.
    differs from PPO's per-token rewards (arXiv 2203.02155): group-relative advantages know one reward per answer, so it is summed at once.
    """
    return np.asarray(reward_PN, np.float64) - coefficient * np.asarray(kl_sum_PN, np.float64)
