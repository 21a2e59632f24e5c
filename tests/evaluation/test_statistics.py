"""Intervals against scipy, against published numbers and by hand."""

import json
import math

import pytest
from factories import summary_of
from scipy.stats import binomtest

from jaxprorl.evaluation.statistics import (
    event_fields,
    gain_rows,
    intervals_touch,
    newcombe_difference_interval,
    rate_text,
    solve_summary,
    wilson_interval,
)
from jaxprorl.types import Score


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 400), (1, 400), (131, 400), (399, 400), (400, 400), (524, 1600)])
def test_wilson_equals_scipy(successes, n, confidence):
    expected = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_by_hand():
    # p = 1/2, n = 4, z = 1.959964: centre 1/2, half = z * sqrt(1/16 + z^2/64) / (1 + z^2/4)
    z = 1.959963984540054
    half = z * math.sqrt(1 / 16 + z * z / 64) / (1 + z * z / 4)
    assert wilson_interval(2, 4) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-15)
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == 1.0


@pytest.mark.parametrize(("successes", "n", "confidence"), [(0, 0, 0.95), (-1, 5, 0.95), (6, 5, 0.95), (1, 5, 1.0), (1, 5, 0.0)])
def test_wilson_refuses(successes, n, confidence):
    with pytest.raises(ValueError):
        wilson_interval(successes, n, confidence)


@pytest.mark.parametrize(
    ("after", "before", "expected"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table II, method 10
        ((56, 70), (48, 80), (0.0524, 0.3339)),
        ((9, 10), (3, 10), (0.1705, 0.8090)),
        ((10, 10), (0, 20), (0.6791, 1.0)),
        ((5, 56), (0, 29), (-0.0381, 0.1926)),
    ],
)
def test_newcombe_equals_the_paper(after, before, expected):
    assert newcombe_difference_interval(*before, *after) == pytest.approx(expected, abs=5e-5)


def test_newcombe_turns_its_sign_with_the_arguments():
    low, high = newcombe_difference_interval(48, 80, 56, 70)
    assert newcombe_difference_interval(56, 70, 48, 80) == pytest.approx((-high, -low), abs=1e-15)
    with pytest.raises(ValueError, match="at least one item"):
        newcombe_difference_interval(0, 0, 1, 2)


def test_intervals_touch():
    assert intervals_touch((0.1, 0.3), (0.3, 0.5))
    assert intervals_touch((0.3, 0.5), (0.1, 0.3))
    assert intervals_touch((0.1, 0.9), (0.4, 0.5))
    assert not intervals_touch((0.1, 0.3), (0.31, 0.5))
    assert not intervals_touch((0.31, 0.5), (0.1, 0.3))


def test_solve_summary_by_hand():
    summary = summary_of({"b": [1.0, 0.0], "a": [1.0, 0.5, 1.0 - 1e-12, 0.999]})
    assert list(summary["per_task"]) == ["a", "b"]
    assert summary["per_task"]["a"] == {
        "solve_rate": 0.5,  # 1 - 1e-12 is rounding, 0.999 is not
        "mean_score": pytest.approx(3.499 / 4),
        "ci95": list(wilson_interval(2, 4)),
        "n": 4,
        "ungraded": 0,
    }
    assert summary["n"] == 6
    assert summary["solve_rate"] == 0.5
    assert summary["mean_score"] == pytest.approx(4.499 / 6)
    assert summary["ci95"] == list(wilson_interval(3, 6))


@pytest.mark.parametrize(("scores", "message"), [({}, "no task"), ({"a": []}, "'a' has no"), ({"a": [math.nan]}, "'a' has a score")])
def test_solve_summary_refuses(scores, message):
    with pytest.raises(ValueError, match=message):
        summary_of(scores)


