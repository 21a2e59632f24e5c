"""The jitted training step: old and reference log-probs once per rollout batch, then K optimizer updates.

Sums and counts travel; each update divides once, by the response tokens of its whole mini-batch, so the gradient does
not depend on how rows are split into micro-batches or devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from jaxprorl.algorithms import kl, losses
from jaxprorl.models.logprobs import token_log_probs
from jaxprorl.models.qwen2 import Params
from jaxprorl.optimizer import learning_rate_schedule, make_optimizer, update_count
from jaxprorl.state import TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
PER_TOKEN = ("advantage", "engine_logp")  # float arrays packed beside the tokens


def batch_log_probs(graphdef: nnx.GraphDef, params: Params, rows: Batch, temperature: float) -> tuple[jax.Array, jax.Array]:
    """logp_BS and entropy_BS of the targets of packed rows under `params`."""
    model = nnx.merge(graphdef, params)
    hidden_BSD = model(rows["tokens"], rows["positions"], rows["segment_ids"])
    return token_log_probs(hidden_BSD, model.head(), rows["targets"], temperature)


def objective_sums(graphdef: nnx.GraphDef, params: Params, rows: Batch, config: ConfigDict) -> tuple[jax.Array, Metrics]:
    """Sum over response tokens of ProRL's objective (arXiv 2505.24864, section 2): clipped policy loss + beta * KL.

    Args:
        rows: [B, S] arrays of one micro-batch, with `old_logp` and `reference_logp`.

    Returns:
        The sum, and sums (`ratio.*`: extremes) for the metrics.
    """
    logp_BS, entropy_BS = batch_log_probs(graphdef, params, rows, config.rollout.temperature)
    mask_BS, advantage_BS = rows["mask"], rows["advantage"]
    clip_low, clip_high = config.algorithm.clip_low, config.algorithm.clip_high
    policy_BS = losses.clipped_policy_loss(logp_BS, rows["old_logp"], advantage_BS, clip_low, clip_high)
    # differs from the paper, which names no estimator: k3, GRPO's own (arXiv 2402.03300, section 4.1.1).
    k3_BS = kl.k3(logp_BS, rows["reference_logp"])
    loss_BS = policy_BS + config.algorithm.kl_coefficient * k3_BS
    ratio_BS = jnp.exp(losses.log_ratio(logp_BS, rows["old_logp"]))
    mismatch_BS = jnp.abs(rows["old_logp"] - rows["engine_logp"])
    per_token = {
        "loss.policy": policy_BS,
        "kl.k1": kl.k1(logp_BS, rows["reference_logp"]),
        "kl.k2": kl.k2(logp_BS, rows["reference_logp"]),
        "kl.k3": k3_BS,
        "entropy": entropy_BS,
        "clip.low_share": losses.clipped_low(ratio_BS, advantage_BS, clip_low),
        "clip.high_share": losses.clipped_high(ratio_BS, advantage_BS, clip_high),
        "mismatch.mean": mismatch_BS,
    }
    metrics = {name: jnp.sum(jnp.where(mask_BS > 0, value, 0.0)) for name, value in per_token.items()}
    metrics["ratio.max"] = jnp.max(jnp.where(mask_BS > 0, ratio_BS, -jnp.inf))
    metrics["ratio.min"] = jnp.min(jnp.where(mask_BS > 0, ratio_BS, jnp.inf))
    metrics["mismatch.max"] = jnp.max(jnp.where(mask_BS > 0, mismatch_BS, -jnp.inf))
    return jnp.sum(jnp.where(mask_BS > 0, loss_BS, 0.0)), metrics


def make_train_step(graphdef: nnx.GraphDef, config: ConfigDict) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The training step of one rollout batch, to be jitted with the state donated.

    The batch holds [U, M, B, S] arrays (U updates, M micro-batches of B rows) and `micro_batches` [U], how many of the M
    are in use; the rest costs nothing. An update without tokens changes nothing. Metrics come back per update, [U].
    """
    optimizer = make_optimizer(config)
    schedule = learning_rate_schedule(config)
    temperature = config.rollout.temperature

    def fixed_log_probs(state: TrainState, rows: Batch, used: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Old and reference log-probs of one mini-batch, [M, B, S]; unused micro-batches stay 0."""

        def body(m: jax.Array, logps: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            micro = take(rows, m)
            old, _ = batch_log_probs(graphdef, state.params, micro, temperature)
            reference, _ = batch_log_probs(graphdef, state.reference, micro, temperature)
            return logps[0].at[m].set(old), logps[1].at[m].set(reference)

        empty = jnp.zeros_like(rows["mask"])
        return jax.lax.fori_loop(0, used, body, (empty, empty))

    def update(state: TrainState, rows: Batch, used: jax.Array) -> tuple[TrainState, Metrics]:
        """One optimizer update from one mini-batch."""
        gradient_of = jax.grad(lambda params, micro: objective_sums(graphdef, params, micro, config), has_aux=True)

        def body(m: jax.Array, sums: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
            gradients, metrics = gradient_of(state.params, take(rows, m))
            return jax.tree.map(jnp.add, sums[0], gradients), combine(sums[1], metrics)

        shapes = jax.eval_shape(gradient_of, state.params, take(rows, 0))
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0]), empty_metrics(shapes[1])
        gradients, sums = jax.lax.fori_loop(0, used, body, start)
        tokens = jnp.sum(rows["mask"])
        per_token = 1.0 / jnp.maximum(tokens, 1.0)
        gradients = jax.tree.map(lambda g: g * per_token, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), state.reference, opt_state)
        metrics = {name: value if name in EXTREMES else value * per_token for name, value in sums.items()}
        metrics |= {
            "tokens.trained": tokens,
            "grad_norm": optax.tree.norm(gradients),
            "update_norm": optax.tree.norm(updates),
            "learning_rate": jnp.asarray(schedule(update_count(state.opt_state)), jnp.float32),
        }
        return jax.tree.map(lambda a, b: jnp.where(tokens > 0, a, b), new, state), metrics

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rows = {name: value for name, value in batch.items() if name != "micro_batches"}
        old, reference = jax.lax.map(lambda x: fixed_log_probs(state, *x), (rows, batch["micro_batches"]))
        rows |= {"old_logp": old, "reference_logp": reference}
        return jax.lax.scan(lambda s, x: update(s, *x), state, (rows, batch["micro_batches"]))

    return train_step


EXTREMES = {"ratio.max": jnp.maximum, "ratio.min": jnp.minimum, "mismatch.max": jnp.maximum}


def empty_metrics(shapes: Metrics) -> Metrics:
    """What `combine` leaves unchanged: 0 for sums, the opposite infinity for extremes."""
    start = {"ratio.max": -jnp.inf, "ratio.min": jnp.inf, "mismatch.max": -jnp.inf}
    return {name: jnp.full(shape.shape, start.get(name, 0.0), shape.dtype) for name, shape in shapes.items()}


def combine(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of two micro-batches together: sums add, extremes compare."""
    return {name: EXTREMES.get(name, jnp.add)(a[name], b[name]) for name in a}


def take(rows: Batch, m: jax.Array | int) -> Batch:
    """Micro-batch m of [M, B, S] arrays."""
    return {name: jax.lax.dynamic_index_in_dim(value, m, keepdims=False) for name, value in rows.items()}


def host_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """One number per metric for a step: token-weighted means over its updates, extremes over all, empty updates left out."""
    values = {name: jax.device_get(value).astype(float) for name, value in metrics.items()}
    tokens = values.pop("tokens.trained")
    used = tokens > 0
    if not used.any():
        return {"tokens.trained": 0.0, "updates": 0.0}
    result = {"tokens.trained": float(tokens.sum()), "updates": float(used.sum())}
    for name, value in values.items():
        if name in EXTREMES:
            result[name] = float(value[used].min() if name == "ratio.min" else value[used].max())
        elif name in ("grad_norm", "update_norm", "learning_rate"):
            result[name] = float(value[used].mean())
        else:
            result[name] = float((value * tokens).sum() / tokens.sum())
    return result
