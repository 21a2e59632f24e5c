from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxprorl.algorithms.kl import KL_ESTIMATORS, in_reward_kl, k1, k1_straight_through, k2, k3
from jaxprorl.algorithms.losses import MAX_LOG_RATIO

ESTIMATORS = list(KL_ESTIMATORS.values())
Estimator = Callable[[jax.Array, jax.Array], jax.Array]

# x = log(reference / policy).
#   policy 1/2, reference 1/4: x = -log 2 = -0.6931472
#     k1 = 0.6931472, k2 = 0.4804530 / 2 = 0.2402265, k3 = 1/2 - 1 + 0.6931472 = 0.1931472
#     derivatives by log policy: 1, -x = 0.6931472, 1 - exp(x) = 1/2; k1's value with k2's derivative
#   policy 1/4, reference 1/2: x = log 2
#     k1 = -0.6931472, k2 = 0.2402265, k3 = 2 - 1 - 0.6931472 = 0.3068528; derivatives 1, -0.6931472, 1 - 2 = -1
CASES = [
    (k1, 0.5, 0.25, 0.6931472, 1.0),
    (k2, 0.5, 0.25, 0.2402265, 0.6931472),
    (k3, 0.5, 0.25, 0.1931472, 0.5),
    (k1_straight_through, 0.5, 0.25, 0.6931472, 0.6931472),
    (k1, 0.25, 0.5, -0.6931472, 1.0),
    (k2, 0.25, 0.5, 0.2402265, -0.6931472),
    (k3, 0.25, 0.5, 0.3068528, -1.0),
    (k1_straight_through, 0.25, 0.5, -0.6931472, -0.6931472),
]


