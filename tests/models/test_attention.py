import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprorl.models.attention import attend, packed_causal_mask


def naive(q_BSHK: np.ndarray, k_BTGK: np.ndarray, v_BTGK: np.ndarray, mask_B1ST: np.ndarray) -> np.ndarray:
    """Attention, one query of one head at a time."""
    batch, queries, heads, width = q_BSHK.shape
    per_group = heads // k_BTGK.shape[2]
    context = np.zeros_like(q_BSHK)
    for b in range(batch):
        for s in range(queries):
            readable = [t for t in range(k_BTGK.shape[1]) if mask_B1ST[b, 0, s, t]]
            for h in range(heads):
                scores = np.array([q_BSHK[b, s, h] @ k_BTGK[b, t, h // per_group] for t in readable]) / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                context[b, s, h] = sum(w * v_BTGK[b, t, h // per_group] for w, t in zip(weights, readable, strict=True))
    return context


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_context_equals_a_loop_over_queries_and_heads(heads: int, groups: int) -> None:
    random = np.random.RandomState(heads + groups)
    q, k, v = (random.standard_normal((2, size, n, 8)) for size, n in ((5, heads), (7, groups), (7, groups)))
    mask = random.uniform(size=(2, 1, 5, 7)) < 0.5
    mask[..., 2] = True  # every query reads something
    with jax.enable_x64(True):
        context = attend(*map(jnp.asarray, (q, k, v, mask)))
        assert context.dtype == "float64"
    np.testing.assert_allclose(context, naive(q, k, v, mask), rtol=0, atol=1e-13)


def test_mask_of_a_drawn_example() -> None:
    # Two sequences of two and one tokens, one token of padding. Rows read, columns are read.
    mask = packed_causal_mask(jnp.array([[1, 1, 2, 0]]))
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(mask, np.array(expected, bool)[None, None])


def test_softmax_is_taken_in_float32_for_bfloat16_inputs() -> None:
    # 1024 equal scores: a bfloat16 sum of weights would stop growing at 256 times its step and be off by far.
    q, k = jnp.zeros((1, 1, 1, 8), jnp.bfloat16), jnp.zeros((1, 1024, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, 1024, 1, 8), jnp.bfloat16)
    context = attend(q, k, v, jnp.ones((1, 1, 1, 1024), bool))
    assert context.dtype == jnp.bfloat16
    np.testing.assert_allclose(context.astype(jnp.float32), 1.0, rtol=2**-8)


def test_gradients_are_finite_where_scores_are_huge() -> None:
    q = jnp.full((1, 2, 1, 4), 1e8)
    gradient = jax.grad(lambda q: attend(q, q, q, jnp.ones((1, 1, 2, 2), bool)).sum())(q)
    assert np.isfinite(gradient).all()
