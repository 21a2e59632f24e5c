import dataclasses
import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from factories import QUICK_COMPILE, make_group, make_prompt, random_groups, random_params, tiny_config, tiny_model
from flax import nnx
from ml_collections import ConfigDict

from jaxprorl.algorithms.advantages import group_relative
from jaxprorl.batch import batch_shapes, host_batch
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import build
from jaxprorl.optimizer import make_optimizer
from jaxprorl.rollout.collect import rewards
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.state import TrainState, state_shardings
from jaxprorl.types import Group
from jaxprorl.update import host_metrics, make_train_step, objective_sums

MODEL = tiny_model(num_hidden_layers=1)  # compiling is what takes the time here
OBJECTIVE = {"algorithm__kl_coefficient": 0.1, "optimizer__learning_rate": 0.03}
# A large epsilon keeps Adam smooth: with the usual one its first step is the gradient's sign, which rounding decides where it is zero.
SMOOTH = {"optimizer__eps": 1e-2, "optimizer__clip_norm": 0.5}


def train(
    config: ConfigDict, groups: list[Group] | None = None, dtype: str = "float64", devices: int = 1, edit: Any = None
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """One training step from the start state, on groups of `factories`: new state and metrics per update, as numpy arrays."""
    groups = random_groups(config.batch.prompts) if groups is None else groups
    batch = host_batch(config, groups, advantages(groups))
    if edit:
        edit(batch)
    batch = {name: value.astype(dtype) if value.dtype == np.float32 else value for name, value in batch.items()}
    with jax.enable_x64(dtype == "float64"):
        mesh = make_mesh("dp", jax.devices()[:devices])
        state = jax.device_put(start_state(config, dtype), state_shardings(config, MODEL, mesh))
        batch = jax.device_put(batch, {name: shape.sharding for name, shape in batch_shapes(config, mesh).items()})
        state, metrics = compiled_step(config.to_json(), dtype)(state, batch)
        return jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, metrics)


def advantages(groups: list[Group]) -> np.ndarray:
    return group_relative(*rewards(groups)) if groups else np.zeros((0, 4), np.float32)


def start_state(config: ConfigDict, dtype: str) -> TrainState:
    """The reference is not the policy, so that the divergence counts from the first update on."""
    params, reference = (jax.tree.map(jnp.asarray, random_params(MODEL, 0, dtype)) for _ in range(2))
    reference["o_kernel"] = reference["o_kernel"] * 0.9
    return TrainState(params, reference, make_optimizer(config).init(params))


@cache
def compiled_step(config_json: str, dtype: str) -> Any:
    step = make_train_step(build(MODEL, Compute(dtype)), ConfigDict(json.loads(config_json)))
    return jax.jit(step, compiler_options=QUICK_COMPILE)


def difference(a: Any, b: Any) -> float:
    """Largest absolute difference of two trees."""
    return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# --- against an implementation that packs nothing and vectorises nothing ---------------------------------------------------------------


def plain_log_probs(params: Any, prompt: jax.Array, response: jax.Array, temperature: float) -> jax.Array:
    """Log-probs of a response, from the plain formula on one unpadded sequence."""
    ids = jnp.concatenate([prompt, response])[None]
    model: Any = nnx.merge(build(MODEL, Compute("float64")), params)
    logits_SV = (model(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)) @ model.head().T)[0] / temperature
    logp_SV = jnp.log(jnp.exp(logits_SV) / jnp.exp(logits_SV).sum(axis=1, keepdims=True))
    return jnp.stack([logp_SV[len(prompt) - 1 + t, token] for t, token in enumerate(response)])


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def plain_sample(
    config_json: str, params: Any, prompt: jax.Array, response: jax.Array, old_T: jax.Array, reference_T: jax.Array, advantage: jax.Array
) -> tuple[jax.Array, Any]:
    """Sum of the loss over a response, and its gradient."""
    config = ConfigDict(json.loads(config_json))
    low, high, beta = config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.kl_coefficient

    def loss(params: Any) -> jax.Array:
        logp_T = plain_log_probs(params, prompt, response, config.rollout.temperature)
        total = 0.0
        for t in range(len(response)):
            ratio, x = jnp.exp(logp_T[t] - old_T[t]), reference_T[t] - logp_T[t]
            bounded = jnp.minimum(jnp.maximum(ratio, 1 - low), 1 + high)
            total += -jnp.minimum(ratio * advantage, bounded * advantage) + beta * (jnp.exp(x) - 1 - x)
        return total

    return jax.value_and_grad(loss)(params)


