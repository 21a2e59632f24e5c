import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
from factories import PROPERTY, QUICK_COMPILE
from hypothesis import given
from hypothesis import strategies as st
from packed import random_rows

from jaxprorl.algorithms.losses import (
    AGGREGATIONS,
    aggregation_weights,
    clipped_high,
    clipped_loss,
    clipped_low,
    log_ratio,
    reinforce_loss,
    sequence_log_ratio,
)
from jaxprorl.algorithms.sequences import masked

LOW, HIGH = 0.2, 0.4

# Loss = -min(r A, clip(r, 0.8, 1.4) A); its derivative by log pi is -r A where the minimum is r A, and 0 where it is the clipped term.
CASES = {
    # name: (ratio, advantage, loss, derivative, clipped low, clipped high)
    "same policy, good": (1.0, 1.0, -1.0, -1.0, False, False),
    "same policy, bad": (1.0, -2.0, 2.0, 2.0, False, False),
    "likelier, good, within": (1.3, 1.0, -1.3, -1.3, False, False),  # the usual clip of 0.2 would stop here: 1.3 < 1.4
    "likelier, good, beyond": (1.5, 1.0, -1.4, 0.0, False, True),  # min(1.5, 1.4)
    "likelier, bad, beyond": (1.5, -2.0, 3.0, 3.0, False, False),  # min(-3, -2.8): goes back with full force
    "rarer, bad, within": (0.9, -2.0, 1.8, 1.8, False, False),
    "rarer, bad, beyond": (0.5, -2.0, 1.6, 0.0, True, False),  # min(-1, -1.6)
    "rarer, good, beyond": (0.5, 1.0, -0.5, -0.5, False, False),  # min(0.5, 0.8): comes back with full force
    "no advantage": (1.7, 0.0, 0.0, 0.0, False, False),
}


@pytest.mark.parametrize(("ratio", "advantage", "loss", "derivative", "low", "high"), CASES.values(), ids=CASES)
def test_cases_by_hand(ratio: float, advantage: float, loss: float, derivative: float, low: bool, high: bool) -> None:
    old, adv = jnp.full((1, 1), -2.0), jnp.full((1, 1), advantage)
    logp = old + np.log(ratio)
    value, gradient = jax.value_and_grad(lambda x: clipped_loss(log_ratio(x, old), adv, LOW, HIGH).sum())(logp)
    assert value == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert gradient[0, 0] == pytest.approx(derivative, rel=1e-5, abs=0)
    r = jnp.exp(log_ratio(logp, old))
    assert (bool(clipped_low(r, adv, LOW)), bool(clipped_high(r, adv, HIGH))) == (low, high)


def test_loss_equals_a_loop_and_flags_are_where_the_gradient_is_zero() -> None:
    random = np.random.RandomState(0)
    with jax.enable_x64(True):
        logp, old, advantage = (jnp.asarray(random.standard_normal((20, 10))) for _ in range(3))
        loss_BS = clipped_loss(log_ratio(logp, old), advantage, LOW, HIGH)
        gradient_BS = jax.grad(lambda x: clipped_loss(log_ratio(x, old), advantage, LOW, HIGH).sum())(logp)
        ratio_BS = jnp.exp(log_ratio(logp, old))
        flagged_BS = clipped_low(ratio_BS, advantage, LOW) | clipped_high(ratio_BS, advantage, HIGH)
    logp, old, advantage, loss_BS, gradient_BS = map(np.asarray, (logp, old, advantage, loss_BS, gradient_BS))
    assert loss_BS.shape == (20, 10)
    for b, s in np.ndindex(20, 10):
        loss, derivative = loops.clipped(np.exp(logp[b, s] - old[b, s]), advantage[b, s], LOW, HIGH)
        assert loss_BS[b, s] == pytest.approx(loss, rel=1e-12)
        assert gradient_BS[b, s] == pytest.approx(derivative, rel=1e-12)
        assert flagged_BS[b, s] == (gradient_BS[b, s] == 0)
    assert 20 < np.sum(flagged_BS) < 180


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_log_probs_give_a_ratio_of_exactly_1(dtype: str) -> None:
    logp = jnp.asarray(-10 * np.random.RandomState(0).uniform(size=(4, 50)), dtype)
    ratio = jnp.exp(log_ratio(logp, logp))
    assert ratio.dtype == "float32"
    assert (np.asarray(ratio) == 1).all()


@functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
def sequence_ratio(logp: jax.Array, old: jax.Array, segment_ids: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.exp(sequence_log_ratio(log_ratio(logp, old), segment_ids, mask))


@functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
@jax.value_and_grad
def gspo(logp: jax.Array, old: jax.Array, advantage: jax.Array, weight: jax.Array, segment_ids: jax.Array, mask: jax.Array) -> jax.Array:
    ratio = sequence_log_ratio(log_ratio(logp, old), segment_ids, mask)
    return jnp.sum(weight * clipped_loss(ratio, advantage, LOW, HIGH))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row_tokens", [1, 2, 100, 16384])
def test_equal_log_probs_give_a_sequence_ratio_of_exactly_1_at_any_length(row_tokens: int, dtype: str) -> None:
    logp = jnp.asarray(-10 * np.random.RandomState(0).uniform(size=(1, row_tokens)), dtype)
    ones = jnp.ones((1, row_tokens), jnp.float32)
    ratio = sequence_ratio(logp, logp, ones.astype(int), ones)
    assert ratio.dtype == "float32"
    assert (np.asarray(ratio) == 1).all()


def test_the_sequence_ratio_is_no_product_of_token_ratios() -> None:
    # A gap of 0.012 nats on each of 10,000 tokens: the product would be e^120, the geometric mean stays e^0.012.
    ones = jnp.ones((1, 10_000), jnp.float32)
    ratio = sequence_ratio(-1 + 0.012 * ones, -ones, ones.astype(int), ones)
    np.testing.assert_allclose(ratio, np.exp(0.012), rtol=1e-6)


@PROPERTY
@given(seed=st.integers(0, 2**32 - 1))
def test_gspo_equals_a_loop(seed: int) -> None:
    """Value and gradient of the clipped loss of sequence ratios, averaged over tokens within sequences, then over sequences."""
    rows, random = random_rows(seed), np.random.RandomState(seed)
    logp, old = -1 + rows.numbers(random, 0.5), -1 + rows.numbers(random, 0.5)
    advantage_BS = np.zeros(logp.shape)
    per_sequence = random.standard_normal(len(rows.responses))
    weight_BS = np.zeros(logp.shape)
    weights, counts = aggregation_weights("sequence_mean", np.array([len(c) for _, c in rows.responses]), 99)
    for (row, columns), advantage, weight in zip(rows.responses, per_sequence, weights, strict=True):
        advantage_BS[row, columns], weight_BS[row, columns] = advantage, weight

    with jax.enable_x64(True):
        value, gradient_BS = gspo(logp, old, advantage_BS, weight_BS, rows.segment_ids_BS, rows.mask_BS)
    expected, expected_gradient_BS = 0.0, np.zeros(logp.shape)
    for (row, columns), advantage in zip(rows.responses, per_sequence, strict=True):
        loss, derivative = loops.clipped(loops.sequence_ratio(logp[row, columns], old[row, columns]), advantage, LOW, HIGH)
        expected += loss
        expected_gradient_BS[row, columns] = derivative / len(columns)  # d log s / d logp of each token is 1 / |y|
    assert counts.sum() == len(rows.responses)
    # The weights are float32: 1 / |y| is off by up to 2^-24 of itself.
    np.testing.assert_allclose(value, expected, atol=2**-24 * 99)
    np.testing.assert_allclose(gradient_BS, expected_gradient_BS, rtol=2**-23, atol=1e-15)


def test_reinforce_has_value_minus_a_and_gradient_minus_a() -> None:
    logp = jnp.asarray(-10 * np.random.RandomState(0).uniform(size=(4, 50)), jnp.float32)
    advantage = jnp.asarray(np.random.RandomState(1).standard_normal((4, 50)), jnp.float32)
    loss_BS = reinforce_loss(logp, advantage)
    gradient_BS = jax.grad(lambda x: reinforce_loss(x, advantage).sum())(logp)
    np.testing.assert_array_equal(loss_BS, -advantage)
    np.testing.assert_array_equal(gradient_BS, -advantage)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
def test_extreme_log_ratios_give_finite_losses_and_gradients(dtype: str, advantage: float) -> None:
    logp = jnp.asarray([[-1e4, -100.0, -20.0, 0.0, 1e4]], dtype)
    old = jnp.zeros((1, 5), dtype)
    ones, adv = jnp.ones((1, 5), jnp.float32), jnp.full((1, 5), advantage)
    losses = [
        lambda x: clipped_loss(log_ratio(x, old), adv, LOW, HIGH).sum(),
        lambda x: clipped_loss(sequence_log_ratio(log_ratio(x, old), ones.astype(int), ones), adv, LOW, HIGH).sum(),
        lambda x: reinforce_loss(x, adv).sum(),
    ]
    for loss in losses:
        value, gradient = jax.value_and_grad(loss)(logp)
        assert value.dtype == "float32"
        assert np.isfinite(value) and np.isfinite(gradient.astype(jnp.float32)).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_tokens_get_exactly_no_gradient_whatever_stands_there(poison: float) -> None:
    rows = random_rows(3)
    random, counts = np.random.RandomState(3), rows.mask_BS > 0
    clean = [rows.numbers(random).astype(np.float32) for _ in range(3)]

    def gradient(arrays: list[np.ndarray], policy_loss: str) -> np.ndarray:
        def objective(logp_BS: jax.Array) -> jax.Array:
            logp_BS, old_BS, advantage_BS = (masked(x, rows.mask_BS) for x in (logp_BS, *map(jnp.asarray, arrays[1:])))
            log_ratio_BS = log_ratio(logp_BS, old_BS)
            if policy_loss == "gspo":
                log_ratio_BS = sequence_log_ratio(log_ratio_BS, rows.segment_ids_BS, rows.mask_BS)
            if policy_loss == "reinforce":
                loss_BS = reinforce_loss(logp_BS, advantage_BS)
            else:
                loss_BS = clipped_loss(log_ratio_BS, advantage_BS, LOW, HIGH)
            return jnp.sum(masked(loss_BS, rows.mask_BS))

        return np.asarray(jax.grad(objective)(jnp.asarray(arrays[0])))

    for policy_loss in ("clipped", "gspo", "reinforce"):
        poisoned = gradient([np.where(counts, x, poison) for x in clean], policy_loss)
        np.testing.assert_array_equal(poisoned, gradient(clean, policy_loss))
        assert (poisoned[~counts] == 0).all()
        assert (poisoned[counts] != 0).any()


def test_aggregation_by_hand() -> None:
    # Answers of 1, 3 and 0 tokens with per-token losses 6 and 1, 2, 3; at most 8 tokens.
    tokens = np.array([1, 3, 0])
    cases = {
        "token_mean": ([1, 1, 0], [1, 3, 0], 12 / 4),
        "sequence_mean": ([1, 1 / 3, 0], [1, 1, 0], (6 + 2) / 2),
        "dr_grpo": ([1, 1, 0], [8, 8, 0], 12 / 16),
    }
    for kind, (weights, counts, loss) in cases.items():
        weight, count = aggregation_weights(kind, tokens, 8)
        assert weight.dtype == np.float32
        np.testing.assert_allclose(weight, weights, rtol=1e-7)
        np.testing.assert_array_equal(count, counts)
        assert (weight[0] * 6 + weight[1] * (1 + 2 + 3)) / count.sum() == pytest.approx(loss, rel=1e-7)


@pytest.mark.parametrize("kind", AGGREGATIONS)
@PROPERTY
@given(seed=st.integers(0, 2**32 - 1))
def test_aggregation_equals_a_loop_for_any_split(kind: str, seed: int) -> None:
    random = np.random.RandomState(seed)
    losses = [list(random.standard_normal(random.randint(1, 20))) for _ in range(random.randint(2, 12))]
    weight, count = aggregation_weights(kind, np.array([len(answer) for answer in losses]), 20)
    sums = [w * np.sum(answer) for w, answer in zip(weight.astype(float), losses, strict=True)]
    cut = random.randint(1, len(losses))
    split = (np.sum(sums[:cut]) + np.sum(sums[cut:])) / (count[:cut].sum() + count[cut:].sum())
    np.testing.assert_allclose(np.sum(sums) / count.sum(), loops.aggregate(kind, losses, 20), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(split, np.sum(sums) / count.sum(), rtol=1e-10, atol=1e-12)


def test_no_sequences_have_no_weights() -> None:
    for kind in AGGREGATIONS:
        weight, count = aggregation_weights(kind, np.array([], int), 8)
        assert weight.shape == count.shape == (0,)
