from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxprorl.algorithms.kl import MAX_LOG_RATIO, k1, k2, k3

ESTIMATORS = [k1, k2, k3]
Estimator = Callable[[jax.Array, jax.Array], jax.Array]

# x = log(reference / policy).
#   policy 1/2, reference 1/4: x = -log 2 = -0.6931472
#     k1 = 0.6931472, k2 = 0.4804530 / 2 = 0.2402265, k3 = 1/2 - 1 + 0.6931472 = 0.1931472
#     derivatives by log policy: 1, -x = 0.6931472, 1 - exp(x) = 1/2
#   policy 1/4, reference 1/2: x = log 2
#     k1 = -0.6931472, k2 = 0.2402265, k3 = 2 - 1 - 0.6931472 = 0.3068528; derivatives 1, -0.6931472, 1 - 2 = -1
CASES = [
    (k1, 0.5, 0.25, 0.6931472, 1.0),
    (k2, 0.5, 0.25, 0.2402265, 0.6931472),
    (k3, 0.5, 0.25, 0.1931472, 0.5),
    (k1, 0.25, 0.5, -0.6931472, 1.0),
    (k2, 0.25, 0.5, 0.2402265, -0.6931472),
    (k3, 0.25, 0.5, 0.3068528, -1.0),
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


def test_expectations_of_k1_and_k3_are_the_exact_divergence_and_k2s_is_not() -> None:
    with jax.enable_x64(True):
        logp, reference = (jax.nn.log_softmax(jnp.asarray(x)) for x in distributions())
        exact = scipy.stats.entropy(np.exp(logp), np.exp(reference))
        means = [float(jnp.sum(jnp.exp(logp) * estimator(logp, reference))) for estimator in ESTIMATORS]
    assert exact > 0.3
    assert means[0] == pytest.approx(exact, rel=1e-12)
    assert means[2] == pytest.approx(exact, rel=1e-12)
    assert means[1] != pytest.approx(exact, rel=0.01)


def test_expected_gradients_are_what_the_docstring_says() -> None:
    # Samples come from the policy, whose own probability is not differentiated: k2 has the gradient of KL(policy || reference), k1 none,
    # k3 that of KL(reference || policy).
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
        np.testing.assert_allclose(expected(k3), backward, atol=1e-15)
