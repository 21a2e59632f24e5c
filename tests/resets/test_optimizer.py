from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import random_params, tiny_config, tiny_model

from jaxprorl.optimizer import make_optimizer, update_count
from jaxprorl.resets.optimizer import reset
from jaxprorl.state import TrainState


def used_state(config: Any) -> TrainState:
    """A state some updates after its start: moments and counts are not zero, the reference is not the policy."""
    params, reference = (jax.tree.map(jnp.asarray, random_params(tiny_model(), seed)) for seed in (0, 1))
    optimizer = make_optimizer(config)
    opt_state = optimizer.init(params)
    for _ in range(3):
        _, opt_state = jax.jit(optimizer.update)(jax.tree.map(jnp.ones_like, params), opt_state, params)
    return TrainState(params, reference, opt_state)


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=str(path))
        assert x.dtype == y.dtype and x.shape == y.shape


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_reset_copies_the_policy_and_starts_the_optimizer_afresh(with_optimizer: bool, jitted: bool) -> None:
    config = tiny_config(resets__optimizer=with_optimizer, optimizer__warmup_updates=8)
    before = used_state(config)
    assert update_count(before.opt_state) == 3
    function = jax.jit(lambda state: reset(state, config)) if jitted else (lambda state: reset(state, config))
    after = function(before)
    assert_same(after.params, before.params)
    assert_same(after.reference, before.params)
    assert_same(after.opt_state, make_optimizer(config).init(before.params) if with_optimizer else before.opt_state)
    assert update_count(after.opt_state) == (0 if with_optimizer else 3)


def test_reference_and_policy_do_not_share_memory() -> None:
    # The training step donates the state: a shared buffer would be given away twice.
    config = tiny_config()
    after = jax.jit(lambda state: reset(state, config), donate_argnums=0)(used_state(config))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((after.params, after.reference))]
    assert len(pointers) == len(set(pointers))