def plain_step(config: ConfigDict, groups: list[Group]) -> tuple[Any, list[float], list[float]]:
    """Parameters after one training step, loss and gradient norm of each update; loops over updates, samples and tokens."""
    start = start_state(config, "float64")
    log_probs: Callable[..., jax.Array] = partial(
        jax.jit(plain_log_probs, compiler_options=QUICK_COMPILE), temperature=config.rollout.temperature
    )
    samples = [
        (p, jnp.asarray(group.prompt.token_ids), jnp.asarray(completion.token_ids), advantage)
        for p, (group, advantage_N) in enumerate(zip(groups, advantages(groups).astype(np.float64), strict=True))
        for completion, advantage in zip(group.completions, advantage_N, strict=True)
    ]
    # Old log-probs are those of the policy before the first update, for all updates.
    old = [log_probs(start.params, prompt, response) for _, prompt, response, _ in samples]
    reference = [log_probs(start.reference, prompt, response) for _, prompt, response, _ in samples]
    params, opt_state, optimizer = start.params, start.opt_state, make_optimizer(config)
    losses, norms = [], []
    for mini_batch in np.array_split(np.arange(len(groups)), config.batch.updates):
        total, tokens, gradient = 0.0, 0, jax.tree.map(jnp.zeros_like, params)
        for i, (p, prompt, response, advantage) in enumerate(samples):
            if p in mini_batch:
                loss, part = plain_sample(config.to_json(), params, prompt, response, old[i], reference[i], jnp.asarray(advantage))
                total, tokens, gradient = total + loss, tokens + len(response), jax.tree.map(jnp.add, gradient, part)
        gradient = jax.tree.map(lambda g, tokens=tokens: g / tokens, gradient)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(total / tokens))
        norms.append(float(optax.tree.norm(gradient)))
    return jax.tree.map(np.asarray, params), losses, norms


def few_lengths(count: int) -> list[Group]:
    """Groups with prompts of 2 or 5 tokens and responses of 1 or 4, so that the plain implementation compiles four times only."""
    random = np.random.RandomState(4)
    groups = []
    for i in range(count):
        prompt = make_prompt(i, random.randint(1, 48, 2 + 3 * (i % 2)))
        groups.append(make_group(prompt, [random.randint(1, 48, size) for size in (4, 1, 4, 1)], list(random.uniform(size=4))))
    return groups


@pytest.mark.slow
def test_a_step_equals_loops_over_unpacked_samples() -> None:
    config = tiny_config(**SMOOTH, **OBJECTIVE)
    groups = few_lengths(4)
    with jax.enable_x64(True):
        params, losses, norms = plain_step(config, groups)
    state, metrics = train(config, groups)
    assert difference(params, random_params(MODEL)) > 1e-2
    assert difference(state.params, params) < 1e-10
    np.testing.assert_allclose(metrics["grad_norm"], norms, rtol=1e-9)
    np.testing.assert_allclose(metrics["loss.policy"] + 0.1 * metrics["kl.k3"], losses, rtol=1e-9)
    assert metrics["clip.low_share"][1] > 0 or metrics["clip.high_share"][1] > 0  # the second update did reach the bounds


# --- properties -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parameters_do_not_depend_on_micro_batches_or_devices() -> None:
    expected = None
    for rows, devices in ((4, 1), (2, 1), (8, 1), (2, 2), (8, 2)):
        state, metrics = train(tiny_config(**SMOOTH, **OBJECTIVE, batch__micro_batch_rows=rows), devices=devices)
        if expected is None:
            expected = state, metrics
            assert difference(state.params, random_params(MODEL)) > 1e-3
        assert difference(state, expected[0]) < 1e-12, (rows, devices)
        for name, values in metrics.items():
            np.testing.assert_allclose(values, expected[1][name], rtol=1e-9, atol=1e-12, err_msg=f"{name} {rows} {devices}")


def test_the_first_update_is_on_policy_and_later_ones_are_not() -> None:
    _, metrics = train(tiny_config())
    np.testing.assert_allclose([metrics["ratio.min"][0], metrics["ratio.max"][0]], 1, rtol=0, atol=1e-12)
    assert metrics["clip.low_share"][0] == metrics["clip.high_share"][0] == 0
    # Ratio 1 everywhere: the loss is minus the mean advantage per token.
    batch = host_batch(tiny_config(), random_groups(4), advantages(random_groups(4)))
    expected = -batch["advantage"][0].sum() / batch["mask"][0].sum()
    assert metrics["loss.policy"][0] == pytest.approx(expected, rel=1e-6)
    assert metrics["ratio.min"][1] < 1 < metrics["ratio.max"][1]


def test_updates_without_tokens_change_nothing() -> None:
    config = tiny_config()
    state, metrics = train(config, groups=[])
    with jax.enable_x64(True):
        start = jax.tree.map(np.asarray, start_state(config, "float64"))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(metrics["tokens.trained"], [0, 0])
    assert host_metrics(metrics) == {"tokens.trained": 0.0, "updates": 0.0}
    # One group fills the first of two updates; the second one leaves its result alone, the optimizer's count included.
    state, metrics = train(config, groups=random_groups(1))
    (_, count), *_ = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")
    assert count == 1
    assert metrics["tokens.trained"][0] > 0 == metrics["tokens.trained"][1]
    shown = host_metrics(metrics)
    assert shown["updates"] == 1
    assert all(np.isfinite(value) for value in shown.values())


