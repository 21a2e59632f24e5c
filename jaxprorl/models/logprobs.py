"""Log-probabilities and entropy of target tokens without keeping vocabulary-sized logits for a whole batch."""

import jax
import jax.numpy as jnp

CHUNK_TOKENS = 512  # logits of this many tokens per row exist at a time; the backward pass recomputes them


def token_log_probs(
    hidden_BSD: jax.Array, head_VD: jax.Array, targets_BS: jax.Array, temperature: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of each prediction, at the sampling temperature.

    Args:
        hidden_BSD: final hidden states; position s predicts `targets_BS[:, s]`.
        head_VD: output matrix.
        targets_BS: int32 token ids.
        temperature: > 0; logits are divided by it, as they are when sampling.

    Returns:
        logp_BS and entropy_BS in nats, float32 (float64 for float64 inputs).
    """
    size = hidden_BSD.shape[1]
    if size <= CHUNK_TOKENS:
        return _chunk(hidden_BSD, head_VD, targets_BS, temperature)
    padding = -size % CHUNK_TOKENS
    chunks = (size + padding) // CHUNK_TOKENS

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(x.shape[0], chunks, CHUNK_TOKENS, *x.shape[2:]), 1, 0)

    compute = jax.checkpoint(lambda hidden, targets: _chunk(hidden, head_VD, targets, temperature))
    logp, entropy = jax.lax.map(lambda pair: compute(*pair), (split(hidden_BSD), split(targets_BS)))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :size]  # noqa: E731
    return join(logp), join(entropy)


def _chunk(hidden_BSD: jax.Array, head_VD: jax.Array, targets_BS: jax.Array, temperature: float | jax.Array) -> tuple[jax.Array, jax.Array]:
    batch, size, width = hidden_BSD.shape
    accumulate = jnp.promote_types(hidden_BSD.dtype, jnp.float32)
    logits_NV = jnp.dot(hidden_BSD.reshape(-1, width), head_VD.T, preferred_element_type=accumulate) / temperature
    logp_NV = jax.nn.log_softmax(logits_NV, axis=-1)
    # A masked sum instead of a gather: its gradient is elementwise, a gather's is a scatter.
    hit_NV = jnp.arange(head_VD.shape[0])[None, :] == targets_BS.reshape(-1, 1)
    logp_N = jnp.sum(jnp.where(hit_NV, logp_NV, 0.0), axis=-1)
    entropy_N = -jnp.sum(jnp.exp(logp_NV) * logp_NV, axis=-1)
    return logp_N.reshape(batch, size), entropy_N.reshape(batch, size)
