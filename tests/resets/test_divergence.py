"""The divergence from the reference right after a reset: log-probs of both from one executable."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, random_groups, random_params, tiny_config, tiny_model

from jaxprorl.algorithms.kl import k1
from jaxprorl.batch import device_batch
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import build
from jaxprorl.resets.optimizer import reset
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.state import TrainState, start_state, state_shardings
from jaxprorl.update import batch_log_probs, make_log_probs, rows_of

MODEL = tiny_model(num_hidden_layers=1)
BFLOAT16_ROUNDING = 2.0**-8  # 8 significant bits: a rounded number is off by this share of itself at most


def after_a_reset(dtype: str, reference_dtype: str) -> tuple[Any, TrainState, Any, np.ndarray, np.ndarray]:
    """log_probs (jitted), a state that has just been reset, a batch, and the log-probs of policy and reference on it."""
    config = tiny_config(model__dtype=dtype, model__reference_dtype=reference_dtype)
    mesh = make_mesh("dp")
    shardings = state_shardings(config, MODEL, mesh)
    state = start_state(config, jax.device_put(random_params(MODEL), shardings.params), shardings)
    far = jax.tree.map(lambda x: 0.5 * x, state.reference)
    state = jax.jit(lambda state: reset(state, config), out_shardings=shardings)(TrainState(state.params, far, state.opt_state))
    batch = device_batch(config, random_groups(4), mesh, shared=True)
    log_probs = jax.jit(make_log_probs(build(MODEL, Compute(dtype, mesh=mesh)), config))
    before = log_probs(state.params, far, batch)[0]
    assert not np.array_equal(before["old_logp"], before["reference_logp"])
    fixed, kl_sum_PN = log_probs(state.params, state.reference, batch)
    policy, reference = np.asarray(fixed["old_logp"]), np.asarray(fixed["reference_logp"])
    assert (np.abs(policy) > 0.1).sum() > 50
    np.testing.assert_allclose(kl_sum_PN.sum(), k1(policy, reference).sum(), rtol=0, atol=1e-4)  # ~100 float32 terms below 0.1
    return log_probs, state, batch, policy, reference


@pytest.mark.parametrize(
    ("dtype", "reference_dtype"),
    [
        ("float32", "float32"),
        # Weights that are computed with in bfloat16 are rounded once, when they are used or when they are copied.
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
    ],
)
def test_it_is_exactly_0_when_the_reference_is_not_coarser_than_the_computation(dtype: str, reference_dtype: str) -> None:
    *_, policy, reference = after_a_reset(dtype, reference_dtype)
    np.testing.assert_array_equal(policy, reference)


@pytest.mark.slow
def test_with_a_coarser_reference_it_is_what_rounding_makes_of_it_and_bounded() -> None:
    log_probs, state, batch, policy, reference = after_a_reset("float32", "bfloat16")
    k1_UMBS = np.asarray(k1(policy, reference))
    assert np.abs(k1_UMBS).max() > 0
    # Neither forced to 0 nor anything else: the same as with a float32 reference that was rounded.
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), state.params)
    fixed, _ = log_probs(state.params, rounded, batch)
    np.testing.assert_array_equal(fixed["reference_logp"], reference)

    # k1 = - integral over s in [0, 1] of gradient(w + s d) . d, d the rounding, |d| <= 2^-8 |w|: at most 2^-8 times the largest sum of
    # |gradient x w| on the way, here of five places. They differ by under 5 %, so that between two of them it is not 5 % more.
    graphdef, rows = build(MODEL, Compute()), jax.tree.map(lambda x: x[0, 0], rows_of(batch))

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def sensitivity(params: Any, chosen_BS: jax.Array) -> jax.Array:
        """Sum over weights of |gradient x weight|, of the chosen token's log-prob."""
        slopes = jax.grad(lambda p: jnp.sum(chosen_BS * batch_log_probs(graphdef, p, rows, tiny_config().rollout.temperature)[0]))(params)
        return sum(jnp.sum(jnp.abs(slopes[name] * state.params[name])) for name in slopes)

    for row, place in np.argwhere(np.asarray(rows["mask"]) > 0)[:6]:
        chosen_BS = np.zeros(rows["mask"].shape, np.float32)
        chosen_BS[row, place] = 1.0
        way = [jax.tree.map(lambda x, y, s=s: x + s * (y - x), state.params, rounded) for s in np.linspace(0, 1, 5)]
        bounds = [BFLOAT16_ROUNDING * float(sensitivity(params, chosen_BS)) for params in way]
        assert max(bounds) < 1.05 * min(bounds)
        assert 0 < abs(k1_UMBS[0, 0, row, place]) <= 1.05 * max(bounds)
