"""The jitted halves of a training step: old and reference log-probs once per rollout batch, then K optimizer updates.

Sums and counts travel; each update divides once, by the denominator of its whole mini-batch, so the gradient does not depend
on how rows are split into micro-batches or devices. The formulas are in `algorithms`; docs/algorithms.md lists them.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from jaxprorl.algorithms import correction, kl, losses
from jaxprorl.models.logprobs import token_log_probs
from jaxprorl.models.qwen2 import Params
from jaxprorl.optimizer import learning_rate, make_optimizer
from jaxprorl.sharding.gradients import Accumulate, mesh_of_whole, reduced_once
from jaxprorl.state import TrainState

Batch = dict[str, jax.Array]
Fixed = dict[str, jax.Array]  # old_logp and reference_logp, [U, M, B, S]
Metrics = dict[str, jax.Array]

# Metrics over all tokens of an update, from the values themselves: name -> (per-token array, quantile).
QUANTILES = {
    "ratio.min": ("ratio", 0.0),
    "ratio.p01": ("ratio", 0.01),
    "ratio.p99": ("ratio", 0.99),
    "ratio.max": ("ratio", 1.0),
    "kl.k3_median": ("k3", 0.5),
    "mismatch.p99": ("mismatch", 0.99),
    "mismatch.max": ("mismatch", 1.0),
}


def batch_log_probs(graphdef: nnx.GraphDef, params: Params, rows: Batch, temperature: float) -> tuple[jax.Array, jax.Array]:
    """logp_BS and entropy_BS of the response tokens of packed rows under `params`; 0 elsewhere."""
    model = nnx.merge(graphdef, params)
    hidden_BSD = model(rows["tokens"], rows["positions"], rows["segment_ids"], rows.get("context_ids"))
    return token_log_probs(
        hidden_BSD, model.head(), rows["targets"], temperature, rows["mask"], model.compute.row_mesh, model.compute.table
    )


def on_own_rows(graphdef: nnx.GraphDef, params: Params) -> nnx.GraphDef:
    """The same model inside a shard_map over its mesh, where every device has whole parameters and rows of its own."""
    model: Any = nnx.merge(graphdef, params)
    model.compute = dataclasses.replace(model.compute, own_rows=True)
    return nnx.split(model)[0]


def computes_old(config: ConfigDict) -> bool:
    """Whether old log-probs need a pass of their own: not if they are the engine's, or those that the only update computes anyway."""
    return config.algorithm.old_logp == "trainer" and (config.batch.updates > 1 or config.algorithm.kl_placement == "reward")


def make_log_probs(graphdef: nnx.GraphDef, config: ConfigDict) -> Callable[[Params, Params, Batch], tuple[Fixed, jax.Array]]:
    """What stays fixed over the updates of one rollout batch, to be jitted: (policy, reference, batch) -> (fixed, kl_sum_PN).

    `fixed` holds `reference_logp` and, where `computes_old`, `old_logp`. kl_sum_PN is the sum of k1 over each sample's response tokens,
    for KL in the reward.
    """
    temperature = config.rollout.temperature

    def mini_batch(params: Params, reference: Params, rows: Batch, used: jax.Array) -> Fixed:
        """[M, B, S] arrays; unused micro-batches stay 0."""
        policies = {"reference_logp": reference} | ({"old_logp": params} if computes_old(config) else {})

        def body(m: jax.Array, fixed: Fixed) -> Fixed:
            micro = take(rows, m)
            return {
                name: fixed[name].at[m].set(batch_log_probs(graphdef, policy, micro, temperature)[0]) for name, policy in policies.items()
            }

        return jax.lax.fori_loop(0, used, body, {name: jnp.zeros_like(rows["mask"]) for name in policies})

    def log_probs(params: Params, reference: Params, batch: Batch) -> tuple[Fixed, jax.Array]:
        rows = rows_of(batch)
        fixed = jax.lax.map(lambda x: mini_batch(params, reference, *x), (rows, batch["micro_batches"]))
        k1 = kl.k1(fixed.get("old_logp", rows["engine_logp"]), fixed["reference_logp"])
        kl_sum_PN = jnp.zeros_like(batch["weight_PN"]).ravel().at[rows["sequence"]].add(jnp.where(rows["mask"] > 0, k1, 0.0))
        return fixed, kl_sum_PN.reshape(batch["weight_PN"].shape)

    return log_probs


