import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
from factories import PROPERTY, QUICK_COMPILE
from hypothesis import given
from hypothesis import strategies as st
from packed import random_rows

from jaxprorl.algorithms.correction import CORRECTIONS, correction_weight, effective_sample_share, is_sound, mismatch

LOW, HIGH = 0.5, 2.0
every_kind = pytest.mark.parametrize("kind", CORRECTIONS)
weight = functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)(correction_weight)


def test_cases_by_hand() -> None:
    # One row: ratios 1, 4, 1/4 (geometric mean 1), then 4, 4, 1/2 (geometric mean 2); then padding.
    ratio = np.array([[1, 4, 0.25, 4, 4, 0.5, 9]])
    segment_ids, mask = jnp.array([[1, 1, 1, 2, 2, 2, 0]]), jnp.array([[1, 1, 1, 1, 1, 1, 0]], jnp.float32)
    engine = jnp.full((1, 7), -3.0)
    old = engine + np.log(ratio)
    expected = {
        "off": [1, 1, 1, 1, 1, 1, 0],
        "truncated": [1, 2, 0.25, 2, 2, 0.5, 0],
        "icepop": [1, 0, 0, 0, 0, 0.5, 0],
        "geometric_mask": [1, 4, 0.25, 0, 0, 0, 0],
    }
    assert set(expected) == set(CORRECTIONS)
    for kind, values in expected.items():
        np.testing.assert_allclose(weight(kind, old, engine, LOW, 2.0 - 1e-3, segment_ids, mask)[0], values, rtol=1e-3)


@every_kind
@pytest.mark.parametrize("row_tokens", [1, 100, 8192])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_log_probs_give_a_weight_of_exactly_1_at_any_length(kind: str, row_tokens: int, dtype: str) -> None:
    logp = jnp.asarray(-10 * np.random.RandomState(0).uniform(size=(1, row_tokens)), dtype)
    ones = jnp.ones((1, row_tokens), jnp.float32)
    got = weight(kind, logp, logp, 0.999, 1.002, ones.astype(int), ones)
    assert got.dtype == "float32"
    assert (np.asarray(got) == 1).all()


@every_kind
@PROPERTY
@given(seed=st.integers(0, 2**32 - 1))
def test_weights_equal_a_loop(kind: str, seed: int) -> None:
    rows, random = random_rows(seed), np.random.RandomState(seed)
    old, engine = -1 + rows.numbers(random, 0.5), -1 + rows.numbers(random, 0.5)
    # The bounds lie where no ratio and no geometric mean of a seed comes within rounding of them.
    low, high = 0.8134217, 1.2712345
    with jax.enable_x64(True):
        weight_BS = np.asarray(weight(kind, old, engine, low, high, rows.segment_ids_BS, rows.mask_BS))
    for row, columns in rows.responses:
        np.testing.assert_allclose(
            weight_BS[row, columns], loops.correction(kind, old[row, columns], engine[row, columns], low, high), rtol=1e-9
        )
    assert (weight_BS[rows.mask_BS == 0] == 0).all()


@every_kind
def test_weights_are_constants_for_the_gradient(kind: str) -> None:
    rows, random = random_rows(0), np.random.RandomState(0)
    old, engine = (jnp.asarray(rows.numbers(random), jnp.float32) for _ in range(2))
    gradients = jax.grad(lambda *x: jnp.sum(correction_weight(kind, *x, LOW, HIGH, rows.segment_ids_BS, rows.mask_BS)), (0, 1))(old, engine)
    assert all((np.asarray(gradient) == 0).all() for gradient in gradients)


@every_kind
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e4, -1e4])
def test_what_stands_in_masked_places_does_not_matter(kind: str, poison: float) -> None:
    rows, random = random_rows(1), np.random.RandomState(1)
    clean = [rows.numbers(random).astype(np.float32) for _ in range(2)]
    poisoned = [np.where(rows.mask_BS > 0, x, poison) for x in clean]
    place = rows.segment_ids_BS, rows.mask_BS
    np.testing.assert_array_equal(weight(kind, *poisoned, LOW, HIGH, *place), weight(kind, *clean, LOW, HIGH, *place))
    for got, expected in zip(mismatch(*poisoned, rows.mask_BS).values(), mismatch(*clean, rows.mask_BS).values(), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert (np.asarray(got)[rows.mask_BS == 0] == 0).all()


@every_kind
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_gaps_give_finite_weights_and_measures(kind: str, gap: float) -> None:
    engine, ones = jnp.full((1, 3), -1.0), jnp.ones((1, 3), jnp.float32)
    assert np.isfinite(weight(kind, engine + gap, engine, LOW, HIGH, ones.astype(int), ones)).all()
    assert all(np.isfinite(value).all() for value in mismatch(engine + gap, engine, ones).values())
    np.testing.assert_array_equal(mismatch(engine + gap, engine, ones)["gap"], np.full((1, 3), abs(gap)))


def test_measures_by_hand() -> None:
    # r = 2: |delta| = 0.6931472, k3 = 2 - 1 - 0.6931472; r = 1/2: k3 = -1/2 + 0.6931472.
    engine = jnp.full((1, 3), -2.0)
    got = mismatch(engine + np.log([[2, 0.5, 7]]), engine, jnp.array([[1.0, 1.0, 0.0]]))
    expected = {
        "gap": [0.6931472, 0.6931472, 0],
        "k3": [0.3068528, 0.1931472, 0],
        "weight": [2, 0.5, 0],
        "weight_squared": [4, 0.25, 0],
    }
    assert set(got) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(got[name][0], values, rtol=1e-6)
    assert effective_sample_share(2.5, 4.25, 2) == pytest.approx(6.25 / 8.5)


@PROPERTY
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_the_effective_share_is_1_for_equal_weights_and_never_more(weights: list[float]) -> None:
    n = len(weights)
    share = effective_sample_share(sum(weights), sum(w**2 for w in weights), n)
    assert 1 / n * (1 - 1e-12) <= share <= 1 + 1e-12
    assert effective_sample_share(n * weights[0], n * weights[0] ** 2, n) == pytest.approx(1)


def test_no_tokens_have_no_effective_share() -> None:
    assert effective_sample_share(0.0, 0.0, 0) == 0.0


@pytest.mark.parametrize(
    ("logprobs", "sound"), [([-1, -2], True), ([], True), ([-1, np.nan], False), ([-np.inf, -1], False), ([np.inf], False)]
)
def test_a_log_prob_that_is_not_finite_is_found(logprobs: list[float], sound: bool) -> None:
    assert is_sound(np.array(logprobs, np.float32)) is sound
