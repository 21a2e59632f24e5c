import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import PROPERTY, QUICK_COMPILE
from hypothesis import given
from hypothesis import strategies as st
from packed import random_rows

from jaxprorl.algorithms.sequences import masked, sequence_mean, sequence_sum

# Two sequences and padding; the first place of each is its prompt's, the last is its last token's, which predicts nothing.
SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]])
MASK = jnp.array([[0, 1, 1, 0, 1, 1, 0, 0, 0]], jnp.float32)
compiled_sum = jax.jit(sequence_sum, compiler_options=QUICK_COMPILE)
X = jnp.array([[9, 1, 2, 9, 4, 8, 9, 9, 9]], jnp.float32)


def test_sums_and_means_by_hand() -> None:
    np.testing.assert_array_equal(sequence_sum(X, SEGMENTS, MASK), [[3, 3, 3, 3, 12, 12, 12, 0, 0]])
    np.testing.assert_array_equal(sequence_mean(X, SEGMENTS, MASK), [[1.5, 1.5, 1.5, 1.5, 6, 6, 6, 0, 0]])


def test_a_sequence_without_response_tokens_has_0() -> None:
    np.testing.assert_array_equal(sequence_mean(X, SEGMENTS, MASK.at[0, 1:3].set(0)), [[0, 0, 0, 0, 6, 6, 6, 0, 0]])


@pytest.mark.parametrize("row_tokens", [1, 2, 3, 7, 8, 9])
def test_one_sequence_of_any_length(row_tokens: int) -> None:
    ones = jnp.ones((2, row_tokens))
    np.testing.assert_array_equal(sequence_sum(ones, ones.astype(int), ones), row_tokens * np.ones((2, row_tokens)))


@PROPERTY
@given(seed=st.integers(0, 2**32 - 1))
def test_sums_equal_a_loop_and_all_tokens_of_a_sequence_get_the_same_bits(seed: int) -> None:
    rows = random_rows(seed)
    x_BS = rows.numbers(np.random.RandomState(seed)).astype(np.float32)
    x_BS[0] *= 1e6  # what one row holds does not blur the others
    sum_BS = np.asarray(compiled_sum(x_BS, rows.segment_ids_BS, rows.mask_BS))
    expected_BS = np.zeros(x_BS.shape)
    for row, columns in rows.responses:
        values = [float(x_BS[row, column]) for column in columns]
        own = rows.segment_ids_BS[row] == rows.segment_ids_BS[row, columns[0]]
        expected_BS[row, own] = math.fsum(values)
        assert len(set(sum_BS[row, own])) == 1
        # Four rounds of float32 additions of twelve numbers at most.
        assert abs(sum_BS[row, columns[0]] - math.fsum(values)) <= 4 * 2**-24 * math.fsum(map(abs, values))
    np.testing.assert_array_equal(sum_BS == 0, expected_BS == 0)


def test_a_huge_neighbour_leaves_no_rounding_behind() -> None:
    x = jnp.array([[1e8, 1e8, 1e-8, 2e-8]], jnp.float32)
    sums = sequence_sum(x, jnp.array([[1, 1, 2, 2]]), jnp.ones((1, 4)))
    np.testing.assert_allclose(sums[0], [2e8, 2e8, 3e-8, 3e-8], rtol=1e-6)


def test_gradients_are_right_and_stay_within_the_sequence() -> None:
    # d/dx of sum_t c_t mean_t is, at a response token, the sum of its sequence's c over its number of response tokens.
    c = jnp.arange(9.0)[None]
    gradient = jax.grad(lambda x: jnp.sum(c * sequence_mean(x, SEGMENTS, MASK)))(X)
    np.testing.assert_allclose(gradient, [[0, 3, 3, 0, 7.5, 7.5, 0, 0, 0]])  # (0 + 1 + 2 + 3) / 2, (4 + 5 + 6) / 2


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_places_do_not_matter(poison: float) -> None:
    def loss(x: jax.Array) -> jax.Array:
        clean = masked(x, MASK)
        return jnp.sum(jnp.exp(clean) * sequence_mean(clean, SEGMENTS, MASK))

    poisoned = jnp.where(MASK > 0, X, poison)
    value, gradient = jax.value_and_grad(loss)(poisoned)
    expected, expected_gradient = jax.value_and_grad(loss)(X)
    assert value == expected
    np.testing.assert_array_equal(gradient, expected_gradient)
    assert (np.asarray(gradient)[MASK == 0] == 0).all()


def test_memory_grows_with_the_row_not_its_square() -> None:
    shapes = [jax.ShapeDtypeStruct((1, 4096), dtype) for dtype in ("float32", "int32", "float32")]
    compiled = jax.jit(jax.grad(lambda *rows: jnp.sum(sequence_mean(*rows)))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096 / 4
