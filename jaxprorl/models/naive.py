"""Packed attention by whole rows of scores: the plain way, the fastest one for short rows on CPUs.

Every block of queries meets the keys up to its own end. Heads are in front, so that all products are over the last two axes: with
`attention.attend`, XLA:CPU copied the scores from one order into another five times.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxprorl.models.dense import transposed_copy


def query_blocks(row_tokens: int, parts: int) -> int:
    """How many blocks of queries there are: up to four of 64 tokens or more, one where a row is cut into parts.

    Measured on 2 CPU cores, 16 rows of 192 tokens, forward and backward pass: three blocks 9.4 ms, two 10.0, one 13.1.
    """
    return 1 if parts > 1 else max(1, min(4, row_tokens // 64))


def naive_attention(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    segment_ids_BS: jax.Array,
    blocks: int,
    context_ids_BS: jax.Array | None = None,
    copies_for_gradients: bool = False,
) -> jax.Array:
    """context_BSHK under `packed_causal_mask`.

    Passes with and without gradients round alike on CPUs, so that KL to a reference of the same weights is 0. In float32 queries and keys
    stand behind a barrier for it: where layers are a loop, rotations end in a transposed copy here and in an array that is saved there,
    and are compiled to other fused multiply-adds. (Rounding to bfloat16 hides that.)

    Args:
        blocks: of queries, see `query_blocks`.
        context_ids_BS: as in `packed_causal_mask`.
        copies_for_gradients: gradients multiply transposed copies; see `dense.multiply_plainly` for why, and for when that pays.
    """
    batch, size, heads, width = q_BSHK.shape
    groups = k_BSGK.shape[2]
    if q_BSHK.dtype == jnp.float32:
        q_BSHK, k_BSGK = jax.lax.optimization_barrier((q_BSHK, k_BSGK))
    q_BGRSK = q_BSHK.reshape(batch, size, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    k_BGKS, v_BGSK = k_BSGK.transpose(0, 2, 3, 1), v_BSGK.transpose(0, 2, 1, 3)
    attend = _with_copies if copies_for_gradients else _plain
    context_BGRSK = attend(blocks, q_BGRSK, k_BGKS, v_BGSK, packed_causal_mask(segment_ids_BS, context_ids_BS))
    return context_BGRSK.transpose(0, 3, 1, 2, 4).reshape(q_BSHK.shape)


def packed_causal_mask(segment_ids_BS: jax.Array, context_ids_BS: jax.Array | None = None) -> jax.Array:
    """mask_B1SS: a token sees itself and earlier tokens of its own segment, and of the segment that is its context (0 = none).

    Padding (segment 0), which must come last in a row of contexts, sees padding only.
    """
    size = segment_ids_BS.shape[1]
    same = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    if context_ids_BS is not None:
        same |= context_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    causal = jnp.arange(size)[:, None] >= jnp.arange(size)[None, :]
    return (same & causal)[:, None]


def _plain(blocks: int, q_BGRSK: jax.Array, k_BGKS: jax.Array, v_BGSK: jax.Array, mask_B1SS: jax.Array) -> jax.Array:
    """context_BGRSK."""
    return _contexts(blocks, q_BGRSK, k_BGKS, v_BGSK, mask_B1SS)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_copies(blocks: int, q_BGRSK: jax.Array, k_BGKS: jax.Array, v_BGSK: jax.Array, mask_B1SS: jax.Array) -> jax.Array:
    """context_BGRSK."""
    return _forward(blocks, q_BGRSK, k_BGKS, v_BGSK, mask_B1SS)[0]


def _forward(blocks: int, q_BGRSK: jax.Array, k_BGKS: jax.Array, v_BGSK: jax.Array, mask_B1SS: jax.Array) -> tuple[jax.Array, tuple]:
    context_BGRSK, kept = _contexts(blocks, q_BGRSK, k_BGKS, v_BGSK, mask_B1SS)
    return context_BGRSK, (q_BGRSK, k_BGKS, v_BGSK, kept)


def _contexts(
    blocks: int, q_BGRSK: jax.Array, k_BGKS: jax.Array, v_BGSK: jax.Array, mask_B1SS: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """context_BGRSK, and the weights of each block.

    Weights that are divided by their sum only after the product are faster still, but passes with and without gradients would not round
    alike: the compiler rounds that quotient here in one way and there in another.
    """
    accumulate = jnp.promote_types(q_BGRSK.dtype, jnp.float32)
    contexts, kept = [], []
    for start, end in _spans(blocks, q_BGRSK.shape[3]):
        scores = jnp.matmul(_joined(q_BGRSK[:, :, :, start:end]), k_BGKS[..., :end], preferred_element_type=accumulate)
        scores = _split(scores * q_BGRSK.shape[-1] ** -0.5, q_BGRSK)
        scores = jnp.where(mask_B1SS[:, :, None, start:end, :end], scores, jnp.finfo(accumulate).min)
        weights = _joined(jax.nn.softmax(scores, axis=-1).astype(v_BGSK.dtype))
        contexts.append(_split(jnp.matmul(weights, v_BGSK[:, :, :end]), q_BGRSK))
        kept.append(weights)
    return jnp.concatenate(contexts, axis=3), kept


def _backward(blocks: int, saved: tuple, to_context_BGRSK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q_BGRSK, k_BGKS, v_BGSK, kept = saved
    dtype, size, width = q_BGRSK.dtype, q_BGRSK.shape[3], q_BGRSK.shape[4]
    accumulate = jnp.promote_types(dtype, jnp.float32)
    k_BGSK, v_BGKS = transposed_copy(k_BGKS), transposed_copy(v_BGSK)
    to_q, to_k, to_v = [], [], []
    for (start, end), weights in zip(_spans(blocks, size), kept, strict=True):
        to_context = _joined(to_context_BGRSK[:, :, :, start:end])
        to_v.append(_lengthened(jnp.matmul(transposed_copy(weights), to_context, preferred_element_type=accumulate), size))
        to_weights = jnp.matmul(to_context, v_BGKS[..., :end], preferred_element_type=accumulate)
        # Of softmax: a score's gradient is its weight times (its weight's gradient - their mean). That is also to_context . context, but
        # for the rounding of the context.
        mean = jnp.sum(weights.astype(accumulate) * to_weights, axis=-1, keepdims=True)
        to_scores = (weights.astype(accumulate) * (to_weights - mean) * width**-0.5).astype(dtype)
        to_q.append(_split(jnp.matmul(to_scores, k_BGSK[:, :, :end]), q_BGRSK))
        q = _joined(q_BGRSK[:, :, :, start:end])
        to_k.append(_lengthened(jnp.matmul(transposed_copy(to_scores), q, preferred_element_type=accumulate), size))
    return jnp.concatenate(to_q, axis=3), sum(to_k[1:], to_k[0]).astype(dtype).swapaxes(2, 3), sum(to_v[1:], to_v[0]).astype(dtype), None


_with_copies.defvjp(_forward, _backward)


def _spans(blocks: int, size: int) -> list[tuple[int, int]]:
    """First and last + 1 query of every block; the latter for its keys too."""
    return [(size * block // blocks, size * (block + 1) // blocks) for block in range(blocks)]


def _joined(x: jax.Array) -> jax.Array:
    """[B, G, R, Q, ...] -> [B, G, R * Q, ...]: the queries of all heads that read the same keys."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _split(x: jax.Array, like_BGRSK: jax.Array) -> jax.Array:
    """The way back: [B, G, R * Q, ...] -> [B, G, R, Q, ...]."""
    return x.reshape(*like_BGRSK.shape[:3], -1, x.shape[-1])


def _lengthened(x_BGTK: jax.Array, size: int) -> jax.Array:
    """With zeros for the keys behind the block."""
    return jnp.pad(x_BGTK, ((0, 0), (0, 0), (0, size - x_BGTK.shape[2]), (0, 0)))
