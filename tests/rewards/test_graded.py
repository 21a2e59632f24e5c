import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import sympy

from jaxprorl.rewards import Graded
from jaxprorl.rewards.graded import LARGEST, is_solved, verdict


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (True, 1.0),
        (np.bool_(False), 0.0),
        (-3, -3.0),
        (1.5, 1.5),
        (np.float16(0.25), 0.25),
        (np.longdouble(0.5), 0.5),
        (np.int8(-2), -2.0),
        (ml_dtypes.bfloat16(0.5), 0.5),
        (np.array(0.75), 0.75),
        (np.array(True), 1.0),
        (jnp.float32(0.25), 0.25),
        (jnp.array(1), 1.0),
        (Fraction(1, 4), 0.25),
        (Decimal("-0.125"), -0.125),
        (sympy.Rational(1, 8), 0.125),
        (LARGEST, LARGEST),
    ],
    ids=repr,
)
def test_any_finite_real_number_is_a_reward(returned: Any, value: float) -> None:
    said = verdict(returned)
    assert said == (value, None)
    assert type(said.value) is float


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned NoneType"),
        ("1.0", "returned str '1.0'"),
        ([0.5], "returned list \\[0.5\\]"),
        ((0.5,), "returned tuple"),
        (np.array([0.5]), "returned ndarray array\\(\\[0.5\\]\\)"),
        (np.array("0.5"), "returned ndarray"),
        (np.ma.masked, "returned MaskedConstant"),
        (1 + 0j, "returned complex"),
        (np.complex64(1), "returned complex64"),
        ({"score": 1.0}, "returned dict"),
        (Silent(), "returned a Silent"),
        (Graded(1.0, None), "solved = NoneType"),
        (Graded(1.0, 0.7), "solved = 0.7; solved is a bool"),
        (Graded(None, True), "returned NoneType"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_is_named_beside_what_is_accepted(returned: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says) as error:
        verdict(returned)
    assert "solved is a bool" in str(error.value) or "finite real number (bool, int, float, Fraction, Decimal" in str(error.value)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        (np.float32("nan"), "returned float32 np.float32\\(nan\\)"),
        (10**400, "an int of 1329 bits"),
        (Fraction(10**400, 3), "returned Fraction"),
        (Decimal("1e400"), "returned Decimal"),
        (Decimal("sNaN"), "returned Decimal"),
        (1e39, "returned 1e\\+39"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_numbers_that_are_not_finite_or_too_large_are_named(returned: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        verdict(returned)


def test_a_reward_may_say_itself_what_is_solved() -> None:
    assert verdict(Graded(-0.5, True)) == (-0.5, True)
    assert verdict(Graded(np.float32(2), np.bool_(False))) == (2.0, False)
    assert verdict(Graded(Fraction(1, 2), solved=np.array(True))) == (0.5, True)


def test_else_the_threshold_says_it_up_to_rounding() -> None:
    assert [is_solved(value, None, 1.0) for value in (1.0, 0.1 + 0.2 + 0.7, 1.5, 0.999, -1.0)] == [True, True, True, False, False]
    assert is_solved(0.5, None, 0.5)
    assert is_solved(-1.0, None, -2.0)
    assert is_solved(-1.0, True, 1.0)
    assert not is_solved(5.0, False, 1.0)
