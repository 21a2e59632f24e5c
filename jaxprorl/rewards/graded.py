"""What a reward returns: a finite real number, or that number together with its own word on whether the answer is right.

The reward is what advantages are taken of. Solving is what rates count. They are two things: a reward with a length penalty may be
negative for a right answer.
"""

import math
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

ACCEPTED = (
    "a reward is one finite real number (bool, int, float, Fraction, Decimal, a NumPy scalar or an array without dimensions), or "
    "jaxprorl.rewards.Graded(value, solved)"
)
LARGEST = float(np.finfo(np.float32).max)  # advantages are float32
ROUNDING = 1e-9  # graders that average floats may miss a threshold by rounding


class Graded(NamedTuple):
    """A reward that says itself whether the answer solves the question. Without it, `grading.solved_from` decides."""

    value: Any  # any number that a reward may be
    solved: Any  # bool


class Verdict(NamedTuple):
    """What one call of a reward says; `solved` is None where the reward leaves that to the threshold."""

    value: float
    solved: bool | None


def verdict(returned: Any) -> Verdict:
    """Reads what a reward returned.

    Raises:
        TypeError: it is no number, or `Graded.solved` is no bool.
        ValueError: it is a number that is not finite, or beyond float32.
    """
    if not isinstance(returned, Graded):
        return Verdict(_number(returned), None)
    solved = _plain(returned.solved)
    if not isinstance(solved, bool):
        raise TypeError(f"reward returned Graded with solved = {_described(returned.solved)}; solved is a bool")
    return Verdict(_number(returned.value), solved)


def is_solved(value: float, solved: bool | None, solved_from: float) -> bool:
    """The grader's own word if it gives one, else whether the reward reaches the threshold."""
    return value >= solved_from - ROUNDING if solved is None else solved


def _plain(value: Any) -> Any:
    """The Python value of a scalar or of an array without dimensions, whichever library made it; anything else as it is."""
    if isinstance(value, np.ma.MaskedArray) or getattr(value, "shape", None) != () or not hasattr(value, "item"):
        return value
    return value.item()


def _number(returned: Any) -> float:
    value: Any = _plain(returned)
    if not isinstance(value, (Real, Decimal)):
        raise TypeError(f"reward returned {_described(returned)}; {ACCEPTED}")
    try:
        number = float(value)
    except (OverflowError, ValueError):  # an int or Fraction beyond float64; a signaling NaN
        number = math.inf
    if math.isfinite(number) and abs(number) <= LARGEST:
        return number
    what = f"an {type(value).__name__} of {value.bit_length()} bits" if hasattr(value, "bit_length") else _described(returned)
    raise ValueError(f"reward returned {what}, which is not finite or beyond float32 (about 3.4e38); {ACCEPTED}")


def _described(value: Any) -> str:
    if value is None:
        return "NoneType (is a return missing?)"
    try:
        text = repr(value)
    except Exception:  # a user's object whose __repr__ raises
        return f"a {type(value).__name__}"
    text = text if len(text) <= 60 else text[:60] + "…"
    return text if isinstance(value, float) else f"{type(value).__name__} {text}"
