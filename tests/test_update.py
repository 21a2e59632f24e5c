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
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.algorithms.advantages import group_relative
from jaxprorl.batch import batch_advantages, batch_shapes, host_batch
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import build
from jaxprorl.optimizer import make_optimizer
from jaxprorl.rollout.groups import graded
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.state import TrainState, state_shardings
from jaxprorl.types import Group
from jaxprorl.update import computes_old, host_metrics, make_log_probs, make_train_step, objective, skipped_in_a_row

MODEL = tiny_model(num_hidden_layers=1)  # compiling is what takes the time here
OBJECTIVE = {"algorithm__kl_coefficient": 0.1, "optimizer__learning_rate": 0.03}
# A large epsilon keeps Adam smooth: with the usual one its first step is the gradient's sign, which rounding decides where it is zero.
SMOOTH = {"optimizer__eps": 1e-2, "optimizer__clip_norm": 0.5}


def train(
    config: ConfigDict,
    groups: list[Group] | None = None,
    dtype: str = "float64",
    devices: int = 1,
    edit: Any = None,
    start: Any = None,
    shared: bool = False,
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """One training step from the start state, on groups of `factories`: new state and metrics per update, as numpy arrays."""
    groups = random_groups(config.batch.prompts) if groups is None else groups
    batch = host_batch(config, groups, shared)
    if edit:
        edit(batch)
    batch = {name: value.astype(dtype) if value.dtype == np.float32 else value for name, value in batch.items()}
    with jax.enable_x64(dtype == "float64"):
        mesh = make_mesh("dp", jax.devices()[:devices])
        state = jax.device_put(start or start_state(config, dtype), state_shardings(config, MODEL, mesh))
        batch = jax.device_put(batch, {name: shape.sharding for name, shape in batch_shapes(config, mesh, shared).items()})
        log_probs, step = compiled_step(config.to_json(), dtype, mesh)
        fixed, kl_sum_PN = log_probs(state.params, state.reference, batch)
        state, metrics = step(state, batch, fixed, batch_advantages(config, groups, 0, kl_sum_PN).astype(dtype))
        return jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, metrics)


def advantages(groups: list[Group]) -> np.ndarray:
    return group_relative(*graded(groups)) if groups else np.zeros((0, 4), np.float32)


def start_state(config: ConfigDict, dtype: str) -> TrainState:
    """The reference is not the policy, so that the divergence counts from the first update on."""
    params, reference = (jax.tree.map(jnp.asarray, random_params(MODEL, 0, dtype)) for _ in range(2))
    reference["o_kernel"] = reference["o_kernel"] * 0.9
    return TrainState(params, reference, make_optimizer(config).init(params))


@cache
def compiled_step(config_json: str, dtype: str, mesh: Mesh) -> tuple[Any, Any]:
    graphdef, config = build(MODEL, Compute(dtype, mesh=mesh)), ConfigDict(json.loads(config_json))
    return tuple(
        jax.jit(function, compiler_options=QUICK_COMPILE)
        for function in (make_log_probs(graphdef, config), make_train_step(graphdef, config))
    )


def difference(a: Any, b: Any) -> float:
    """Largest absolute difference of two trees."""
    return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# --- against an implementation that packs nothing and vectorises nothing ---------------------------------------------------------------


