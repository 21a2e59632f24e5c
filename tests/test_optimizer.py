import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from factories import tiny_config, tiny_model

from jaxprorl.models.qwen2 import declarations
from jaxprorl.optimizer import learning_rate_schedule, make_optimizer, update_count


def test_the_learning_rate_warms_up_linearly_and_then_stays() -> None:
    # Four updates: 1/4, 2/4, 3/4 and all of 0.01; the very first one already moves.
    schedule = learning_rate_schedule(tiny_config(optimizer__warmup_updates=4))
    np.testing.assert_allclose([schedule(i) for i in (0, 1, 2, 3, 4, 1000)], [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01], rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_a_warmup_the_first_update_has_the_full_rate(warmup: int) -> None:
    schedule = learning_rate_schedule(tiny_config(optimizer__warmup_updates=warmup))
    assert [schedule(i) for i in (0, 1, 100)] == pytest.approx([0.01] * 3)


def adamw(gradients: list[np.ndarray], x: np.ndarray, c: dict[str, float]) -> np.ndarray:
    """AdamW with a global-norm clip, in numpy (arXiv 1711.05101, algorithm 2, with optax's scaling of the decay by the rate)."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        g = g * min(1.0, c["clip_norm"] / np.linalg.norm(g))
        m = c["b1"] * m + (1 - c["b1"]) * g
        v = c["b2"] * v + (1 - c["b2"]) * g * g
        step = (m / (1 - c["b1"] ** t)) / (np.sqrt(v / (1 - c["b2"] ** t)) + c["eps"])
        rate = c["learning_rate"] * min(1.0, t / c["warmup_updates"])
        x = x - rate * (step + c["weight_decay"] * x)
    return x


def test_updates_equal_adamw_written_out() -> None:
    config = tiny_config(optimizer__warmup_updates=3, optimizer__weight_decay=0.1, optimizer__clip_norm=2.0, optimizer__eps=1e-3)
    random = np.random.RandomState(0)
    gradients = [scale * random.standard_normal(6) for scale in (0.1, 10.0, 1.0, 0.3, 5.0)]  # some clipped, some not
    start = random.standard_normal(6)
    with jax.enable_x64(True):
        optimizer = make_optimizer(config)
        params = {"a": jnp.asarray(start[:4]), "b": jnp.asarray(start[4:])}
        state = optimizer.init(params)
        for i, g in enumerate(gradients):
            assert update_count(state) == i
            updates, state = optimizer.update({"a": jnp.asarray(g[:4]), "b": jnp.asarray(g[4:])}, state, params)
            params = optax.apply_updates(params, updates)
    expected = adamw(gradients, start, dict(config.optimizer))
    # The schedule of optax computes in float32 whatever the mode: 1e-7 of an update of 0.01.
    np.testing.assert_allclose(np.concatenate([params["a"], params["b"]]), expected, rtol=0, atol=5e-9)


def test_a_fresh_state_starts_the_warmup_again() -> None:
    config = tiny_config(optimizer__warmup_updates=4)
    optimizer, params = make_optimizer(config), {"a": jnp.ones(3)}
    state = optimizer.init(params)
    for _ in range(5):
        _, state = optimizer.update({"a": jnp.ones(3)}, state, params)
    schedule = learning_rate_schedule(config)
    assert schedule(update_count(state)) == pytest.approx(0.01)
    assert schedule(update_count(optimizer.init(params))) == pytest.approx(0.0025)


def test_the_cosine_ends_at_its_share_of_the_rate_with_the_warmup_counted_in() -> None:
    config = tiny_config(
        optimizer__schedule="cosine", optimizer__warmup_updates=3, optimizer__cosine_updates=12, optimizer__final_share=0.2
    )
    schedule = learning_rate_schedule(config)
    # 1/3, 2/3 and all of 0.01, then 10 updates of half a cosine from update 2 to update 12; halfway it is at 0.6 of the rate.
    expected = [0.01 / 3, 0.02 / 3, 0.01, 0.006, 0.002, 0.002]
    np.testing.assert_allclose([schedule(i) for i in (0, 1, 2, 7, 12, 100)], expected, rtol=1e-6)


@pytest.mark.parametrize("vectors", [False, True])
def test_weight_decay_leaves_norms_and_biases_alone_unless_told_otherwise(vectors: bool) -> None:
    config = tiny_config(optimizer__weight_decay=0.5, optimizer__decay_vectors=vectors)
    names = set(declarations(tiny_model()))
    optimizer, params = make_optimizer(config), {name: jnp.ones(2) for name in names}
    updates, _ = optimizer.update({name: jnp.zeros(2) for name in names}, optimizer.init(params), params)
    matrices = {"embed", "q_kernel", "k_kernel", "v_kernel", "o_kernel", "gate_kernel", "up_kernel", "down_kernel"}
    assert names == matrices | {"attention_norm", "mlp_norm", "final_norm", "q_bias", "k_bias", "v_bias"}
    assert {name for name in names if updates[name].any()} == (names if vectors else matrices)
    np.testing.assert_allclose(updates["embed"], -0.01 * 0.5, rtol=1e-6)
