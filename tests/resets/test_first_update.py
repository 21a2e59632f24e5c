"""How large the first updates after a reset are: docs/resets.md, "The first updates"."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, tiny_config
from ml_collections import ConfigDict

from jaxprorl.optimizer import make_optimizer
from jaxprorl.resets.optimizer import OPTIMIZER_SETS, reset_opt_state

UPDATES = {
    True: 8_000,
    False: 500,
}  # before the reset, by `steady`: the bias correction of b2 = 0.999 is then 1 within 2e-4; noise is slow to draw
SIZE = 2_000
B1 = 0.9


def config_of(b2: float, **overrides: Any) -> ConfigDict:
    return tiny_config(optimizer__b2=b2, optimizer__eps=1e-12, optimizer__clip_norm=1e9, **overrides)


def gradient(steady: bool, key: jax.Array) -> jax.Array:
    """Steady: always the same, no entry near 0. Else noise around 0."""
    return jnp.linspace(0.5, 1.5, SIZE) if steady else jax.random.normal(key, (SIZE,))


@cache
def norms_after(b2: float, steady: bool, name: str, updates: int = 1, warmup: int = 0, after_resets: int = 0) -> list[float]:
    """Norms of the updates that follow a reset, name of its set or "fresh": a new optimizer. Computed in float64."""
    config = config_of(b2, optimizer__warmup_updates=warmup, resets__warmup_updates=after_resets)
    optimizer = make_optimizer(config)

    def run() -> jax.Array:
        params = {"a": jnp.zeros(SIZE)}

        def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            update, state = optimizer.update({"a": gradient(steady, key)}, state, params)
            return state, jnp.linalg.norm(update["a"])

        before, after = jnp.split(jax.random.split(jax.random.key(0), UPDATES[steady] + updates), [UPDATES[steady]])
        fresh = optimizer.init(params)
        state = jax.lax.scan(step, fresh, before)[0]
        state = fresh if name == "fresh" else state if name == "no reset" else reset_opt_state(state, fresh, OPTIMIZER_SETS[name])
        return jax.lax.scan(step, state, after)[1]

    with jax.enable_x64(True):
        return np.asarray(jax.jit(run, compiler_options=QUICK_COMPILE)()).tolist()


def old_count_factor(b2: float, k: int, count: float) -> float:
    """Of the k-th update after the moments alone were reset, which AdamW takes for number count + k."""
    return (1 - B1**k) / np.sqrt(1 - b2**k) * np.sqrt(1 - b2 ** (count + k)) / (1 - B1 ** (count + k))


# The schedule of optax computes in float32 whatever the mode: 6e-8 per operation on the rate, and a few operations.
RTOL = 1e-6


@pytest.mark.parametrize(("b2", "factor"), [(0.95, 0.447), (0.999, 3.162)])
@pytest.mark.parametrize("steady", [True, False])
def test_the_first_update_of_every_set_against_a_fresh_optimizers(b2: float, factor: float, steady: bool) -> None:
    # A fresh optimizer's first update is lr x sign(gradient), whatever came before; eps is nothing beside it.
    (fresh,) = norms_after(b2, steady, "fresh")
    assert fresh == pytest.approx(0.01 * np.sqrt(SIZE), rel=RTOL)
    assert norms_after(b2, steady, "all") == pytest.approx([fresh], rel=RTOL)
    assert norms_after(b2, steady, "moments_and_bias") == pytest.approx([fresh], rel=RTOL)
    (moments,) = norms_after(b2, steady, "moments")
    assert moments / fresh == pytest.approx(old_count_factor(b2, 1, UPDATES[steady]), rel=RTOL)
    if steady:  # as docs/resets.md has it
        assert round(moments / fresh, 3) == round((1 - B1) / np.sqrt(1 - b2), 3) == factor


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_the_first_update_against_going_on_without_a_reset(b2: float) -> None:
    # A steady gradient: the moments are the gradient and its square, and the update is its sign, as a fresh one's.
    fresh = norms_after(b2, True, "fresh")
    assert norms_after(b2, True, "no reset") == pytest.approx(fresh, rel=RTOL)
    assert norms_after(b2, True, "none") == norms_after(b2, True, "no reset")
    # Noise: the mean of the last gradients has variance (1 - b1) / (1 + b1) of one. The second moment's own spread and its share in the
    # first shift that by under 2 % (b2 = 0.95: 5 % and -8 % of the square); 2,000 entries leave a standard error of 1.6 %.
    (none,), (fresh_noise,) = norms_after(b2, False, "none"), norms_after(b2, False, "fresh")
    assert none / fresh_noise == pytest.approx(np.sqrt((1 - B1) / (1 + B1)), rel=0.08)


@pytest.mark.parametrize(("b2", "largest", "at"), [(0.95, 1.10, 20), (0.999, 6.57, 12)])
def test_with_an_old_count_the_updates_after_the_first_are_larger_still(b2: float, largest: float, at: int) -> None:
    (fresh,) = norms_after(b2, True, "fresh")
    ratios = np.array(norms_after(b2, True, "moments", updates=60)) / fresh
    np.testing.assert_allclose(ratios, [old_count_factor(b2, k, UPDATES[True]) for k in range(1, 61)], rtol=RTOL)
    assert (round(ratios.max(), 2), int(ratios.argmax()) + 1) == (largest, at)


def test_warm_ups_scale_the_first_update_of_the_sets_that_start_them() -> None:
    (fresh,) = norms_after(0.95, True, "moments_and_bias")
    first = {name: norms_after(0.95, True, name, warmup=8, after_resets=5)[0] / fresh for name in OPTIMIZER_SETS}
    expected = {"all": 1 / 8 / 5, "moments_and_bias": 1 / 5, "moments": old_count_factor(0.95, 1, UPDATES[True]) / 5, "none": 1 / 5}
    assert first == pytest.approx(expected, rel=RTOL)
