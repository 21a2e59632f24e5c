from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, tiny_config
from ml_collections import ConfigDict

from jaxprorl.compilation import no_compilation
from jaxprorl.optimizer import learning_rate, make_optimizer
from jaxprorl.resets.optimizer import OPTIMIZER_SETS, reset_opt_state
from jaxprorl.resets.warmup import WarmupState, warmup_factor

PARAMS = {"a": jnp.linspace(-1.0, 1.0, 5), "b": jnp.ones(3)}


def gradients(seed: int) -> dict[str, jax.Array]:
    random = np.random.RandomState(seed)
    return {name: jnp.asarray(random.standard_normal(x.shape), x.dtype) for name, x in PARAMS.items()}


def updates_of(config: ConfigDict, reset_before: tuple[int, ...] = (), count: int = 12) -> tuple[list[Any], list[float], Any]:
    """Every update, the rate that is logged for it, and the last state; nothing is compiled after the first update and the first reset."""
    optimizer, parts = make_optimizer(config), OPTIMIZER_SETS[config.resets.optimizer]
    update = jax.jit(optimizer.update, compiler_options=QUICK_COMPILE)
    reset = jax.jit(lambda state: reset_opt_state(state, optimizer.init(PARAMS), parts), compiler_options=QUICK_COMPILE)
    rate = jax.jit(lambda state: learning_rate(state, config), compiler_options=QUICK_COMPILE)
    state, all_gradients = optimizer.init(PARAMS), [gradients(i) for i in range(count)]
    update(all_gradients[0], reset(state), PARAMS)
    rate(state)
    updates, rates = [], []
    with no_compilation():
        for i in range(count):
            if i in reset_before:
                state = reset(state)
            rates.append(rate(state))
            update_now, state = update(all_gradients[i], state, PARAMS)
            updates.append(update_now)
    return jax.tree.map(np.asarray, updates), [float(x) for x in rates], state


def test_the_factor_rises_linearly_to_one_and_stays() -> None:
    np.testing.assert_array_equal(
        [warmup_factor(jnp.int32(count), 4) for count in (0, 1, 2, 3, 4, 100)], np.float32([0.25, 0.5, 0.75, 1, 1, 1])
    )
    assert warmup_factor(jnp.int32(0), 1) == 1


def test_without_a_reset_nothing_is_changed_bit_for_bit() -> None:
    plain, plain_rates, _ = updates_of(tiny_config())
    warmed, rates, _ = updates_of(tiny_config(resets__warmup_updates=4))
    assert rates == plain_rates
    for a, b in zip(plain, warmed, strict=True):
        for name in PARAMS:
            np.testing.assert_array_equal(a[name], b[name])


def test_0_leaves_no_trace_in_the_state() -> None:
    def kinds(config: ConfigDict) -> list[type]:
        return [type(node) for node in make_optimizer(config).init(PARAMS)]

    assert WarmupState not in kinds(tiny_config())
    assert kinds(tiny_config(resets__warmup_updates=1)) == [*kinds(tiny_config()), WarmupState]


@pytest.mark.parametrize("optimizer", OPTIMIZER_SETS)
def test_after_every_reset_updates_are_scaled_up_whatever_was_reset(optimizer: str) -> None:
    config = {"resets__optimizer": optimizer, "optimizer__warmup_updates": 3, "optimizer__weight_decay": 0.1}
    resets = (5, 7)  # the second while the first one's warm-up is still on
    plain, plain_rates, _ = updates_of(tiny_config(**config), resets)
    warmed, rates, state = updates_of(tiny_config(**config, resets__warmup_updates=4), resets)
    factors = [1, 1, 1, 1, 1, 0.25, 0.5, 0.25, 0.5, 0.75, 1, 1]  # exact in binary, so that products are too
    assert rates == [np.float32(rate * factor) for rate, factor in zip(plain_rates, factors, strict=True)]
    for a, b, factor in zip(plain, warmed, factors, strict=True):
        for name in PARAMS:
            np.testing.assert_array_equal(a[name] * np.float32(factor), b[name])
    assert state[-1] == WarmupState(4)


def test_the_logged_rate_follows_the_schedules_own_count() -> None:
    # A warm-up of 8 updates from the start: after 5 of them "moments_and_bias" starts AdamW's count again, not the schedule's.
    _, kept, _ = updates_of(tiny_config(resets__optimizer="moments_and_bias", optimizer__warmup_updates=8), (5,))
    np.testing.assert_allclose(kept, [0.01 * min(1, (i + 1) / 8) for i in range(12)], rtol=1e-6)
    _, again, _ = updates_of(tiny_config(resets__optimizer="all", optimizer__warmup_updates=8), (5,))
    np.testing.assert_allclose(again, [0.01 * min(1, (i + 1) / 8) for i in [*range(5), *range(7)]], rtol=1e-6)