@pytest.mark.parametrize(("estimator", "policy", "reference", "value", "derivative"), CASES)
def test_cases_by_hand(estimator: Estimator, policy: float, reference: float, value: float, derivative: float) -> None:
    got = jax.value_and_grad(estimator)(jnp.log(policy), jnp.log(reference))
    np.testing.assert_allclose(got, (value, derivative), rtol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_same_policy_has_exactly_no_divergence(estimator: Estimator) -> None:
    logp = -jnp.linspace(0.0, 30.0, 50)[None]
    assert (np.asarray(estimator(logp, logp)) == 0).all()


def test_k2_and_k3_are_never_negative() -> None:
    sizes = np.logspace(-12, 2, 20_000, dtype=np.float32)  # of log-ratios, down to where rounding decides
    x = np.concatenate([sizes, -sizes])
    for logp in np.float32([0.0, -1.0, -7.3]):
        assert (np.asarray(k2(jnp.full_like(x, logp), logp + x)) >= 0).all()
        assert (np.asarray(k3(jnp.full_like(x, logp), logp + x)) >= 0).all()


def test_k3_of_nearly_equal_policies_does_not_drown_in_rounding() -> None:
    # k3 = x^2 / 2 + x^3 / 6 + ...; x = 2^-10 gives 4.7699e-07. exp(x) - 1 - x, computed as written, would be off by up to 1.2e-07.
    assert k3(jnp.float32(-1.0), jnp.float32(-1.0 + 2**-10)) == pytest.approx(2**-21 * (1 + 2**-10 / 3), rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_and_gradients_are_finite_at_extremes(estimator: Estimator, dtype: str) -> None:
    logp = jnp.asarray([-1e4, -100.0, -1.0, 0.0, 0.0, 1e4], dtype)
    reference = jnp.asarray([0.0, 0.0, -1.0, -100.0, -1e4, 0.0], dtype)
    value, gradients = jax.value_and_grad(lambda *x: estimator(*x).sum(), (0, 1))(logp, reference)
    assert value.dtype == "float32"
    assert np.isfinite(value)
    assert all(np.isfinite(gradient.astype(jnp.float32)).all() for gradient in gradients)
    assert np.abs(estimator(logp, reference)).max() <= np.exp(MAX_LOG_RATIO)


def distributions() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(2)
    return random.standard_normal(12), random.standard_normal(12)


def test_expectations_of_all_but_k2_are_the_exact_divergence() -> None:
    with jax.enable_x64(True):
        logp, reference = (jax.nn.log_softmax(jnp.asarray(x)) for x in distributions())
        exact = scipy.stats.entropy(np.exp(logp), np.exp(reference))
        means = {name: float(jnp.sum(jnp.exp(logp) * f(logp, reference))) for name, f in KL_ESTIMATORS.items()}
    assert exact > 0.3
    assert means.pop("k2") != pytest.approx(exact, rel=0.01)
    assert means == pytest.approx(dict.fromkeys(means, exact), rel=1e-12)


def test_expected_gradients_are_what_the_docstring_says() -> None:
    # Samples come from the policy, whose own probability is not differentiated.
    theta, other = distributions()
    with jax.enable_x64(True):
        reference = jax.nn.log_softmax(jnp.asarray(other))
        p, q = jax.nn.softmax(jnp.asarray(theta)), jnp.exp(reference)

        def expected(estimator: Estimator) -> jax.Array:
            return jax.grad(lambda t: jnp.sum(p * estimator(jax.nn.log_softmax(t), reference)))(jnp.asarray(theta))

        forward = jax.grad(lambda t: jnp.sum(jax.nn.softmax(t) * (jax.nn.log_softmax(t) - reference)))(jnp.asarray(theta))
        backward = jax.grad(lambda t: jnp.sum(q * (reference - jax.nn.log_softmax(t))))(jnp.asarray(theta))
        np.testing.assert_allclose(expected(k1), np.zeros(12), atol=1e-15)
        np.testing.assert_allclose(expected(k2), forward, atol=1e-15)
        np.testing.assert_allclose(expected(k1_straight_through), forward, atol=1e-15)
        np.testing.assert_allclose(expected(k3), backward, atol=1e-15)
        assert np.abs(forward - backward).max() > 0.01


def test_the_straight_through_form_has_exactly_k1s_value_and_k2s_gradient() -> None:
    random = np.random.RandomState(0)
    logp, reference = (jnp.asarray(-10 * random.uniform(size=(4, 50)), jnp.float32) for _ in range(2))
    np.testing.assert_array_equal(k1_straight_through(logp, reference), k1(logp, reference))
    gradients = [jax.grad(lambda x, f=f: f(x, reference).sum())(logp) for f in (k1_straight_through, k2)]
    np.testing.assert_array_equal(*gradients)


def test_only_the_kl_in_the_reward_sees_how_a_token_changes_the_divergence_of_later_ones() -> None:
    """All answers of two tokens, enumerated: the gradient of the whole answer's KL, against both placements."""
    random = np.random.RandomState(3)
    first, second = random.standard_normal(3), random.standard_normal((3, 3))  # logits of the second token depend on the first
    with jax.enable_x64(True):
        reference = (
            jax.nn.log_softmax(jnp.asarray(random.standard_normal(3))),
            jax.nn.log_softmax(jnp.asarray(random.standard_normal((3, 3)))),
        )
        logits = (jnp.asarray(first), jnp.asarray(second))

        def tokens(logits: tuple[jax.Array, jax.Array]) -> jax.Array:
            """Log-probs of both tokens of each of the nine answers, [9, 2]."""
            return jnp.stack([jnp.repeat(jax.nn.log_softmax(logits[0]), 3), jax.nn.log_softmax(logits[1]).ravel()], axis=1)

        reference_92 = jnp.stack([jnp.repeat(reference[0], 3), reference[1].ravel()], axis=1)
        p_9 = jnp.exp(tokens(logits).sum(axis=1))
        exact = jax.grad(lambda x: jnp.sum(jnp.exp(tokens(x).sum(axis=1)) * (tokens(x) - reference_92).sum(axis=1)))(logits)
        kl_sum_9 = k1(tokens(logits), reference_92).sum(axis=1)
        reward_9 = jnp.asarray(in_reward_kl(np.zeros(9), np.asarray(kl_sum_9), 1.0))
        in_reward = jax.grad(lambda x: -jnp.sum(p_9 * reward_9 * tokens(x).sum(axis=1)))(logits)
        in_loss = jax.grad(lambda x: jnp.sum(p_9[:, None] * k2(tokens(x), reference_92)))(logits)
    for got, expected in zip(in_reward, exact, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-15)
    np.testing.assert_allclose(in_loss[1], exact[1], atol=1e-15)  # the last token has none after it
    assert np.abs(in_loss[0] - exact[0]).max() > 0.01


def test_kl_in_the_reward_by_hand() -> None:
    got = in_reward_kl(np.array([[1.0, 0.0]]), np.array([[2.0, -4.0]]), 0.25)
    np.testing.assert_array_equal(got, [[0.5, 1.0]])
    assert got.dtype == np.float64
