"""Correction for an engine that sampled from slightly other probabilities than the trainer computes: a weight on the policy loss.

delta = log(old policy of the trainer / engine) per token, r = exp(delta). Weights are constants for the gradient, and exactly 1 where both
agree exactly. A sequence with a log-prob of the engine that is not finite has no delta: `is_sound` finds it on the host, and like a sample
with a grader error it leaves its group before advantages, batch and sums are formed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxprorl.algorithms.losses import log_ratio
from jaxprorl.algorithms.sequences import masked, sequence_mean


def is_sound(engine_logp_T: np.ndarray) -> bool:
    """True where every log-prob that the engine gave for an answer's tokens is finite (host side)."""
    return bool(np.isfinite(engine_logp_T).all())


def truncated_importance(delta_BS: jax.Array, high: float) -> jax.Array:
    """min(r, high) per token (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025)."""
    return jnp.minimum(jnp.exp(delta_BS), high)


def icepop(delta_BS: jax.Array, low: float, high: float) -> jax.Array:
    """IcePop: r itself where low <= r <= high, else 0, which takes the token out (arXiv 2510.18855).

    NeMo-RL's ProRL v2 recipe has 0.5 and 5.
    """
    ratio_BS = jnp.exp(delta_BS)
    return jnp.where((ratio_BS >= low) & (ratio_BS <= high), ratio_BS, 0.0)


def geometric_mask(delta_BS: jax.Array, low: float, high: float, segment_ids_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """The token's r where the geometric mean of its sequence's r is within [low, high], else 0, which takes the sequence out.

    NeMo-RL's "seq-mask-tis"; its ProRL v2.1 recipe has 0.999 and 1.002. The r of a sequence that stays is not truncated.
    """
    mean_BS = jnp.exp(sequence_mean(delta_BS, segment_ids_BS, mask_BS))
    return jnp.where((mean_BS >= low) & (mean_BS <= high), jnp.exp(delta_BS), 0.0)


# By name; each takes delta_BS, low, high, segment_ids_BS and mask_BS.
CORRECTIONS: dict[str, Callable[[jax.Array, float, float, jax.Array, jax.Array], jax.Array]] = {
    "off": lambda delta_BS, low, high, segment_ids_BS, mask_BS: jnp.ones_like(delta_BS),
    "truncated": lambda delta_BS, low, high, segment_ids_BS, mask_BS: truncated_importance(delta_BS, high),
    "icepop": lambda delta_BS, low, high, segment_ids_BS, mask_BS: icepop(delta_BS, low, high),
    "geometric_mask": geometric_mask,
}


def correction_weight(
    kind: str, old_logp_BS: jax.Array, engine_logp_BS: jax.Array, low: float, high: float, segment_ids_BS: jax.Array, mask_BS: jax.Array
) -> jax.Array:
    """What to multiply the policy loss with, [B, S] float32; a constant for the gradient, 0 where the mask is.

    Args:
        kind: a key of `CORRECTIONS`.
        old_logp_BS: the trainer's log-probs under the weights that sampled.
        engine_logp_BS: the engine's, at the same temperature.
        low: lower bound of the band; "off" and "truncated" do not read it.
        high: upper bound of the band or cap; "off" does not read it.
        segment_ids_BS: sequences of packed rows; 0 = padding.
        mask_BS: 1 on response tokens.
    """
    delta_BS = log_ratio(masked(old_logp_BS, mask_BS), masked(engine_logp_BS, mask_BS))
    return jax.lax.stop_gradient(masked(CORRECTIONS[kind](delta_BS, low, high, segment_ids_BS, mask_BS), mask_BS))


def mismatch(old_logp_BS: jax.Array, engine_logp_BS: jax.Array, mask_BS: jax.Array) -> dict[str, jax.Array]:
    """Per-token measures of the gap between trainer and engine, [B, S] float32, 0 where the mask is.

    Returns:
        `gap`: |delta| in nats, not clamped. `k3`: r - 1 - delta, whose mean estimates KL(engine || trainer). `weight` and `weight_squared`:
        r and r^2, whose sums `effective_sample_share` takes.
    """
    old_logp_BS, engine_logp_BS = masked(old_logp_BS, mask_BS), masked(engine_logp_BS, mask_BS)
    delta_BS = log_ratio(old_logp_BS, engine_logp_BS)
    ratio_BS = masked(jnp.exp(delta_BS), mask_BS)
    return {
        "gap": jnp.abs(old_logp_BS.astype(delta_BS.dtype) - engine_logp_BS),
        "k3": jnp.expm1(delta_BS) - delta_BS,
        "weight": ratio_BS,
        "weight_squared": ratio_BS**2,
    }


def effective_sample_share(weight_sum: float, weight_squared_sum: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2) in (0, 1]: the share of n tokens that importance weights leave in effect; 0 without tokens (host side)."""
    return weight_sum**2 / (count * weight_squared_sum) if count and weight_squared_sum else 0.0
