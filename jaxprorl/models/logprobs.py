"""Log-probabilities and entropy of target tokens, without vocabulary-sized logits for more than one chunk of tokens.

The tokens that count are moved to the front, then chunks of them are multiplied with the output matrix until none is left:
prompt tokens and padding cost nothing but the rest of the last chunk. The backward pass multiplies again instead of keeping
logits. Memory: a few times CHUNK_TOKENS x vocabulary, plus one gradient of the output matrix, however many tokens there are.

On a mesh every device works through its own tokens with its own part of the vocabulary, in `shard_map`: left to itself, the compiler
gathers the output matrix and reduces its gradient once per chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxprorl.sharding.strategies import BATCH_AXES, CONTEXT_AXIS, WHOLE, Table

CHUNK_TOKENS = 512  # logits of this many tokens per device exist at a time


def token_log_probs(
    hidden_BSD: jax.Array,
    head_VD: jax.Array,
    targets_BS: jax.Array,
    temperature: float,
    mask_BS: jax.Array,
    mesh: Mesh | None = None,
    table: Table = WHOLE,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of each prediction, at the sampling temperature.

    Args:
        hidden_BSD: final hidden states; position s predicts `targets_BS[:, s]`.
        head_VD: output matrix.
        targets_BS: int32 token ids.
        temperature: > 0; logits are divided by it, as they are when sampling.
        mask_BS: above 0 where results are wanted; elsewhere they are 0 and have no gradient.
        mesh: rows are split over its batch axes, their tokens over its context axis; None = one device.
        table: how the output matrix is split over it, see `sharding.strategies`.

    Returns:
        logp_BS and entropy_BS in nats, float32 (float64 for float64 inputs).
    """
    if mesh is None or mesh.size == 1:
        return _rows(hidden_BSD, head_VD, targets_BS, mask_BS, temperature, None, None)
    tokens = PartitionSpec(BATCH_AXES, CONTEXT_AXIS)
    compute = jax.shard_map(
        partial(_rows, temperature=temperature, vocab_axis=table["vocab"], embed_axis=table["embed"]),
        mesh=mesh,
        in_specs=(tokens, PartitionSpec(table["vocab"], table["embed"]), tokens, tokens),
        out_specs=tokens,
        check_vma=False,
    )
    return compute(hidden_BSD, head_VD, targets_BS, mask_BS)


