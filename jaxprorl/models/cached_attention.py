"""Attention of one query per row over keys and values that lie in several pieces, as decoding reads its cache.

Each piece gives a partial result; `merge` joins two. A piece of which a row may read nothing changes none of the row's bits: merging then
multiplies by exactly 1 and adds exactly 0. So pieces that no row needs can be left out, whatever the other rows need.

That takes finite values in every column, read or not: `readable` sees to it before a column is written.

Layouts [.., K, W] of keys and [.., W, K] of values are those of plain matrix products, in which a step reads the cache once, in order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEVER = -1e30  # score of a column that must not be read; exp(NEVER - x) is exactly 0 for any real score x


class Partial(NamedTuple):
    """Attention over a part of the columns, before the division.

    Attributes:
        largest: largest score, [..., 1].
        total: sum of exp(score - largest), [..., 1].
        context: the same sum over values, [..., K].
    """

    largest: jax.Array
    total: jax.Array
    context: jax.Array


def partial_attention(q_BGRK: jax.Array, k_BGKW: jax.Array, v_BGWK: jax.Array, mask_BW: jax.Array) -> Partial:
    """R queries of each row and key-value head over W columns. Softmax is float32 at least.

    Args:
        q_BGRK: queries; those of the heads that share a key-value head, or of several rows that share keys.
        k_BGKW: keys.
        v_BGWK: values.
        mask_BW: True where a row may read.
    """
    accumulate = jnp.promote_types(q_BGRK.dtype, jnp.float32)
    scores = jnp.einsum("bgrk,bgkw->bgrw", q_BGRK, k_BGKW, preferred_element_type=accumulate) * q_BGRK.shape[-1] ** -0.5
    scores = jnp.where(mask_BW[:, None, None], scores, NEVER)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    context = jnp.einsum("bgrw,bgwk->bgrk", weights.astype(v_BGWK.dtype), v_BGWK, preferred_element_type=accumulate)
    return Partial(largest, jnp.sum(weights, axis=-1, keepdims=True), context)


def readable(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A column's key and value, [..., K], as the cache may hold them.

    A value that overflowed would reach every row that does not read it too, since 0 times NaN is NaN. It is kept as 0 and its key as NaN:
    whoever reads the column still gets NaN, from the score; for the others that is masked.
    """
    sound = jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the columns of both."""
    largest = jnp.maximum(a.largest, b.largest)
    scale_a, scale_b = jnp.exp(a.largest - largest), jnp.exp(b.largest - largest)
    return Partial(largest, a.total * scale_a + b.total * scale_b, a.context * scale_a + b.context * scale_b)


def nothing(q_BGRK: jax.Array) -> Partial:
    """Attention over no columns: `merge` returns the other one as it is."""
    accumulate = jnp.promote_types(q_BGRK.dtype, jnp.float32)
    zero = jnp.zeros((*q_BGRK.shape[:-1], 1), accumulate)
    return Partial(zero + NEVER, zero, jnp.zeros(q_BGRK.shape, accumulate))


def finish(partial: Partial, dtype: jnp.dtype) -> jax.Array:
    """The attention's result, [..., K]; every row must have read a column."""
    return (partial.context / partial.total).astype(dtype)
