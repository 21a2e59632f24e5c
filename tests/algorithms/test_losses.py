import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprorl.algorithms.losses import clipped_high, clipped_low, clipped_policy_loss, log_ratio

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
    value, gradient = jax.value_and_grad(lambda x: clipped_policy_loss(x, old, adv, LOW, HIGH).sum())(logp)
    assert value == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert gradient[0, 0] == pytest.approx(derivative, rel=1e-5, abs=0)
    r = jnp.exp(log_ratio(logp, old))
    assert (bool(clipped_low(r, adv, LOW)), bool(clipped_high(r, adv, HIGH))) == (low, high)


def test_loss_equals_a_loop_and_flags_are_where_the_gradient_is_zero() -> None:
    random = np.random.RandomState(0)
    with jax.enable_x64(True):
        logp, old, advantage = (jnp.asarray(random.standard_normal((20, 10))) for _ in range(3))
        loss_BS = clipped_policy_loss(logp, old, advantage, LOW, HIGH)
        gradient_BS = jax.grad(lambda x: clipped_policy_loss(x, old, advantage, LOW, HIGH).sum())(logp)
        ratio_BS = jnp.exp(log_ratio(logp, old))
        flagged_BS = clipped_low(ratio_BS, advantage, LOW) | clipped_high(ratio_BS, advantage, HIGH)
    logp, old, advantage, loss_BS, gradient_BS = map(np.asarray, (logp, old, advantage, loss_BS, gradient_BS))
    assert loss_BS.shape == (20, 10)
    for b, s in np.ndindex(20, 10):
        ratio = np.exp(logp[b, s] - old[b, s])
        bounded = max(0.8, min(1.4, ratio))
        terms = ratio * advantage[b, s], bounded * advantage[b, s]
        assert loss_BS[b, s] == pytest.approx(-min(terms), rel=1e-12)
        assert gradient_BS[b, s] == pytest.approx(-terms[0] if terms[0] <= terms[1] else 0.0, rel=1e-12)
        assert flagged_BS[b, s] == (gradient_BS[b, s] == 0)
    assert 20 < np.sum(flagged_BS) < 180


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_log_probs_give_a_ratio_of_exactly_1(dtype: str) -> None:
    logp = jnp.asarray(-10 * np.random.RandomState(0).uniform(size=(4, 50)), dtype)
    ratio = jnp.exp(log_ratio(logp, logp))
    assert ratio.dtype == "float32"
    assert (np.asarray(ratio) == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
def test_extreme_log_ratios_give_finite_losses_and_gradients(dtype: str, advantage: float) -> None:
    logp = jnp.asarray([[-1e4, -100.0, -20.0, 0.0, 1e4]], dtype)
    old = jnp.zeros((1, 5), dtype)
    value, gradient = jax.value_and_grad(lambda x: clipped_policy_loss(x, old, jnp.full((1, 5), advantage), LOW, HIGH).sum())(logp)
    assert np.isfinite(value) and np.isfinite(gradient.astype(jnp.float32)).all()