def plain_log_probs(params: Any, prompt: jax.Array, response: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    """Log-probs of a response and entropies, from the plain formulas on one unpadded sequence."""
    ids = jnp.concatenate([prompt, response])[None]
    model: Any = nnx.merge(build(MODEL, Compute("float64")), params)
    logits_SV = (model(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)) @ model.head().T)[0] / temperature
    p_SV = jnp.exp(logits_SV) / jnp.exp(logits_SV).sum(axis=1, keepdims=True)
    places = range(len(prompt) - 1, ids.shape[1] - 1)
    logp_T = jnp.stack([jnp.log(p_SV[place, token]) for place, token in zip(places, response, strict=True)])
    return logp_T, jnp.stack([-(p_SV[place] * jnp.log(p_SV[place])).sum() for place in places])


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def plain_sample(
    config_json: str,
    params: Any,
    prompt: jax.Array,
    response: jax.Array,
    old_T: jax.Array,
    reference_T: jax.Array,
    engine_T: jax.Array,
    advantage: jax.Array,
) -> tuple[jax.Array, Any]:
    """Sum of the loss over a response, before aggregation, and its gradient; every arm of the config, token by token."""
    config = ConfigDict(json.loads(config_json))
    c, size = config.algorithm, len(response)
    low, high = c.correction_low, c.correction_high
    sampled_T = engine_T if c.old_logp == "engine" else old_T
    mean_delta = sum(sampled_T[t] - engine_T[t] for t in range(size)) / size

    def loss(params: Any) -> jax.Array:
        logp_T, entropy_T = plain_log_probs(params, prompt, response, config.rollout.temperature)
        mean_ratio = jnp.exp(sum(logp_T[t] - sampled_T[t] for t in range(size)) / size)
        total = 0.0
        for t in range(size):
            ratio = mean_ratio if c.policy_loss == "gspo" else jnp.exp(logp_T[t] - sampled_T[t])
            bounded = jnp.minimum(jnp.maximum(ratio, 1 - c.clip_low), 1 + c.clip_high)
            policy = -jnp.minimum(ratio * advantage, bounded * advantage)
            if c.policy_loss == "reinforce":
                policy = -advantage * (1 + logp_T[t] - jax.lax.stop_gradient(logp_T[t]))
            r = jnp.exp(sampled_T[t] - engine_T[t])
            weight = {
                "off": 1.0,
                "truncated": jnp.minimum(r, high),
                "icepop": jnp.where((r < low) | (r > high), 0.0, r),
                "geometric_mask": jnp.where((jnp.exp(mean_delta) < low) | (jnp.exp(mean_delta) > high), 0.0, r),
            }[c.correction]
            x = logp_T[t] - reference_T[t]
            fixed = jax.lax.stop_gradient(x)
            kl = {"k1": x, "k2": x**2 / 2, "k3": jnp.exp(-x) - 1 + x, "k1_gradient": fixed + fixed * (x - fixed)}[c.kl_estimator]
            total += weight * policy - c.entropy_bonus * entropy_T[t]
            if c.kl_placement == "loss":
                total += c.kl_coefficient * kl
        return total

    return jax.value_and_grad(loss)(params)


def plain_step(config: ConfigDict, groups: list[Group]) -> tuple[Any, list[float], list[float]]:
    """Parameters after one training step, loss and gradient norm of each update; loops over updates, samples and tokens."""
    start, c = start_state(config, "float64"), config.algorithm
    log_probs: Callable[..., Any] = partial(
        jax.jit(plain_log_probs, compiler_options=QUICK_COMPILE), temperature=config.rollout.temperature
    )
    # Old log-probs are those of the policy before the first update, for all updates.
    samples = [
        (p, n, *map(jnp.asarray, (group.prompt.token_ids, completion.token_ids, completion.logprobs.astype(float))))
        for p, group in enumerate(groups)
        for n, completion in enumerate(group.completions)
    ]
    old = {(p, n): log_probs(start.params, prompt, response)[0] for p, n, prompt, response, _ in samples}
    reference = {(p, n): log_probs(start.reference, prompt, response)[0] for p, n, prompt, response, _ in samples}
    reward_PN, mask_PN = graded(groups)
    if c.kl_placement == "reward":
        for p, n, _, _, engine_T in samples:
            behaviour_T = engine_T if c.old_logp == "engine" else old[p, n]
            reward_PN[p, n] -= c.kl_coefficient * float(sum(behaviour_T[t] - reference[p, n][t] for t in range(len(behaviour_T))))
    advantage_PN = group_relative(reward_PN, mask_PN).astype(np.float64)
    params, opt_state, optimizer = start.params, start.opt_state, make_optimizer(config)
    losses, norms = [], []
    for mini_batch in np.array_split(np.arange(len(groups)), config.batch.updates):
        total, denominator, gradient = 0.0, 0.0, jax.tree.map(jnp.zeros_like, params)
        for p, n, prompt, response, engine_T in samples:
            if p in mini_batch:
                known = old[p, n], reference[p, n], engine_T, jnp.asarray(advantage_PN[p, n])
                loss, part = plain_sample(config.to_json(), params, prompt, response, *known)
                size, limit = len(response), config.rollout.max_response_tokens
                weight = 1 / size if c.aggregation == "sequence_mean" else 1.0
                denominator += {"token_mean": size, "sequence_mean": 1, "dr_grpo": limit}[c.aggregation]
                total += weight * loss
                gradient = jax.tree.map(lambda g, x, weight=weight: g + weight * x, gradient, part)
        gradient = jax.tree.map(lambda g, denominator=denominator: g / denominator, gradient)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(total / denominator))
        norms.append(float(optax.tree.norm(gradient)))
    return jax.tree.map(np.asarray, params), losses, norms


