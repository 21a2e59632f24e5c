"""Attention behind one interface: queries, keys, values and a boolean mask in, context out. Softmax is float32."""

import jax
import jax.numpy as jnp


def packed_causal_mask(segment_ids_BS: jax.Array) -> jax.Array:
    """mask_B1SS: a token sees itself and earlier tokens of its own segment; padding (segment 0) sees padding only."""
    size = segment_ids_BS.shape[1]
    same = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    causal = jnp.arange(size)[:, None] >= jnp.arange(size)[None, :]
    return (same & causal)[:, None]


def attend(q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, mask_B1ST: jax.Array) -> jax.Array:
    """Grouped-query attention, context_BSHK.

    Args:
        q_BSHK: queries; H is a multiple of the key-value heads G, head h reads key-value head h // (H / G).
        k_BTGK: keys.
        v_BTGK: values.
        mask_B1ST: True where query s may read key t; every query needs at least one.
    """
    batch, queries, heads, width = q_BSHK.shape
    groups = k_BTGK.shape[2]
    q_BSGRK = q_BSHK.reshape(batch, queries, groups, heads // groups, width)
    accumulate = jnp.promote_types(q_BSHK.dtype, jnp.float32)
    scores = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK, preferred_element_type=accumulate) * width**-0.5
    scores = jnp.where(mask_B1ST[:, :, None], scores, jnp.finfo(accumulate).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTGK.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", weights, v_BTGK).reshape(q_BSHK.shape)
