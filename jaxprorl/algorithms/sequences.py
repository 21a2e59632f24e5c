"""Sums over the response tokens of each sequence in packed rows, given back at every token of the sequence."""

import jax
import jax.numpy as jnp


def masked(x_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """`x_BS` where the mask is 1, else 0, whatever stood there; no gradient flows there, even if it was nan or inf.

    To be applied to what goes into a formula: masking what comes out leaves 0 * nan in the gradient.
    """
    return jnp.where(mask_BS > 0, x_BS, 0)


def sequence_sum(x_BS: jax.Array, segment_ids_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """Sum of `x_BS` over the response tokens of the token's sequence, [B, S]; 0 at padding.

    Args:
        x_BS: per-token values.
        segment_ids_BS: which sequence of its row each token belongs to, contiguous; 0 = padding.
        mask_BS: 1 on response tokens.

    log2(S) shifted additions within sequences, then the sum at each sequence's end is carried back to its tokens, which all get the
    same bits. Differences of one running sum would carry a sequence's rounding into the next; scatters are slow on accelerators.
    """
    ids_BS = segment_ids_BS
    running_BS = _running_sum(masked(x_BS, mask_BS), ids_BS)
    last_BS = jnp.pad(ids_BS[:, 1:] != ids_BS[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    return _running_sum(jnp.where(last_BS, running_BS, 0)[:, ::-1], ids_BS[:, ::-1])[:, ::-1]


def sequence_mean(x_BS: jax.Array, segment_ids_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """Mean of `x_BS` over the response tokens of the token's sequence, [B, S]; 0 where there are none. See `sequence_sum`."""
    tokens_BS = sequence_sum(jnp.ones_like(x_BS), segment_ids_BS, mask_BS)
    return sequence_sum(x_BS, segment_ids_BS, mask_BS) / jnp.maximum(tokens_BS, 1)


def _running_sum(x_BS: jax.Array, segment_ids_BS: jax.Array) -> jax.Array:
    """Inclusive running sum that starts afresh with each sequence: after a round of stride d, x covers the last 2 d tokens."""
    stride = 1
    while stride < x_BS.shape[1]:
        same = segment_ids_BS[:, stride:] == segment_ids_BS[:, :-stride]
        x_BS = x_BS + jnp.pad(jnp.where(same, x_BS[:, :-stride], 0), ((0, 0), (stride, 0)))
        stride *= 2
    return x_BS