def few_lengths(count: int) -> list[Group]:
    """Groups with prompts of 3 tokens and responses of 2 or 5, so that the plain implementation compiles twice only."""
    random = np.random.RandomState(4)
    groups = []
    for i in range(count):
        responses = [random.randint(1, 48, size) for size in (5, 2, 5, 2)]
        logprobs = [-3.9 + 0.6 * random.standard_normal(len(ids)) for ids in responses]
        groups.append(make_group(make_prompt(i, random.randint(1, 48, 3)), responses, list(random.uniform(size=4)), logprobs))
    return groups


# Together they hold every value of every choice of the objective that the device computes.
ARMS = {
    "prorl_v1": {},
    "k2_icepop_sequence_mean": {
        "kl_estimator": "k2", "correction": "icepop", "aggregation": "sequence_mean", "clip_low": 0.05, "clip_high": 0.08,
    },
    "gspo_k1_gradient_geometric": {
        "policy_loss": "gspo", "kl_estimator": "k1_gradient", "correction": "geometric_mask", "correction_low": 0.2, "correction_high": 8.0,
        "clip_low": 1e-4, "clip_high": 1e-4,  # means over an answer move little
    },
    "reinforce_k1_truncated_dr_grpo": {
        "policy_loss": "reinforce", "kl_estimator": "k1", "correction": "truncated", "correction_high": 1.2, "aggregation": "dr_grpo",
    },
    "old_of_engine_kl_in_reward_entropy": {"old_logp": "engine", "kl_placement": "reward", "entropy_bonus": 0.05},
    "kl_in_reward": {"kl_placement": "reward", "kl_coefficient": 0.3},
}  # fmt: skip


def arm(name: str, **changes: Any) -> ConfigDict:
    return tiny_config(**SMOOTH, **OBJECTIVE | {f"algorithm__{field}": value for field, value in ARMS[name].items()} | changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARMS)
def test_a_step_equals_loops_over_unpacked_samples(name: str) -> None:
    config, groups = arm(name), few_lengths(2)
    with jax.enable_x64(True):
        params, losses, norms = plain_step(config, groups)
    state, metrics = train(config, groups)
    assert difference(params, random_params(MODEL)) > 1e-2
    # Advantages and engine log-probs are float32 numbers on both sides; the packed batch rounds its weights to float32 too.
    tolerance = 1e-6 if config.algorithm.aggregation == "sequence_mean" else 1e-10
    assert difference(state.params, params) < tolerance
    np.testing.assert_allclose(metrics["grad_norm"], norms, rtol=tolerance * 10)
    np.testing.assert_allclose(metrics["loss.total"], losses, rtol=tolerance * 10, atol=tolerance)
    clipped = metrics["clip.low_share"].sum() + metrics["clip.high_share"].sum()
    assert (clipped > 0) == (config.algorithm.policy_loss != "reinforce")  # some tokens did reach the bounds; reinforce has none
    if config.algorithm.correction in ("icepop", "geometric_mask"):
        assert 0 < metrics["correction.masked_share"].mean() < 1


