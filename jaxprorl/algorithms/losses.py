"""Policy losses: pure, unreduced functions of arrays. The caller sums, counts and divides once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxprorl.algorithms.sequences import sequence_mean

MAX_LOG_RATIO = 20.0  # clamp before exp; exp(20) is far beyond any clip bound and finite in float32


def log_ratio(logp_BS: jax.Array, old_logp_BS: jax.Array) -> jax.Array:
    """log(pi / pi_old) per token in float32, clamped so that exp and its gradient stay finite."""
    difference = logp_BS.astype(jnp.promote_types(logp_BS.dtype, jnp.float32)) - old_logp_BS
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_ratio_BS: jax.Array, segment_ids_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """GSPO: mean of the log-ratio over the sequence's response tokens, at each of its tokens (arXiv 2507.18071, section 4.1).

    Its exp is the geometric mean of the token ratios, whatever the length, and exactly 1 where all of them are.
    """
    return sequence_mean(log_ratio_BS, segment_ids_BS, mask_BS)


def clipped_loss(log_ratio_BS: jax.Array, advantage_BS: jax.Array, clip_low: float, clip_high: float) -> jax.Array:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = exp(log-ratio) of tokens or, for GSPO, of sequences.

    Decoupled bounds ("clip-higher") from DAPO, arXiv 2503.14476, section 3.1; ProRL section 2.3 uses 0.2 and 0.4.
    """
    ratio_BS = jnp.exp(log_ratio_BS)
    clipped_BS = jnp.clip(ratio_BS, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio_BS * advantage_BS, clipped_BS * advantage_BS)


def reinforce_loss(logp_BS: jax.Array, advantage_BS: jax.Array) -> jax.Array:
    """REINFORCE: value -A, gradient -A grad log pi; the ratio is forced to 1, whatever the old policy was (Williams, 1992)."""
    return -jnp.exp(log_ratio(logp_BS, jax.lax.stop_gradient(logp_BS))) * advantage_BS


def clipped_low(ratio_BS: jax.Array, advantage_BS: jax.Array, clip_low: float) -> jax.Array:
    """True where the lower bound removes the gradient: the ratio is below it and the advantage negative."""
    return (ratio_BS < 1.0 - clip_low) & (advantage_BS < 0)


def clipped_high(ratio_BS: jax.Array, advantage_BS: jax.Array, clip_high: float) -> jax.Array:
    """True where the upper bound removes the gradient: the ratio is above it and the advantage positive."""
    return (ratio_BS > 1.0 + clip_high) & (advantage_BS > 0)


# How per-token losses become one number: (weight of each token of a sequence, what the sequence adds to the denominator), from the
# numbers of response tokens of sequences that have any, and the limit on them.
AGGREGATIONS: dict[str, Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]] = {
    "token_mean": lambda tokens, _: (np.ones_like(tokens), tokens),
    "sequence_mean": lambda tokens, _: (1 / tokens, np.ones_like(tokens)),
    "dr_grpo": lambda tokens, max_response_tokens: (np.ones_like(tokens), np.full_like(tokens, max_response_tokens)),
}


def aggregation_weights(kind: str, response_tokens: np.ndarray, max_response_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """How the tokens of an update's sequences count: the loss is sum(weight x per-token loss) / sum(count), divided once (host side).

    Args:
        kind: a key of `AGGREGATIONS`. "token_mean": every token weighs the same (DAPO, arXiv 2503.14476, section 3.3). "sequence_mean":
            every sequence does (GRPO, arXiv 2402.03300, section 4.1). "dr_grpo": tokens weigh the same and the divisor is a constant,
            sequences x limit (Dr. GRPO, arXiv 2503.20783, section 3).
        response_tokens: integer lengths of the sequences, of any shape.
        max_response_tokens: the limit on them; only "dr_grpo" reads it.

    Returns:
        Per sequence, the `weight` (float32) of each of its tokens, and its `count` (float64). Both depend on the sequence alone, so the
        sums are the same for any split into micro-batches, rows, devices or hosts. A sequence without response tokens has 0 and 0.
    """
    tokens = np.asarray(response_tokens, np.float64)
    weight, count = AGGREGATIONS[kind](np.maximum(tokens, 1), max_response_tokens)
    return np.where(tokens > 0, weight, 0).astype(np.float32), np.where(tokens > 0, count, 0)
