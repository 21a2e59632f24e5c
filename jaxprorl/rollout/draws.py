"""Random draws of tokens. Each depends on (seed, step, prompt, sample, position) alone, never on its neighbours."""

import jax
import jax.numpy as jnp


def sample_keys(seed: jax.Array, step: jax.Array, prompt_id_B: jax.Array, sample_B: jax.Array) -> jax.Array:
    """One key per row, from which all draws of that completion come."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(step_key, prompt), sample))(prompt_id_B, sample_B)


def draw(logits_BV: jax.Array, key_B: jax.Array, position_B: jax.Array, temperature: jax.Array) -> jax.Array:
    """One token per row from softmax(logits), or the most likely one at temperature 0; logits are scaled by the temperature already.

    One uniform number per row, looked up in the cumulative distribution: a noise for each entry of the vocabulary, as the Gumbel trick
    needs, costs more than the layers of a small model.
    """
    uniform_B = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))(key_B, position_B)
    weight_BV = jnp.exp(logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True))
    # Rounded sums may rise where nothing is added: tokens without weight are left out, so that none of them is ever taken.
    cumulative_BV = jnp.where(weight_BV > 0, jnp.cumsum(weight_BV, axis=-1), 0.0)
    above_BV = cumulative_BV > uniform_B[:, None] * jnp.max(cumulative_BV, axis=-1, keepdims=True)
    return jnp.where(temperature > 0, jnp.argmax(above_BV, axis=-1), jnp.argmax(logits_BV, axis=-1)).astype(jnp.int32)


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
