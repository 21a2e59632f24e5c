"""Random draws of tokens. Each depends on (seed, step, prompt, sample, position) alone, never on its neighbours."""

import jax
import jax.numpy as jnp

BLOCK_TOKENS = 128  # of the vocabulary, whose weights are summed up before a token is looked up


def sample_keys(seed: jax.Array, step: jax.Array, prompt_id_B: jax.Array, sample_B: jax.Array) -> jax.Array:
    """One key per row, from which all draws of that completion come."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(step_key, prompt), sample))(prompt_id_B, sample_B)


def draw(logits_BV: jax.Array, key_B: jax.Array, position_B: jax.Array, temperature: jax.Array) -> jax.Array:
    """One token per row from softmax(logits), or the most likely one at temperature 0; logits are scaled by the temperature already.

    One uniform number per row, looked up in the cumulative distribution: a noise for each entry of the vocabulary, as the Gumbel trick
    needs, costs more than the layers of a small model. First the block of tokens is found, then the token in it, because running sums are
    slow: over the whole of a large vocabulary they would cost more than the logits.
    """

    def sampled(logits_BV: jax.Array) -> jax.Array:
        uniform_B = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))(key_B, position_B)
        weight_BV = jnp.exp(logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True))
        padded_BV = jnp.pad(weight_BV, ((0, 0), (0, -weight_BV.shape[1] % BLOCK_TOKENS)))
        weight_BNW = padded_BV.reshape(len(padded_BV), -1, BLOCK_TOKENS)
        weight_BN = jnp.sum(weight_BNW, axis=-1)
        block_B, rest_B = _first_above(weight_BN, uniform_B * jnp.sum(weight_BN, axis=-1))
        token_B, _ = _first_above(jnp.take_along_axis(weight_BNW, block_B[:, None, None], axis=1)[:, 0], rest_B)
        return jnp.minimum(block_B * BLOCK_TOKENS + token_B, logits_BV.shape[1] - 1)  # logits that are not finite end in the padding

    def likeliest(logits_BV: jax.Array) -> jax.Array:
        return _first(logits_BV == jnp.max(logits_BV, axis=-1, keepdims=True))

    return jax.lax.cond(temperature > 0, sampled, likeliest, logits_BV)


def _first_above(weight_BN: jax.Array, target_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the first cumulative sum above the target, and what of the target the weights before it leave.

    Rounded sums may rise where nothing is added, the target may reach the total, and what was left of another one may be below 0:
    entries without weight count as 0, and the target is kept from 0 to below the largest sum, so that none of them is ever taken.
    """
    cumulative_BN = jnp.where(weight_BN > 0, jnp.cumsum(weight_BN, axis=-1), 0.0)
    target_B = jnp.clip(target_B, 0.0, jnp.nextafter(jnp.max(cumulative_BN, axis=-1), 0.0))
    index_B = _first(cumulative_BN > target_B[:, None])
    return index_B, target_B - jnp.sum(jnp.where(jnp.arange(weight_BN.shape[1]) < index_B[:, None], weight_BN, 0.0), axis=-1)


def _first(mask_BN: jax.Array) -> jax.Array:
    """Index of the first True of each row, int32; as argmax, in a fraction of its time on CPU."""
    last = mask_BN.shape[1] - 1
    return jnp.min(jnp.where(mask_BN, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


def truncate(logits_BV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits with all but the likeliest tokens at -inf: the `top_k` largest (0 = all), of those the fewest that hold `top_p` of the mass.

    Tokens whose logit equals that of the last one kept are kept too.
    """
    ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    rank_V = jnp.arange(logits_BV.shape[-1])
    ordered_BV = jnp.where(rank_V < jnp.where(top_k > 0, top_k, rank_V.size), ordered_BV, -jnp.inf)
    share_BV = jax.nn.softmax(ordered_BV, axis=-1)
    before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV  # mass of the likelier ones; the first is kept in any case
    kept_BV = ((before_BV < top_p) | (rank_V == 0)) & (ordered_BV > -jnp.inf)
    smallest_B1 = jnp.min(jnp.where(kept_BV, ordered_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= smallest_B1, logits_BV, -jnp.inf)