# --- properties -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prorl_v1", "gspo_k1_gradient_geometric", "k2_icepop_sequence_mean"])
def test_parameters_do_not_depend_on_micro_batches_or_devices(name: str) -> None:
    expected = None
    splits = ((4, 1), (2, 1), (8, 1), (2, 2), (8, 2)) if name == "prorl_v1" else ((4, 1), (2, 2))
    for rows, devices in splits:
        state, metrics = train(arm(name, batch__micro_batch_rows=rows), devices=devices)
        if expected is None:
            expected = state, metrics
            assert difference(state.params, random_params(MODEL)) > 1e-3
        assert difference(state, expected[0]) < 1e-12, (rows, devices)
        for metric, values in metrics.items():
            np.testing.assert_allclose(values, expected[1][metric], rtol=1e-9, atol=1e-12, err_msg=f"{metric} {rows} {devices}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("prorl_v1", 2), ("gspo_k1_gradient_geometric", 1)])
def test_a_prompt_that_samples_share_changes_nothing(name: str, devices: int) -> None:
    state, metrics = train(arm(name), devices=devices)
    shared, shared_metrics = train(arm(name), devices=devices, shared=True)
    assert difference(state.params, random_params(MODEL)) > 1e-3
    assert difference(shared, state) < 1e-12
    for key, value in metrics.items():
        np.testing.assert_allclose(shared_metrics[key], value, rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_divergence_from_a_reference_of_the_same_weights_is_exactly_0(devices: int, dtype: str) -> None:
    """The pass with gradients multiplies and rounds like the one without, though one is written for a device and the other for all."""
    config = tiny_config(batch__updates=1, batch__row_tokens=192, rollout__max_prompt_tokens=64, rollout__max_response_tokens=64)
    model = tiny_model(num_hidden_layers=2, hidden_size=128, intermediate_size=256, head_dim=32)
    random = np.random.RandomState(0)
    groups = []
    for prompt_id in range(4):
        responses = [random.randint(1, 48, size=size) for size in (64, 50, 64, 64)]
        groups.append(make_group(make_prompt(prompt_id, random.randint(1, 48, size=64)), responses, list(random.uniform(size=4))))
    mesh = make_mesh("dp", jax.devices()[:devices])
    params = jax.tree.map(jnp.asarray, random_params(model, 0, "float32"))
    state = TrainState(params, params, make_optimizer(config).init(params))
    state = jax.device_put(state, state_shardings(config, model, mesh))
    graphdef = build(model, Compute(dtype, mesh=mesh, shared_prompts=True))
    shardings = {name: shape.sharding for name, shape in batch_shapes(config, mesh, True).items()}
    batch = jax.device_put(host_batch(config, groups, True), shardings)
    fixed, kl_sum_PN = jax.jit(make_log_probs(graphdef, config))(state.params, state.reference, batch)
    advantage_PN = batch_advantages(config, groups, 0, kl_sum_PN)
    _, metrics = jax.jit(make_train_step(graphdef, config))(state, batch, fixed, advantage_PN)
    assert metrics["grad_norm"] > 0
    assert [float(metrics[name][0]) for name in ("kl.k1", "kl.k2", "kl.k3", "kl.k3_median")] == [0, 0, 0, 0]


@pytest.mark.slow
def test_the_order_of_samples_is_of_no_consequence() -> None:
    config = arm("gspo_k1_gradient_geometric", batch__updates=1)
    groups = random_groups(4)
    shuffled = [
        dataclasses.replace(group, completions=group.completions[::-1], scores=group.scores[::-1])
        for group in (groups[i] for i in (2, 0, 3, 1))
    ]
    (state, metrics), (other, other_metrics) = train(config, groups), train(config, shuffled)
    assert difference(state.params, random_params(MODEL)) > 1e-3
    assert difference(state, other) < 1e-12
    for metric, values in metrics.items():
        np.testing.assert_allclose(other_metrics[metric], values, rtol=1e-9, atol=1e-12, err_msg=metric)


@pytest.mark.slow
def test_with_one_update_the_ratio_is_exactly_1_and_no_pass_is_spent_on_old_log_probs() -> None:
    config = tiny_config(batch__updates=1)
    assert not computes_old(config)
    _, metrics = train(config)
    assert metrics["ratio.min"] == metrics["ratio.max"] == 1
    # The same parameters as with a pass of its own, up to rounding: KL in the reward asks for one, and with beta = 0 it changes nothing.
    with_pass = tiny_config(batch__updates=1, algorithm__kl_placement="reward", algorithm__kl_coefficient=0.0)
    without_kl = tiny_config(batch__updates=1, algorithm__kl_coefficient=0.0)
    assert computes_old(with_pass)
    assert difference(train(without_kl)[0].params, train(with_pass)[0].params) < 1e-12


@pytest.mark.slow
def test_an_update_whose_gradient_is_not_finite_is_skipped_and_counted() -> None:
    config = tiny_config()
    start = start_state(config, "float32")
    start.params["up_kernel"] = start.params["up_kernel"].at[0, 0, 0].set(jnp.inf)
    state, metrics = train(config, dtype="float32", start=start)
    np.testing.assert_array_equal(metrics["updates.skipped"], [1, 1])
    assert (metrics["tokens.trained"] > 0).all()
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(before, after)  # the optimizer's moments and count included
    shown = host_metrics(metrics)
    assert shown == {"updates": 0.0, "updates.skipped": 2.0, "tokens.trained": 0.0}


@pytest.mark.slow
def test_an_update_that_overflows_is_skipped_and_counted_though_its_gradient_is_finite() -> None:
    config = tiny_config(optimizer__learning_rate=1e38)
    state, metrics = train(config, dtype="float32")
    assert np.isfinite(metrics["grad_norm"]).all()
    np.testing.assert_array_equal(metrics["updates.skipped"], [1, 1])
    assert difference(state, start_state(config, "float32")) == 0


def test_skipped_updates_are_counted_in_a_row_over_steps_and_empty_updates() -> None:
    def step(tokens: list[float], skipped: list[int]) -> dict[str, np.ndarray]:
        return {"tokens.trained": np.array(tokens), "updates.skipped": np.array(skipped)}

    assert skipped_in_a_row(0, step([5, 5], [0, 0])) == 0
    assert skipped_in_a_row(3, step([5, 5], [1, 1])) == 5
    assert skipped_in_a_row(3, step([5, 5, 5], [1, 0, 1])) == 1
    assert skipped_in_a_row(3, step([5, 0], [1, 0])) == 4
    assert skipped_in_a_row(3, step([0, 0], [0, 0])) == 3


def test_the_first_update_is_on_policy_and_later_ones_are_not() -> None:
    _, metrics = train(tiny_config())
    np.testing.assert_allclose([metrics["ratio.min"][0], metrics["ratio.max"][0]], 1, rtol=0, atol=1e-12)
    assert metrics["clip.low_share"][0] == metrics["clip.high_share"][0] == 0
    # Ratio 1 everywhere: the loss is minus the mean advantage per token.
    batch = host_batch(tiny_config(), random_groups(4), shared=True)
    advantage_BS = advantages(random_groups(4)).ravel()[batch["sequence"][0]] * batch["mask"][0]
    expected = -advantage_BS.sum() / batch["mask"][0].sum()
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
    assert host_metrics(metrics) == {"tokens.trained": 0.0, "updates": 0.0, "updates.skipped": 0.0}
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
        batch["engine_logp"][batch["mask"] == 0] = 1e6
        batch["sequence"][batch["mask"] == 0] = 5

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


@pytest.mark.slow
def test_the_mismatch_is_between_engine_and_trainer_whatever_the_ratio_starts_from() -> None:
    (_, trainers), (_, engines) = (train(tiny_config(algorithm__old_logp=choice)) for choice in ("trainer", "engine"))
    for name in ("mismatch.mean", "mismatch.p99", "mismatch.max", "mismatch.k3", "importance.mean", "importance.mean_square"):
        assert engines[name][0] == pytest.approx(trainers[name][0], rel=1e-9), name  # the policy of the first update is the old one
    assert engines["mismatch.mean"][0] > 0.3


def test_metrics_by_hand() -> None:
    two = {
        "tokens.trained": np.array([30.0, 10.0, 0.0]),
        "entropy": np.array([1.0, 2.0, 0.0]),
        "ratio.max": np.array([1.0, 1.5, -np.inf]),
        "ratio.min": np.array([1.0, 0.5, np.inf]),
        "grad_norm": np.array([1.0, 3.0, 0.0]),
        "learning_rate": np.array([1e-3, 2e-3, 3e-3]),
        "loss.total": np.array([0.5, 1.5, 0.0]),
        "updates.skipped": np.zeros(3, bool),
        "importance.mean": np.array([1.0, 2.0, 0.0]),
        "importance.mean_square": np.array([1.5, 5.5, 0.0]),
    }
    # Entropy by tokens: (30 x 1 + 10 x 2) / 40 = 1.25; norms and losses by updates: (1 + 3) / 2. The
    # rate is the last one that was applied. Of the 40 tokens' weights the sum is 30 x 1 + 10 x 2
    # = 50 and the sum of squares 30 x 1.5 + 10 x 5.5 = 100: 50^2 / (40 x 100) = 0.625 of them are in effect.
    expected = {"tokens.trained": 40.0, "tokens.per_update": 20.0, "updates": 2.0, "updates.skipped": 0.0, "entropy": 1.25}
    expected |= {"ratio.max": 1.5, "ratio.min": 0.5, "grad_norm": 2.0, "mismatch.effective_share": 0.625}
    expected |= {"learning_rate": 2e-3, "loss.total": 1.0}
    assert host_metrics(two) == expected
    # A skipped update leaves no trace in the others' means.
    skipped = {name: np.array([np.nan, *value]) for name, value in two.items()} | {
        "tokens.trained": np.array([50.0, 30.0, 10.0, 0.0]),
        "updates.skipped": np.array([True, False, False, False]),
    }
    assert host_metrics(skipped) == expected | {"updates.skipped": 1.0}


def test_gradients_are_finite_where_policies_have_nothing_in_common() -> None:
    config = tiny_config()
    rows = {name: jnp.asarray(value[0, 0]) for name, value in host_batch(config, random_groups(4), shared=True).items() if value.ndim == 4}
    rows |= {"advantage": jnp.ones(rows["mask"].shape), "weight": jnp.ones(rows["mask"].shape)}
    gradient_of = jax.grad(lambda params, rows: objective(build(MODEL, Compute()), params, rows, config)[0])
    gradient_of = jax.jit(gradient_of, compiler_options=QUICK_COMPILE)
    for old, reference in ((0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4)):
        full = rows | {"old_logp": jnp.full(rows["mask"].shape, old), "reference_logp": jnp.full(rows["mask"].shape, reference)}
        assert all(np.isfinite(leaf).all() for leaf in gradient_of(random_params(MODEL), full).values())


# --- golden numbers -------------------------------------------------------------------------------------------------------------------


V2 = {"algorithm__advantage": "reinforce_pp_trajectory", "algorithm__clip_high": 0.28, "algorithm__kl_estimator": "k2"}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_golden_numbers_of_one_step(version: str) -> None:
    """The numbers of a step in float32, as they were when the tests above last passed.

    It is right to update them after a deliberate change of the objective, the optimizer, the packing order or the inputs in `factories`;
    the commit then says which, and by how much a number moved. A refactoring, a new JAX or another machine must leave them as they are.
    """
    changes = V2 if version == "v2" else {}
    state, metrics = train(tiny_config(**SMOOTH, **changes, algorithm__kl_coefficient=0.01), dtype="float32")
    checksum = sum(np.sum(np.abs(leaf.astype(np.float64))) for leaf in jax.tree.leaves(state.params))
    got = {name: metrics[name].tolist() for name in ("loss.policy", "loss.total", "grad_norm", "update_norm", "kl.k3", "entropy")}
    got["checksum"] = checksum
    for name, value in GOLDEN[version].items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


GOLDEN = {
    "v1": {
        "loss.policy": [0.2392662316, -0.2332941741],
        "loss.total": [0.2392827719, -0.2331775129],
        "grad_norm": [4.914065361, 4.163727283],
        "update_norm": [0.2276688963, 0.1775166690],
        "kl.k3": [0.001644916367, 0.01166010275],
        "entropy": [3.072036982, 2.959085226],
        "checksum": 2650.567074,
    },
    "v2": {
        "loss.policy": [0.2342574745, -0.2225418985],
        "loss.total": [0.2342738062, -0.2224336118],
        "grad_norm": [5.622298241, 3.739309072],
        "update_norm": [0.2194688320, 0.1710332334],
        "kl.k3": [0.001644925214, 0.01072644442],
        "entropy": [3.072036982, 2.959026575],
        "checksum": 2650.518212,
    },
}