def _rows(
    hidden_BSD: jax.Array,
    head_VD: jax.Array,
    targets_BS: jax.Array,
    mask_BS: jax.Array,
    temperature: float,
    vocab_axis: str | None,
    embed_axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The tokens of one device: the output matrix is gathered along `embed_axis` once, before any chunk, and so is its gradient reduced."""
    if embed_axis:
        head_VD = jax.lax.all_gather(head_VD, embed_axis, axis=1, tiled=True)
    wanted_N = mask_BS.reshape(-1) > 0
    hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
    logp_N, entropy_N = _tokens(temperature, vocab_axis, hidden_ND, head_VD, targets_BS.reshape(-1), wanted_N)
    return logp_N.reshape(mask_BS.shape), entropy_N.reshape(mask_BS.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tokens(
    temperature: float, vocab_axis: str | None, hidden_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, wanted_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(temperature, vocab_axis, hidden_ND, head_VD, targets_N, wanted_N)[0]


def _forward(
    temperature: float, vocab_axis: str | None, hidden_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, wanted_N: jax.Array
) -> tuple:
    order_M, place_N = _wanted_first(wanted_N)
    size = _chunk_tokens(wanted_N.size)
    start_3M = jnp.zeros((3, order_M.size), jnp.promote_types(hidden_ND.dtype, jnp.float32))

    def chunk(c: jax.Array, results_3M: jax.Array) -> jax.Array:
        here_C = jax.lax.dynamic_slice_in_dim(order_M, c * size, size)
        logits_CV = _logits(hidden_ND[here_C], head_VD, temperature)
        largest_C = jnp.max(logits_CV, axis=1)
        largest_C = jax.lax.pmax(largest_C, vocab_axis) if vocab_axis else largest_C
        below_CV = logits_CV - largest_C[:, None]
        exp_CV = jnp.exp(below_CV)
        hit_CV = _columns(head_VD, vocab_axis)[None] == targets_N[here_C][:, None]
        sums_3C = jnp.stack([jnp.sum(x, axis=1) for x in (exp_CV, exp_CV * below_CV, jnp.where(hit_CV, below_CV, 0))])
        total_C, weighted_C, target_C = jax.lax.psum(sums_3C, vocab_axis) if vocab_axis else sums_3C
        log_total_C = jnp.log(total_C)
        # log p = x - log sum exp x; the entropy -sum p log p = log sum exp x - sum p x; both with the largest x taken off.
        results_3C = jnp.stack([target_C - log_total_C, log_total_C - weighted_C / total_C, largest_C + log_total_C])
        return jax.lax.dynamic_update_slice_in_dim(results_3M, results_3C, c * size, 1)

    count = jnp.sum(wanted_N)
    results_3M = jax.lax.fori_loop(0, (count + size - 1) // size, chunk, start_3M)
    logp_N, entropy_N, log_sum_N = jnp.where(wanted_N, results_3M[:, place_N], 0)
    return (logp_N, entropy_N), (hidden_ND, head_VD, targets_N, wanted_N, entropy_N, log_sum_N)


def _backward(temperature: float, vocab_axis: str | None, saved: tuple, gradients_N: tuple[jax.Array, jax.Array]) -> tuple:
    hidden_ND, head_VD, targets_N, wanted_N, entropy_N, log_sum_N = saved
    order_M, place_N = _wanted_first(wanted_N)
    size = _chunk_tokens(wanted_N.size)
    accumulate = entropy_N.dtype
    count = jnp.sum(wanted_N)
    # Of a result that all devices along an axis share, shard_map hands each an equal share of the gradient.
    shares = jax.lax.axis_size(vocab_axis) if vocab_axis else 1

    def chunk(c: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        to_hidden_MD, to_head_VD = sums
        here_C = jax.lax.dynamic_slice_in_dim(order_M, c * size, size)
        counts_C = c * size + jnp.arange(size) < count
        to_logp_C1, to_entropy_C1 = (jnp.where(counts_C, shares * g[here_C], 0)[:, None] for g in gradients_N)
        hidden_CD = hidden_ND[here_C]
        logp_CV = _logits(hidden_CD, head_VD, temperature) - log_sum_N[here_C][:, None]
        p_CV = jnp.where(counts_C[:, None], jnp.exp(logp_CV), 0)  # beyond them the sum is not known
        hit_CV = _columns(head_VD, vocab_axis)[None] == targets_N[here_C][:, None]
        # Of log-softmax: 1 at the target, minus p. Of the entropy: -p (log p + entropy).
        to_logits_CV = to_logp_C1 * (hit_CV - p_CV) - to_entropy_C1 * p_CV * (logp_CV + entropy_N[here_C][:, None])
        to_logits_CV = (to_logits_CV / temperature).astype(hidden_ND.dtype)
        to_hidden_CD = jnp.dot(to_logits_CV, head_VD, preferred_element_type=accumulate).astype(hidden_ND.dtype)
        to_head_VD += jnp.dot(to_logits_CV.T, hidden_CD, preferred_element_type=accumulate)
        return jax.lax.dynamic_update_slice_in_dim(to_hidden_MD, to_hidden_CD, c * size, 0), to_head_VD

    start = jnp.zeros((order_M.size, hidden_ND.shape[1]), hidden_ND.dtype), jnp.zeros(head_VD.shape, accumulate)
    to_hidden_MD, to_head_VD = jax.lax.fori_loop(0, (count + size - 1) // size, chunk, start)
    return to_hidden_MD[place_N], to_head_VD.astype(head_VD.dtype), None, None


_tokens.defvjp(_forward, _backward)


def _logits(hidden_CD: jax.Array, head_VD: jax.Array, temperature: float) -> jax.Array:
    accumulate = jnp.promote_types(hidden_CD.dtype, jnp.float32)
    return jnp.dot(hidden_CD, head_VD.T, preferred_element_type=accumulate) / temperature


def _columns(head_VD: jax.Array, vocab_axis: str | None) -> jax.Array:
    """Token ids of the rows of this device's part of the output matrix."""
    first = jax.lax.axis_index(vocab_axis) * head_VD.shape[0] if vocab_axis else 0
    return first + jnp.arange(head_VD.shape[0])


def _chunk_tokens(tokens: int) -> int:
    return min(CHUNK_TOKENS, tokens)


def _wanted_first(wanted_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of the tokens, wanted ones first and in order, filled up to whole chunks with the last; and each token's place there."""
    wanted = jnp.cumsum(wanted_N)
    unwanted = jnp.cumsum(~wanted_N)
    place_N = jnp.where(wanted_N, wanted - 1, wanted[-1] + unwanted - 1)
    padding = -wanted_N.size % _chunk_tokens(wanted_N.size)
    order_N = jnp.zeros_like(place_N).at[place_N].set(jnp.arange(wanted_N.size), unique_indices=True)
    return jnp.pad(order_N, (0, padding), mode="edge"), place_N
