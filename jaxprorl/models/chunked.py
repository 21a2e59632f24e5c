"""Packed attention in memory linear in the row length, on any platform: chunks of queries against chunks of keys.

The softmax is kept up while the chunks go by (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2); the backward pass
computes the scores of each pair of chunks again. Neither holds more than one pair.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxprorl.models.remat import ATTENTION_NAME

Pair = tuple[jax.Array, jax.Array]


def chunked_attention(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segment_ids_BS: jax.Array, chunk_tokens: int) -> jax.Array:
    """context_BSHK under `attention.packed_causal_mask`, without a mask or scores of S x S entries."""
    size = segment_ids_BS.shape[1]
    chunk = min(chunk_tokens, size)
    padding = -size % chunk
    inputs = [jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q_BSHK, k_BSGK, v_BSGK, segment_ids_BS)]
    return _attend(chunk, *inputs, first_chunks(inputs[3], chunk), jnp.zeros((), jnp.int32))[:, :size]


def chunked_attention_part(
    q_BQHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segment_ids_BS: jax.Array, part_index: jax.Array, chunk_tokens: int
) -> jax.Array:
    """The same for part `part_index` of the queries, Q = S / parts tokens, against the whole row; chunks divide the part."""
    chunk = min(chunk_tokens, q_BQHK.shape[1])
    start = part_index * (q_BQHK.shape[1] // chunk)
    return _attend(chunk, q_BQHK, k_BSGK, v_BSGK, segment_ids_BS, first_chunks(segment_ids_BS, chunk), start)


def first_chunks(segment_ids_BS: jax.Array, chunk: int) -> jax.Array:
    """first_N: the first chunk of keys that any query of chunk n may read, in any row. Earlier ones are skipped.

    Chunks can meet only where their ranges of ids overlap: never too late, and exact for rows whose ids only grow.
    """
    ids_BNC = segment_ids_BS.reshape(segment_ids_BS.shape[0], -1, chunk)
    low_BN, high_BN = ids_BNC.min(axis=2), ids_BNC.max(axis=2)
    meet_NN = ((low_BN[:, :, None] <= high_BN[:, None, :]) & (low_BN[:, None, :] <= high_BN[:, :, None])).any(axis=0)
    return jnp.argmax(meet_NN, axis=1).astype(jnp.int32)  # a chunk meets itself, so there is one


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, first: jax.Array, start: jax.Array) -> jax.Array:
    return _forward(chunk, q, k, v, ids, first, start)[0]


def _forward(chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, first: jax.Array, start: jax.Array) -> Pair:
    """context_BSHK, and the logarithm of each softmax's sum, [B, G, R, S]. The queries begin at chunk `start` of the row."""
    batch, size, heads, width = q.shape
    groups, accumulate = k.shape[2], jnp.promote_types(q.dtype, jnp.float32)
    q = q.reshape(batch, size, groups, heads // groups, width)

    def queries(_: None, i: jax.Array) -> tuple[None, Pair]:
        q_n, n = part(q, i, chunk), start + i

        def keys(m: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            context, largest, total = carry
            scores, mask = scores_of(q_n, part(k, m, chunk), ids, n, m, chunk)
            new = jnp.maximum(largest, scores.max(axis=-1))
            weights = jnp.where(mask, jnp.exp(scores - new[..., None]), 0.0)  # a query may have no key in this chunk
            old = jnp.exp(largest - new)
            v_m = part(v, m, chunk)
            added = jnp.einsum("bgrst,btgk->bgrsk", weights.astype(v.dtype), v_m, preferred_element_type=accumulate)
            return context * old[..., None] + added, new, total * old + weights.sum(axis=-1)

        shape = batch, groups, heads // groups, chunk
        empty = jnp.zeros((*shape, width), accumulate), jnp.full(shape, jnp.finfo(accumulate).min), jnp.zeros(shape, accumulate)
        context, largest, total = jax.lax.fori_loop(first[n], n + 1, keys, empty)
        return None, ((context / total[..., None]).astype(v.dtype), largest + jnp.log(total))

    _, (context, log_sum) = jax.lax.scan(queries, None, jnp.arange(size // chunk, dtype=jnp.int32))
    context = jnp.moveaxis(context, (0, 4), (1, 2)).reshape(batch, size, heads, width)
    return context, jnp.moveaxis(log_sum, 0, 3).reshape(*log_sum.shape[1:4], size)


def _forward_saved(chunk: int, *inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    context, log_sum = (checkpoint_name(x, ATTENTION_NAME) for x in _forward(chunk, *inputs))
    return context, (*inputs, context, log_sum)


def _backward(chunk: int, saved: tuple[jax.Array, ...], d_context: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, ids, first, start, context, log_sum = saved
    batch, size, heads, width = q.shape
    groups, accumulate = k.shape[2], log_sum.dtype
    grouped = batch, size, groups, heads // groups, width
    q, context, d_context = (x.reshape(grouped) for x in (q, context, d_context))

    def queries(d_kv: Pair, i: jax.Array) -> tuple[Pair, jax.Array]:
        q_n, d_n, n = part(q, i, chunk), part(d_context, i, chunk), start + i
        log_sum_n = jax.lax.dynamic_slice_in_dim(log_sum, i * chunk, chunk, axis=3)
        mean = jnp.einsum("bsgrk,bsgrk->bgrs", d_n, part(context, i, chunk), preferred_element_type=accumulate)

        def keys(m: jax.Array, carry: tuple[jax.Array, Pair]) -> tuple[jax.Array, Pair]:
            d_q, (d_k, d_v) = carry
            k_m, v_m = part(k, m, chunk), part(v, m, chunk)
            scores, mask = scores_of(q_n, k_m, ids, n, m, chunk)
            # Never above 1, but the rounding of huge scores would make it so, and then infinite.
            weights = jnp.where(mask, jnp.exp(jnp.minimum(scores - log_sum_n[..., None], 0.0)), 0.0)
            d_weights = jnp.einsum("bsgrk,btgk->bgrst", d_n, v_m, preferred_element_type=accumulate)
            d_scores = (weights * (d_weights - mean[..., None]) * width**-0.5).astype(q.dtype)
            d_q += jnp.einsum("bgrst,btgk->bsgrk", d_scores, k_m, preferred_element_type=accumulate)
            d_k_m = jnp.einsum("bgrst,bsgrk->btgk", d_scores, q_n, preferred_element_type=accumulate)
            d_v_m = jnp.einsum("bgrst,bsgrk->btgk", weights.astype(v.dtype), d_n, preferred_element_type=accumulate)
            return d_q, (add_part(d_k, d_k_m, m, chunk), add_part(d_v, d_v_m, m, chunk))

        d_q, d_kv = jax.lax.fori_loop(first[n], n + 1, keys, (jnp.zeros(q_n.shape, accumulate), d_kv))
        return d_kv, d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, accumulate), jnp.zeros(v.shape, accumulate)
    (d_k, d_v), d_q = jax.lax.scan(queries, zeros, jnp.arange(size // chunk, dtype=jnp.int32))
    d_q = jnp.moveaxis(d_q, 0, 1).reshape(batch, size, heads, width)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None


_attend.defvjp(_forward_saved, _backward)


def scores_of(q_BCGRK: jax.Array, k_BCGK: jax.Array, ids_BS: jax.Array, n: jax.Array, m: jax.Array, chunk: int) -> Pair:
    """Scaled scores [B, G, R, C, C] of query chunk n and key chunk m, the lowest number where the mask is False; and the mask."""
    accumulate = jnp.promote_types(q_BCGRK.dtype, jnp.float32)
    scores = jnp.einsum("bsgrk,btgk->bgrst", q_BCGRK, k_BCGK, preferred_element_type=accumulate) * q_BCGRK.shape[-1] ** -0.5
    same_BCC = part(ids_BS, n, chunk)[:, :, None] == part(ids_BS, m, chunk)[:, None, :]
    place_C = jnp.arange(chunk)
    mask = (same_BCC & (n * chunk + place_C[:, None] >= m * chunk + place_C[None, :]))[:, None, None]
    return jnp.where(mask, scores, jnp.finfo(accumulate).min), mask


def part(x: jax.Array, n: jax.Array, chunk: int) -> jax.Array:
    """Chunk n of an array along its token axis, the second."""
    return jax.lax.dynamic_slice_in_dim(x, n * chunk, chunk, axis=1)


def add_part(x: jax.Array, added: jax.Array, n: jax.Array, chunk: int) -> jax.Array:
    """The array x with `added` added to its chunk n."""
    return jax.lax.dynamic_update_slice_in_dim(x, part(x, n, chunk) + added, n * chunk, axis=1)