def test_unused_micro_batches_and_padding_have_no_influence() -> None:
    config = tiny_config()

    def garbage(batch: dict[str, np.ndarray]) -> None:
        assert (batch["micro_batches"] < batch["tokens"].shape[1]).any()
        unused = np.arange(batch["tokens"].shape[1])[None] >= batch["micro_batches"][:, None]
        for name in ("tokens", "targets", "positions"):
            batch[name][unused] = 7
            batch[name][batch["segment_ids"] == 0] = 7
        for name in ("advantage", "engine_logp"):
            batch[name][batch["mask"] == 0] = 1e6

    (state, metrics), (other, other_metrics) = train(config), train(config, edit=garbage)
    assert difference(state, other) == 0
    assert difference(metrics, other_metrics) == 0


@pytest.mark.slow
def test_the_divergence_term_pulls_towards_the_reference() -> None:
    # Groups whose advantages are all zero leave nothing but the divergence: without a coefficient no step, with one a smaller divergence.
    group = random_groups(1)[0]
    groups = [dataclasses.replace(group, scores=(group.scores[0],) * 4)] * 4
    still, metrics = train(tiny_config(algorithm__kl_coefficient=0.0), groups)
    assert difference(still.params, random_params(MODEL)) == 0
    assert metrics["kl.k3"][0] == metrics["kl.k3"][1] > 1e-4
    assert metrics["kl.k2"][0] == metrics["kl.k2"][1] > 1e-4
    moved, metrics = train(tiny_config(**SMOOTH, algorithm__kl_coefficient=1.0, optimizer__learning_rate=1e-4), groups)
    assert metrics["kl.k3"][1] < metrics["kl.k3"][0]
    np.testing.assert_array_equal(moved.reference["o_kernel"], (random_params(MODEL, 0, "float64")["o_kernel"] * 0.9))


def test_the_engines_log_probs_are_reported_against_and_never_trained_on() -> None:
    config = tiny_config()

    def shifted(batch: dict[str, np.ndarray]) -> None:
        batch["engine_logp"] += batch["mask"] * 0.25

    (state, metrics), (other, other_metrics) = train(config), train(config, edit=shifted)
    assert difference(state, other) == 0
    assert (metrics["mismatch.mean"] > 0.3).all()  # the groups of `factories` make their log-probs up
    assert (np.abs(other_metrics["mismatch.mean"] - metrics["mismatch.mean"]) > 0.01).all()


def test_metrics_by_hand() -> None:
    two = {
        "tokens.trained": np.array([30.0, 10.0, 0.0]),
        "entropy": np.array([1.0, 2.0, 0.0]),
        "ratio.max": np.array([1.0, 1.5, -np.inf]),
        "ratio.min": np.array([1.0, 0.5, np.inf]),
        "grad_norm": np.array([1.0, 3.0, 0.0]),
    }
    # Entropy by tokens: (30 x 1 + 10 x 2) / 40 = 1.25; norms by updates: (1 + 3) / 2.
    expected = {"tokens.trained": 40.0, "updates": 2.0, "entropy": 1.25, "ratio.max": 1.5, "ratio.min": 0.5, "grad_norm": 2.0}
    assert host_metrics(two) == expected


def test_gradients_are_finite_where_policies_have_nothing_in_common() -> None:
    config = tiny_config()
    rows = {
        name: jnp.asarray(value[0, 0]) for name, value in host_batch(config, random_groups(4), np.ones((4, 4))).items() if value.ndim > 1
    }
    gradient_of = jax.grad(lambda params, rows: objective_sums(build(MODEL, Compute()), params, rows, config)[0])
    gradient_of = jax.jit(gradient_of, compiler_options=QUICK_COMPILE)
    for old, reference in ((0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4)):
        full = rows | {"old_logp": jnp.full(rows["mask"].shape, old), "reference_logp": jnp.full(rows["mask"].shape, reference)}
        assert all(np.isfinite(leaf).all() for leaf in gradient_of(random_params(MODEL), full).values())


# --- golden numbers -------------------------------------------------------------------------------------------------------------------


def test_golden_numbers_of_one_step() -> None:
    """The numbers of a step in float32, as they were when the tests above last passed.

    It is right to update them after a deliberate change of the objective, the optimizer, the packing order or the inputs in `factories`;
    the commit then says which, and by how much a number moved. A refactoring, a new JAX or another machine must leave them as they are.
    """
    state, metrics = train(tiny_config(**SMOOTH, algorithm__kl_coefficient=0.01), dtype="float32")
    checksum = sum(np.sum(np.abs(leaf.astype(np.float64))) for leaf in jax.tree.leaves(state.params))
    got = {name: metrics[name].tolist() for name in ("loss.policy", "grad_norm", "update_norm", "kl.k3", "entropy")} | {
        "checksum": checksum
    }
    for name, value in GOLDEN.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


GOLDEN = {
    "loss.policy": [0.2392662316, -0.2332941741],
    "grad_norm": [4.914065361, 4.163727283],
    "update_norm": [0.2276688963, 0.1775166690],
    "kl.k3": [0.001644916367, 0.01166010275],
    "entropy": [3.072036982, 2.959085226],
    "checksum": 2650.567074,
}