def objective(
    graphdef: nnx.GraphDef, params: Params, rows: Batch, config: ConfigDict
) -> tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, jax.Array]]]:
    """Weighted sum over response tokens of the objective: corrected policy loss + beta * KL - entropy bonus.

    Args:
        rows: [B, S] arrays of one micro-batch, with `advantage`, `weight`, `reference_logp` and, where `computes_old`, `old_logp`.

    Returns:
        The sum; sums over tokens for the metrics, and per-token arrays for QUANTILES.
    """
    c = config.algorithm
    logp_BS, entropy_BS = batch_log_probs(graphdef, params, rows, config.rollout.temperature)
    mask_BS, segment_ids_BS, advantage_BS = rows["mask"], rows["segment_ids"], rows["advantage"]
    engine_logp_BS, reference_logp_BS = rows["engine_logp"], rows["reference_logp"]
    # With one update per batch the policy that the trainer started from is the one it differentiates: the ratio is exactly 1.
    trainer_logp_BS = rows.get("old_logp", jax.lax.stop_gradient(logp_BS))
    old_logp_BS = engine_logp_BS if c.old_logp == "engine" else trainer_logp_BS

    log_ratio_BS = losses.log_ratio(logp_BS, old_logp_BS)
    if c.policy_loss == "gspo":
        log_ratio_BS = losses.sequence_log_ratio(log_ratio_BS, segment_ids_BS, mask_BS)
    if c.policy_loss == "reinforce":
        policy_BS = losses.reinforce_loss(logp_BS, advantage_BS)
    else:
        policy_BS = losses.clipped_loss(log_ratio_BS, advantage_BS, c.clip_low, c.clip_high)
    correction_BS = correction.correction_weight(
        c.correction, old_logp_BS, engine_logp_BS, c.correction_low, c.correction_high, segment_ids_BS, mask_BS
    )
    policy_BS = correction_BS * policy_BS
    loss_BS = policy_BS - c.entropy_bonus * entropy_BS
    if c.kl_placement == "loss":
        loss_BS += c.kl_coefficient * kl.KL_ESTIMATORS[c.kl_estimator](logp_BS, reference_logp_BS)

    clips = c.policy_loss != "reinforce"
    ratio_BS, k3_BS = jnp.exp(log_ratio_BS), kl.k3(logp_BS, reference_logp_BS)
    mismatch = correction.mismatch(trainer_logp_BS, engine_logp_BS, mask_BS)
    per_token = {
        "loss.policy": rows["weight"] * policy_BS,
        "loss.total": rows["weight"] * loss_BS,
        "kl.k1": kl.k1(logp_BS, reference_logp_BS),
        "kl.k2": kl.k2(logp_BS, reference_logp_BS),
        "kl.k3": k3_BS,
        "entropy": entropy_BS,
        "clip.low_share": losses.clipped_low(ratio_BS, advantage_BS, c.clip_low) & clips,
        "clip.high_share": losses.clipped_high(ratio_BS, advantage_BS, c.clip_high) & clips,
        "mismatch.mean": mismatch["gap"],
        "mismatch.k3": mismatch["k3"],
        "importance.mean": mismatch["weight"],
        "importance.mean_square": mismatch["weight_squared"],
        "correction.mean": correction_BS,
        "correction.masked_share": correction_BS == 0,
    }
    sums = {name: jnp.sum(jnp.where(mask_BS > 0, value, 0.0)) for name, value in per_token.items()}
    return sums["loss.total"], (sums, {"ratio": ratio_BS, "k3": k3_BS, "mismatch": mismatch["gap"]})


def make_train_step(
    graphdef: nnx.GraphDef,
    config: ConfigDict,
    param_shardings: dict[str, NamedSharding] | None = None,
    gradient_shardings: dict[str, NamedSharding] | None = None,
) -> Callable[[TrainState, Batch, Fixed, jax.Array], tuple[TrainState, Metrics]]:
    """The K updates of one rollout batch, to be jitted with the state donated: (state, batch, fixed, advantage_PN) -> (state, metrics).

    The batch holds [U, M, B, S] arrays (U updates, M micro-batches of B rows) and `micro_batches` [U], how many of the M
    are in use; the rest costs nothing. An update without tokens, or with a gradient or a change that is not finite, changes nothing.
    Metrics come back per update, [U]. Shardings say where parameters are between updates and where gradients are summed up; None = where
    the compiler likes. Where every device holds whole parameters, it sums the gradients of its own rows over the micro-batches, and
    devices exchange them once per update; elsewhere, once per micro-batch.
    """
    optimizer = make_optimizer(config)
    mesh = mesh_of_whole(param_shardings) if gradient_shardings else None

    def accumulate(graphdef: nnx.GraphDef, params: Params, rows: Batch, used: jax.Array) -> tuple[Params, Metrics, Batch]:
        """Gradients and sums over the micro-batches in use, and per-token arrays [M, B, S]."""
        gradient_of = jax.grad(lambda params, micro: objective(graphdef, params, micro, config), has_aux=True)

        def body(m: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            gradients, sums, tokens = carry
            more, (more_sums, micro_tokens) = gradient_of(params, take(rows, m))
            if gradient_shardings and not mesh:
                more = jax.lax.with_sharding_constraint(more, gradient_shardings)
            tokens = {name: tokens[name].at[m].set(value) for name, value in micro_tokens.items()}
            return jax.tree.map(jnp.add, gradients, more), jax.tree.map(jnp.add, sums, more_sums), tokens

        shapes = jax.eval_shape(gradient_of, params, take(rows, 0))
        gradients, sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], shapes[1][0]))
        tokens = {name: jnp.zeros((rows["mask"].shape[0], *s.shape), s.dtype) for name, s in shapes[1][1].items()}
        return jax.lax.fori_loop(0, used, body, (gradients, sums, tokens))

    def update(state: TrainState, mini_batch: tuple[Batch, jax.Array, jax.Array]) -> tuple[TrainState, Metrics]:
        """One optimizer update from one mini-batch."""
        rows, used, denominator = mini_batch
        gradients_of: Accumulate = partial(accumulate, graphdef)
        if mesh and gradient_shardings:
            own = partial(accumulate, on_own_rows(graphdef, state.params))
            gradients_of = reduced_once(own, mesh, gradient_shardings, config.model.dtype)
        gradients, sums, tokens = gradients_of(state.params, rows, used)
        count = jnp.sum(rows["mask"])
        gradients = jax.tree.map(lambda g: g / jnp.maximum(denominator, 1.0).astype(g.dtype), gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if param_shardings:
            params = jax.lax.with_sharding_constraint(params, param_shardings)
        new = TrainState(params, state.reference, opt_state)
        grad_norm, update_norm = optax.tree.norm(gradients), optax.tree.norm(updates)
        sound = jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)  # a sound gradient overflows with too high a rate
        metrics = update_metrics(sums, tokens, rows["mask"], count, denominator) | {
            "grad_norm": grad_norm,
            "update_norm": update_norm,
            "learning_rate": learning_rate(state.opt_state, config),
            "updates.skipped": ((count > 0) & ~sound).astype(jnp.int32),
        }
        return jax.tree.map(lambda a, b: jnp.where((count > 0) & sound, a, b), new, state), metrics

    def train_step(state: TrainState, batch: Batch, fixed: Fixed, advantage_PN: jax.Array) -> tuple[TrainState, Metrics]:
        rows = rows_of(batch) | fixed
        rows |= {"advantage": advantage_PN.ravel()[rows["sequence"]], "weight": batch["weight_PN"].ravel()[rows["sequence"]]}
        return jax.lax.scan(update, state, (rows, batch["micro_batches"], batch["denominator"]))

    return train_step


