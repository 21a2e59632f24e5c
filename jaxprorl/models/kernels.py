"""Packed attention by the accelerators' own kernels. Their libraries are loaded when one is asked for, never on CPU.

On CPU devices the Pallas kernels are interpreted, which is for tests.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxprorl.models.remat import ATTENTION_NAME

SPLASH_MAX_BLOCK_TOKENS = 512


def kernel(name: str, interpret: bool) -> Callable[..., jax.Array]:
    """(q_BSHK, k_BSGK, v_BSGK, segment_ids_BS) -> context_BSHK for the rows of one device, by the name in `compute.ATTENTION`."""
    if name == "cudnn":
        return cudnn
    return partial({"triton": triton, "splash": splash}[name], interpret=interpret)


def triton(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segment_ids_BS: jax.Array, interpret: bool) -> jax.Array:
    """Pallas Triton `mha`. It has as many key-value heads as queries: those of a group are repeated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it points to tokamax, whose interface has no segments
        from jax.experimental.pallas.ops.gpu import attention

    repeats, width = q_BSHK.shape[2] // k_BSGK.shape[2], q_BSHK.shape[3]
    k_BSHK, v_BSHK = (jnp.repeat(x, repeats, axis=2) for x in (k_BSGK, v_BSGK))
    blocks = attention.BlockSizes(block_q=64, block_k=64, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32)
    context_BSHK: jax.Array = attention.mha(
        q_BSHK, k_BSHK, v_BSHK, segment_ids_BS, sm_scale=width**-0.5, causal=True, block_sizes=blocks, interpret=interpret
    )
    return context_BSHK


def splash(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segment_ids_BS: jax.Array, interpret: bool) -> jax.Array:
    """Pallas Splash attention: one call serves the queries of one key-value head in one row. It scales nothing, so q is scaled before."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    batch, size, heads, width = q_BSHK.shape
    groups = k_BSGK.shape[2]
    block = math.gcd(size, SPLASH_MAX_BLOCK_TOKENS)
    blocks = splash_attention.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((size, size))] * (heads // groups))
    kernel = splash_attention.make_splash_mqa_single_device(
        mask, block_sizes=blocks, residual_checkpoint_name=ATTENTION_NAME, interpret=interpret
    )

    def row(q_GRSK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, ids_S: jax.Array) -> jax.Array:
        segments = splash_attention.SegmentIds(ids_S, ids_S)
        result: jax.Array = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=segments))(q_GRSK, k_GSK, v_GSK)
        return result

    q_BGRSK = jnp.moveaxis((q_BSHK * width**-0.5).reshape(batch, size, groups, heads // groups, width), 1, 3)
    context_BGRSK = jax.vmap(row)(q_BGRSK, jnp.moveaxis(k_BSGK, 1, 2), jnp.moveaxis(v_BSGK, 1, 2), segment_ids_BS)
    return jnp.moveaxis(context_BGRSK, 3, 1).reshape(q_BSHK.shape)


def cudnn(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segment_ids_BS: jax.Array) -> jax.Array:
    """Flash attention of cuDNN for rows that hold one sequence each, from their first token on. Padding gets zeros."""
    real_BS = segment_ids_BS > 0
    length_B = jnp.maximum(real_BS.sum(axis=1), 1).astype(jnp.int32)  # a row of padding reads its first token
    context_BSHK = jax.nn.dot_product_attention(
        q_BSHK, k_BSGK, v_BSGK, is_causal=True, query_seq_lengths=length_B, key_value_seq_lengths=length_B, implementation="cudnn"
    )
    return jnp.where(real_BS[:, :, None, None], context_BSHK, 0)
