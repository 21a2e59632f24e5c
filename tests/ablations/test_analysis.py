"""Paired differences against scipy and by hand; corrections by hand; what a design can see."""

import math
from itertools import product

import numpy as np
import pytest
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxprorl.ablations import analysis
from jaxprorl.ablations.analysis import compare, corrected_p, levels_of_tests, minimum_detectable, sign_flip_p, t_interval

A = {0: 0.91, 1: 0.88, 2: 0.93, 3: 0.90, 4: 0.89}
B = {0: 0.85, 1: 0.86, 2: 0.86, 3: 0.87, 4: 0.84}
CLOSE = {"rel": 1e-9}  # two ways of computing the same in double precision


def one(a: dict[int, float], b: dict[int, float], **changes: object) -> analysis.Comparison:
    settings = {"confidence": 0.95, "correction": "holm", "power": 0.8} | changes
    return compare({"a": a, "b": b}, [("a", "b")], **settings)[0]  # type: ignore[arg-type]


def test_interval_and_p_are_those_of_scipys_paired_t_test() -> None:
    found, expected = one(A, B), stats.ttest_rel(list(A.values()), list(B.values()))
    low, high = expected.confidence_interval(0.95)
    assert found.interval == (pytest.approx(low, **CLOSE), pytest.approx(high, **CLOSE))
    assert found.p_value == pytest.approx(expected.pvalue, **CLOSE)
    assert found.interval_corrected == found.interval, "one comparison: nothing to correct for"