def rows_of(batch: Batch) -> Batch:
    """The [U, M, B, S] arrays of a batch."""
    return {name: value for name, value in batch.items() if value.ndim == 4}


def take(rows: Batch, m: jax.Array | int) -> Batch:
    """Micro-batch m of [M, B, S] arrays."""
    return {name: jax.lax.dynamic_index_in_dim(value, m, keepdims=False) for name, value in rows.items()}


def update_metrics(
    sums: dict[str, jax.Array], tokens: dict[str, jax.Array], mask_MBS: jax.Array, count: jax.Array, denominator: jax.Array
) -> Metrics:
    """The metrics of one update: means over its tokens, losses as aggregated, quantiles."""
    per_token = 1.0 / jnp.maximum(count, 1.0)
    metrics = {
        name: value / jnp.maximum(denominator, 1.0) if name.startswith("loss.") else value * per_token for name, value in sums.items()
    }
    for name in dict.fromkeys(source for source, _ in QUANTILES.values()):
        ordered = jnp.sort(jnp.where(mask_MBS > 0, tokens[name], jnp.inf).ravel())
        for metric, (source, quantile) in QUANTILES.items():
            if source == name:
                metrics[metric] = ordered[jnp.round(quantile * jnp.maximum(count - 1.0, 0.0)).astype(jnp.int32)]
    return metrics | {"tokens.trained": count}


def host_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """One number per metric for a step, from its sound updates: token-weighted means, extremes over all, plain means of norms."""
    values = {name: jax.device_get(value).astype(float) for name, value in metrics.items()}
    tokens, skipped = values.pop("tokens.trained"), values.pop("updates.skipped") > 0
    used = (tokens > 0) & ~skipped
    result = {"updates": float(used.sum()), "updates.skipped": float(skipped.sum()), "tokens.trained": float(tokens[used].sum())}
    if not used.any():
        return result
    result["tokens.per_update"] = float(tokens[used].mean())
    for name, value in values.items():
        if name.endswith((".min", ".max")):
            result[name] = float(value[used].min() if name.endswith(".min") else value[used].max())
        elif name == "learning_rate":
            result[name] = float(value[used][-1])
        elif name in ("grad_norm", "update_norm", "loss.policy", "loss.total"):
            result[name] = float(value[used].mean())
        else:
            result[name] = float(np.average(value[used], weights=tokens[used]))
    # From the means over all tokens of the step: the sums' factors cancel.
    mean, mean_square = result.pop("importance.mean"), result.pop("importance.mean_square")
    result["mismatch.effective_share"] = correction.effective_sample_share(mean, mean_square, 1)
    return result


def skipped_in_a_row(before: int, metrics: dict[str, Any]) -> int:
    """How many updates in a row, up to the last one of this step, had a gradient that was not finite; `before` = up to its first."""
    for tokens, skipped in zip(jax.device_get(metrics["tokens.trained"]), jax.device_get(metrics["updates.skipped"]), strict=True):
        if tokens > 0:
            before = before + 1 if skipped else 0
    return before