@pytest.mark.parametrize(
    ("values", "rate", "mean", "ungraded"),
    [
        ([1.0, None], 1.0, 1.0, 1),
        ([None, 0.0, 1.0, None], 0.5, 0.5, 2),
        ([None], None, None, 1),
        ([-2.0, 3.5, None], 0.5, 0.75, 1),  # rewards need not lie between 0 and 1
    ],
)
def test_what_could_not_be_graded_is_in_no_rate_and_is_counted(values, rate, mean, ungraded):
    summary = summary_of({"a": values, "b": [0.0]})
    part = summary["per_task"]["a"]
    assert (part["solve_rate"], part["mean_score"], part["ungraded"], part["n"]) == (rate, mean, ungraded, len(values) - ungraded)
    assert part["ci95"] == (list(wilson_interval(round(rate * part["n"]), part["n"])) if part["n"] else None)
    assert (summary["n"], summary["ungraded"]) == (part["n"] + 1, ungraded)


def test_a_score_is_solved_by_the_word_of_its_grader_not_by_its_size():
    scores = [Score(-1.0, True, "scored", "g", "v", 0.0), Score(5.0, False, "scored", "g", "v", 0.0)]
    assert solve_summary({"a": scores})["solve_rate"] == 0.5


def test_rates_in_words():
    assert rate_text(summary_of({"a": [1.0, 0.0]})) == "0.500"
    assert rate_text(summary_of({"a": [1.0, None]})) == "1.000 (1 ungraded)"
    assert rate_text(summary_of({"a": [None]})) == "none (1 ungraded)"


def test_rows_with_ungraded_items_by_hand():
    before = summary_of({"some": [1.0, None, 0.0], "none": [None, None], "new": [None]})
    after = summary_of({"some": [1.0, 1.0, 0.0], "none": [None, None], "new": [1.0]})
    some, none, new, total = sorted(gain_rows(before, after, before), key=lambda row: ["some", "none", "new", "all"].index(row.task))
    assert (some.before, some.after, some.n, some.ungraded, some.greedy_ungraded) == (0.5, 2 / 3, 3, (1, 0), (1, 0))
    assert some.gain_ci95 == newcombe_difference_interval(1, 2, 2, 3)
    assert (none.before, none.gain, none.gain_ci95, none.clear, none.n, none.ungraded) == (None, None, None, False, 0, (2, 2))
    assert (new.before, new.after, new.gain, new.clear) == (None, 1.0, None, False)
    assert (total.before, total.after, total.ungraded) == (0.5, 0.75, (4, 2))


def test_a_summary_of_before_the_count_of_ungraded_items_is_read():
    old = json.loads(json.dumps(summary_of({"a": [1.0, 0.0]})))
    for part in (old, *old["per_task"].values()):
        del part["ungraded"]
    a, total = gain_rows(old, summary_of({"a": [1.0, None]}))
    assert (a.before, a.after, a.ungraded, total.ungraded) == (0.5, 1.0, (0, 1), (0, 1))


def test_gain_rows_by_hand():
    before = summary_of({"easy": [1.0] * 3 + [0.0], "hard": [0.0] * 400})
    after = summary_of({"easy": [1.0] * 4, "hard": [1.0] * 300 + [0.5] * 100})
    easy, hard, total = gain_rows(before, after, None, after)
    assert [row.task for row in (easy, hard, total)] == ["easy", "hard", "all"]
    assert (easy.gain, easy.clear, easy.n) == (0.25, False, 4)  # four items cannot tell
    assert (hard.gain, hard.clear, hard.mean_after) == (0.75, True, 0.875)
    assert hard.gain_ci95 == newcombe_difference_interval(0, 400, 300, 400)
    assert (total.n, total.before, total.after) == (404, 3 / 404, 304 / 404)
    assert total.gain_ci95 == newcombe_difference_interval(3, 404, 304, 404)
    assert (hard.greedy_before, hard.greedy_after, total.greedy_after) == (None, 0.75, 304 / 404)
    with pytest.raises(ValueError, match="tasks differ"):
        gain_rows(before, summary_of({"easy": [1.0]}))


def test_an_event_counts_what_was_not_graded_by_task() -> None:
    told = event_fields(summary_of({"some": [1.0, 0.0, None], "none": [None], "all": [1.0]}))
    assert told["per_task"] == {"some": 0.5, "none": None, "all": 1.0}
    assert (told["ungraded"], told["ungraded_per_task"]) == (2, {"some": 1, "none": 1})
    assert "ungraded_per_task" not in event_fields(summary_of({"all": [1.0]}))
