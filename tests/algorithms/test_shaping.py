import dataclasses
from collections.abc import Callable

import loops
import numpy as np
import pytest
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.algorithms.shaping import (
    STOPPING,
    Shaping,
    cosine_is_on,
    cosine_length,
    non_termination_penalty,
    overlong_penalty,
    shaped,
    stop_properly,
)

NOTHING = Shaping("off", 100, 0.5, 20, 0.0, 0.0, 0.0, 0.0, 0, 0)
rewards = st.floats(-2, 2)


def test_the_overlong_ramp_by_hand() -> None:
    # DAPO's own sizes: limit 20,480, buffer 4,096, penalty 1; the ramp starts at 16,384.
    tokens = np.array([[0, 16384, 17408, 18432, 20480, 99999]])
    np.testing.assert_array_equal(overlong_penalty(tokens, 20480, 4096, 1.0), [[0, 0, -0.25, -0.5, -1, -1]])
    np.testing.assert_array_equal(overlong_penalty(tokens, 20480, 4096, 0.5), [[0, 0, -0.125, -0.25, -0.5, -0.5]])


@PROPERTY
@given(st.lists(st.integers(0, 300), min_size=2, max_size=20), st.integers(1, 200), st.floats(0, 3), st.data())
def test_the_overlong_ramp_falls_stays_in_bounds_and_equals_a_loop(
    lengths: list[int], limit: int, penalty: float, data: st.DataObject
) -> None:
    buffer = data.draw(st.integers(1, limit))
    ramp = overlong_penalty(np.array(sorted(lengths)), limit, buffer, penalty)
    assert (np.diff(ramp) <= 0).all() and (ramp <= 0).all() and (ramp >= -penalty).all()
    np.testing.assert_allclose(ramp, [loops.overlong(tokens, limit, buffer, penalty) for tokens in sorted(lengths)], rtol=1e-12, atol=1e-12)


def test_answers_that_never_stop_lose_the_penalty() -> None:
    np.testing.assert_array_equal(non_termination_penalty(np.array([[True, False]]), 0.5), [[0, -0.5]])


def test_stop_properly_by_hand() -> None:
    reward, stopped = np.array([[1, 1, 0.5, 0, -1]]), np.array([[True, False, False, False, False]])
    np.testing.assert_array_equal(stop_properly(reward, stopped, 0.0), [[1, 0, 0, 0, -1]])
    np.testing.assert_array_equal(stop_properly(reward, stopped, 0.5), [[1, 0.5, 0.25, 0, -1]])
    np.testing.assert_array_equal(stop_properly(reward, stopped, 1.0), reward)


def test_the_cosine_term_by_hand() -> None:
    # From 1 at 0 tokens to 0.2 at 100: the middle is 0.6, and cos(pi / 3) = 1/2 gives 0.2 + 0.4 x 1.5 = 0.8 at 100 / 3.
    tokens = np.array([[0, 50, 100, 200]])
    np.testing.assert_allclose(cosine_length(tokens, 100, 0.2, 1.0), [[1, 0.6, 0.2, 0.2]], rtol=1e-12)
    assert cosine_length(np.array([[1]]), 3, 0.2, 1.0)[0, 0] == pytest.approx(0.8)


@PROPERTY
@given(st.lists(st.integers(0, 300), min_size=2, max_size=20), st.integers(1, 200), st.floats(-2, 2), st.floats(0, 2))
def test_the_cosine_term_falls_with_the_length_and_stays_in_bounds(lengths: list[int], limit: int, minimum: float, width: float) -> None:
    term = cosine_length(np.array(sorted(lengths)), limit, minimum, minimum + width)
    slack = 1e-12
    assert (np.diff(term) <= slack).all() and (term >= minimum - slack).all() and (term <= minimum + width + slack).all()


def test_the_cosine_term_goes_on_and_off() -> None:
    assert [step for step in range(1300) if cosine_is_on(step, 100, 500)] == [*range(100), *range(600, 700), *range(1200, 1300)]
    assert all(cosine_is_on(step, 1, 0) for step in range(5))
    assert not any(cosine_is_on(step, 0, off) for step in range(5) for off in (0, 3))


@pytest.mark.parametrize("stopping", STOPPING)
@PROPERTY
@given(reward=rewards, tokens=st.integers(0, 100))
def test_an_answer_never_gains_by_not_stopping(stopping: str, reward: float, tokens: int) -> None:
    settings = dataclasses.replace(NOTHING, stopping=stopping)
    pair = shaped(np.full((1, 2), reward), np.array([[tokens, 100]]), np.array([[True, False]]), 0, settings)
    assert pair[0, 1] <= pair[0, 0] <= reward


@pytest.mark.parametrize("stopping", STOPPING)
@PROPERTY
@given(better=rewards, worse=rewards, tokens=st.integers(0, 100), stopped=st.booleans())
def test_the_order_of_two_answers_alike_in_length_and_stop_is_kept(
    stopping: str, better: float, worse: float, tokens: int, stopped: bool
) -> None:
    better, worse = max(better, worse), min(better, worse)
    settings = dataclasses.replace(NOTHING, stopping=stopping, cosine_weight=0.3, cosine_maximum=1.0, cosine_on_steps=1)
    pair = shaped(np.array([[better, worse]]), np.full((1, 2), tokens), np.full((1, 2), stopped), 0, settings)
    assert pair[0, 0] >= pair[0, 1]


def test_shaping_by_hand() -> None:
    reward, tokens, stopped = np.array([[1, 1, 0, 1]]), np.array([[50, 100, 90, 100]]), np.array([[True, False, True, True]])
    expected = {
        "off": [1, 1, 0, 1],
        "overlong": [1, 0.5, -0.25, 0.5],  # the ramp runs from 80 to 100 tokens: half of the penalty of 0.5 at 90
        "non_termination": [1, 0.5, 0, 1],  # an answer that stops with its last token did stop
        "stop_properly": [1, 0, 0, 1],
    }
    assert set(expected) == set(STOPPING)
    cosine = {"cosine_weight": 0.5, "cosine_minimum": 0.0, "cosine_maximum": 1.0, "cosine_on_steps": 2, "cosine_off_steps": 1}
    for stopping, values in expected.items():
        settings = dataclasses.replace(NOTHING, stopping=stopping)
        got = shaped(reward, tokens, stopped, 0, settings)
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, [values])
        for step, on in enumerate([True, True, False, True]):
            with_cosine = shaped(reward, tokens, stopped, step, dataclasses.replace(settings, **cosine))
            # cos(pi 90 / 100) = -0.9510565: the term of 90 tokens is 0.0244717.
            np.testing.assert_allclose(with_cosine - got, [[0.25 * on, 0, 0.0244717 / 2 * on, 0]], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: overlong_penalty(np.array([1]), 10, 0, 1.0), "buffer_tokens is 0; it must be within 1 and max_response_tokens = 10"),
        (lambda: overlong_penalty(np.array([1]), 10, 11, 1.0), "buffer_tokens is 11"),
        (lambda: overlong_penalty(np.array([1]), 10, 5, -1.0), "penalty is -1.0; it must not be negative"),
        (lambda: non_termination_penalty(np.array([True]), float("nan")), "penalty is nan"),
        (lambda: stop_properly(np.array([1]), np.array([True]), 1.5), "coefficient is 1.5; it must be within 0"),
        (lambda: cosine_length(np.array([1]), 10, 1.0, 0.0), "minimum is 1.0, maximum 0.0"),
        (lambda: cosine_is_on(0, -1, 5), "on_steps is -1"),
        (lambda: cosine_is_on(0, 1, -5), "off_steps is -5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