def test_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, sd 1, t quantile 4.302653 at 2 degrees of freedom (tables)."""
    found = one({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert (found.mean, found.sd, found.seeds, found.differences) == (2.0, 1.0, (0, 1, 2), (1.0, 2.0, 3.0))
    half = 4.302653 / math.sqrt(3)
    assert found.interval == (pytest.approx(2 - half, abs=1e-6), pytest.approx(2 + half, abs=1e-6))
    assert found.sign_flip_p == 2 / 8, "all of one sign: only this assignment and its opposite are as far out"
    assert found.verdict == "not distinguishable", "three seeds are few"
    assert one({s: v + s / 100 for s, v in A.items()}, B).verdict == "better"
    assert one(B, {s: v + s / 100 for s, v in A.items()}).verdict == "worse"


def test_pairs_are_the_seeds_that_both_arms_finished() -> None:
    found = one(A, {seed: B[seed] for seed in (1, 3)} | {9: 1.0})
    assert found.seeds == (1, 3)
    assert found.differences == (A[1] - B[1], A[3] - B[3])


@pytest.mark.parametrize("seeds", [0, 1])
def test_fewer_than_two_pairs_say_nothing(seeds: int) -> None:
    found = one(dict(list(A.items())[:seeds]), B)
    assert (found.sd, found.interval, found.p_value, found.interval_corrected, found.detectable) == (None,) * 5
    assert found.verdict == "no pairs"
    assert (found.mean is None) == (seeds == 0)


def test_differences_all_alike_are_no_evidence() -> None:
    """Two seeds that agree by chance (or by the grid of solve rates) would give an interval of no width."""
    found = one({0: 0.5, 1: 0.7}, {0: 0.4, 1: 0.6})
    assert found.interval is None and found.verdict == "not distinguishable"
    assert one(A, A).verdict == "not distinguishable"


def test_noise_is_rarely_called_a_difference() -> None:
    """Of 400 families of three comparisons without any difference, about 5 % may show one; 0.05 + 3 sd of the binomial = 0.083."""
    random = np.random.RandomState(0)
    wrong = 0
    for _ in range(400):
        arms = {name: dict(enumerate(random.standard_normal(5))) for name in "abcd"}
        found = compare(arms, [("b", "a"), ("c", "a"), ("d", "a")], 0.95, "holm", 0.8)
        wrong += any(c.verdict != "not distinguishable" for c in found)
    assert wrong / 400 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_sign_flips_by_hand() -> None:
    assert sign_flip_p([]) is None
    assert sign_flip_p([0.3]) == 1.0
    # sums over signs of (3, 1, -1): |3|, |5|, |1|, |3| and their opposites; seen |3|: 6 of 8 are as far out
    assert sign_flip_p([3.0, 1.0, -1.0]) == 6 / 8
    assert sign_flip_p([0.1] * 5) == 2 / 32
    assert sign_flip_p([0.0] * 4) == 1.0
    assert sign_flip_p([1.0] * (analysis.MAX_FLIPPED + 1)) is None


@PROPERTY
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=8))
def test_sign_flips_agree_with_scipy(values: list[int]) -> None:
    """Whole numbers: sums are exact, so that ties are ties for both."""
    flipped = stats.permutation_test((np.array(values, float),), np.sum, permutation_type="samples", n_resamples=np.inf)
    both = np.array([abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in product((1, -1), repeat=len(values))])
    assert sign_flip_p([float(v) for v in values]) == np.mean(both >= abs(sum(values)))
    if len(set(flipped.null_distribution)) > 1:
        assert sign_flip_p([float(v) for v in values]) == pytest.approx(min(1.0, flipped.pvalue), abs=1e-12)


def test_holm_by_hand() -> None:
    """P 0.01, 0.04, 0.03 of three: 3 x 0.01 = 0.03; 2 x 0.03 = 0.06; 1 x 0.04 raised to 0.06."""
    assert corrected_p([0.01, 0.04, 0.03], "holm") == pytest.approx([0.03, 0.06, 0.06])
    assert corrected_p([0.01, 0.04, 0.03], "bonferroni") == pytest.approx([0.03, 0.12, 0.09])
    assert corrected_p([0.01, 0.04, 0.03], "none") == [0.01, 0.04, 0.03]
    assert corrected_p([0.6, None, 0.01], "holm") == pytest.approx([1.0, None, 0.03]), "a comparison without data counts"
    # 0.01 <= 0.05 / 3 is rejected; 0.03 > 0.05 / 2 is not, and holds the next one at the same level
    assert levels_of_tests([0.01, 0.04, 0.03], 0.05, "holm") == pytest.approx([0.05 / 3, 0.025, 0.025])
    assert levels_of_tests([0.01, 0.02, 0.03], 0.05, "holm") == pytest.approx([0.05 / 3, 0.025, 0.05])
    assert levels_of_tests([0.01, 0.02, None], 0.05, "bonferroni") == pytest.approx([0.05 / 3] * 3)
    assert levels_of_tests([0.01, 0.02], 0.05, "none") == [0.05, 0.05]


@PROPERTY
@given(st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=5), min_size=1, max_size=5), st.sampled_from(analysis.CORRECTIONS))
def test_corrected_intervals_and_corrected_p_never_contradict_each_other(series: list[list[float]], correction: str) -> None:
    values = {f"arm{i}": {seed: 0.2 + v for seed, v in enumerate(row)} for i, row in enumerate(series)}
    values["control"] = dict.fromkeys(range(5), 0.0)
    for found in compare(values, [(name, "control") for name in values if name != "control"], 0.95, correction, 0.8):
        if found.p_corrected is None or abs(found.p_corrected - 0.05) < 1e-9:
            continue
        assert found.interval_corrected is not None
        excludes = not found.interval_corrected[0] <= 0 <= found.interval_corrected[1]
        assert excludes == (found.p_corrected < 0.05)


def test_the_detectable_difference_is_found_as_often_as_promised() -> None:
    """Simulated, 4,000 experiments of 6 pairs; tolerance 4 sd of the share."""
    size = minimum_detectable(2.0, 6, 0.05, 0.8)
    random = np.random.RandomState(1)
    draws = size + 2.0 * random.standard_normal((4000, 6))
    tested = stats.ttest_1samp(draws, 0.0, axis=1)
    share = np.mean((tested.pvalue <= 0.05) & (tested.statistic > 0))
    assert share == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / 4000))


def test_the_detectable_difference_agrees_with_textbooks() -> None:
    """Cohen's d_z = 0.5 needs 34 pairs for 80 % power at 5 %, two-sided."""
    assert minimum_detectable(1.0, 34, 0.05, 0.8) < 0.5 < minimum_detectable(1.0, 33, 0.05, 0.8)
    assert minimum_detectable(3.0, 8, 0.01, 0.9) == pytest.approx(3 * minimum_detectable(1.0, 8, 0.01, 0.9))
    assert math.isfinite(minimum_detectable(1.0, 2, 0.05 / 6, 0.95))


def test_an_interval_needs_no_finite_precision_luck() -> None:
    assert t_interval([0.1 + 0.2 - 0.3, 0.0], 0.05) is None, "rounding is no spread"
