"""Attention behind two functions: `attend` takes any boolean mask, `packed_attention` rows of segments by a named implementation.

Softmax is float32 everywhere.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxprorl.models.chunked import chunked_attention, chunked_attention_part
from jaxprorl.models.compute import Compute
from jaxprorl.models.kernels import kernel
from jaxprorl.models.naive import naive_attention, query_blocks
from jaxprorl.models.remat import ATTENTION_NAME
from jaxprorl.sharding.strategies import BATCH_AXES, CONTEXT_AXIS

Packed = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (q_BSHK, k_BSGK, v_BSGK) -> context_BSHK


def packed_attention(compute: Compute, segment_ids_BS: jax.Array, context_ids_BS: jax.Array | None = None) -> Packed:
    """Attention over packed rows: a token sees itself and earlier tokens of its segment and its context, as in `packed_causal_mask`.

    What padding (segment 0) gets differs between implementations. Its keys and values must be finite: they meet weights of 0.

    Raises:
        ValueError: contexts, which only "naive" knows of.
    """
    if compute.attention == "naive":
        blocks = query_blocks(segment_ids_BS.shape[1], 1 if compute.mesh is None else compute.mesh.shape[CONTEXT_AXIS])
        copies = compute.copies_for_gradients
        return lambda q, k, v: checkpoint_name(naive_attention(q, k, v, segment_ids_BS, blocks, context_ids_BS, copies), ATTENTION_NAME)
    if context_ids_BS is not None:
        raise ValueError(f"{compute.attention!r} attention knows nothing of a context that segments share")
    rows: Callable[..., jax.Array]
    if compute.attention == "chunked":
        rows = partial(chunked_attention, chunk_tokens=compute.attention_chunk_tokens)
    else:
        rows = kernel(compute.attention, interpret=compute.platform == "cpu")
    if compute.row_mesh is None:
        return lambda q, k, v: rows(q, k, v, segment_ids_BS)
    return partial(_on_mesh, compute, compute.row_mesh, rows, segment_ids_BS)


def _on_mesh(
    compute: Compute, mesh: Mesh, rows: Callable[..., jax.Array], ids_BS: jax.Array, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array
) -> jax.Array:
    """Every device takes its own rows, heads and queries: the compiler cannot split a kernel, and of a loop over chunks it makes every
    device do all rows.
    """
    head_axis, parts = compute.table["heads"], mesh.shape[CONTEXT_AXIS]
    tensor = 1 if head_axis is None else mesh.shape[head_axis]
    heads, groups = q_BSHK.shape[2], k_BSGK.shape[2]
    kv_axis = head_axis if groups % tensor == 0 else None  # as in `sharding.mesh.table_shardings`

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        if head_axis and not kv_axis:  # all key-value heads are here: take those of this device's query heads
            mine = (jax.lax.axis_index(head_axis) * q.shape[2] + jnp.arange(q.shape[2])) // (heads // groups)
            k, v = k[:, :, mine], v[:, :, mine]
        if parts == 1:
            return rows(q, k, v, ids)
        k, v, ids = (jax.lax.all_gather(x, CONTEXT_AXIS, axis=1, tiled=True) for x in (k, v, ids))
        return chunked_attention_part(q, k, v, ids, jax.lax.axis_index(CONTEXT_AXIS), compute.attention_chunk_tokens)

    tokens = PartitionSpec(BATCH_AXES, CONTEXT_AXIS)
    queries, keys = (PartitionSpec(BATCH_AXES, CONTEXT_AXIS, axis, None) for axis in (head_axis, kv_axis))
    # What kernels return does not say over which mesh axes it varies, so that goes unchecked.
    run = jax.shard_map(local, mesh=mesh, in_specs=(queries, keys, keys, tokens), out_specs=queries, check_vma=False)
    return run(q_BSHK, k_BSGK, v_BSGK, ids_BS)


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
