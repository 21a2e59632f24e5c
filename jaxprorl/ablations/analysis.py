"""Differences between arms that share their seeds: size, interval, tests, correction for several comparisons, what could have been seen.

The t interval rests on differences that are independent and about normal over seeds, which a handful of seeds cannot check; the sign-flip
test beside it needs only that a difference is as likely to be positive as negative when arms are equal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev

from scipy import optimize, stats

CORRECTIONS = ("holm", "bonferroni", "none")
MAX_FLIPPED = 16  # pairs up to which all 2^n sign flips are counted


@dataclass(frozen=True)
class Comparison:
    """One arm against another over the seeds that both finished; differences are arm - control, in the metric's unit.

    Attributes:
        arm, control: their names.
        seeds: of the pairs.
        differences: one per seed.
        mean: of the differences; None without a pair.
        sd: their standard deviation; None with fewer than two pairs.
        interval: paired t interval at the plan's confidence; None where there is no spread to judge by.
        p_value: two-sided, of the paired t test; None like `interval`.
        sign_flip_p: exact, two-sided; None without pairs or with more than MAX_FLIPPED.
        p_corrected: `p_value` corrected for the number of comparisons planned.
        interval_corrected: at the level at which the correction tests this comparison: it leaves 0 out exactly if that test rejects.
        detectable: the mean difference that would be found with the plan's power if `sd` were the true one; None like `interval`.
    """

    arm: str
    control: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float | None
    sd: float | None
    interval: tuple[float, float] | None
    p_value: float | None
    sign_flip_p: float | None
    p_corrected: float | None
    interval_corrected: tuple[float, float] | None
    detectable: float | None

    @property
    def verdict(self) -> str:
        """Of the arm, where more is better: "better", "worse", "not distinguishable", or "no pairs" with fewer than two."""
        if len(self.differences) < 2:
            return "no pairs"
        if self.interval_corrected is None or self.interval_corrected[0] <= 0 <= self.interval_corrected[1]:
            return "not distinguishable"
        return "better" if self.interval_corrected[0] > 0 else "worse"


def compare(
    values: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]], confidence: float, correction: str, power: float
) -> list[Comparison]:
    """All planned comparisons.

    Args:
        values: arm -> seed -> metric, of finished runs; pairs are formed over the seeds that both arms have.
        pairs: (arm, control); a comparison without data still counts as one of those corrected for.
        correction: one of CORRECTIONS.
        power: of `detectable`.
    """
    shared = [sorted(values.get(arm, {}).keys() & values.get(control, {}).keys()) for arm, control in pairs]
    series = [[values[a][seed] - values[c][seed] for seed in seeds] for (a, c), seeds in zip(pairs, shared, strict=True)]
    p_values = [paired_p(differences) for differences in series]
    level, alphas = 1 - confidence, levels_of_tests(p_values, 1 - confidence, correction)
    corrected = corrected_p(p_values, correction)
    found = []
    for (arm, control), seeds, differences, p, p_corrected, alpha in zip(pairs, shared, series, p_values, corrected, alphas, strict=True):
        found.append(
            Comparison(
                arm, control, tuple(seeds), tuple(differences),
                mean=fmean(differences) if differences else None,
                sd=stdev(differences) if len(differences) > 1 else None,
                interval=t_interval(differences, level),
                p_value=p,
                sign_flip_p=sign_flip_p(differences),
                p_corrected=p_corrected,
                interval_corrected=t_interval(differences, alpha),
                detectable=None if p is None else minimum_detectable(stdev(differences), len(differences), alpha, power),
            )
        )  # fmt: skip
    return found


def has_spread(differences: Sequence[float]) -> bool:
    """Whether a t statistic means anything: two differences or more, not all alike up to the rounding of a subtraction."""
    if len(differences) < 2:
        return False
    return max(differences) - min(differences) > 1e-12 * max(1.0, *(abs(difference) for difference in differences))


def t_interval(differences: Sequence[float], level: float) -> tuple[float, float] | None:
    """Interval of the mean at confidence 1 - level by Student's t; None without spread."""
    if not has_spread(differences):
        return None
    n, mean = len(differences), fmean(differences)
    half = float(stats.t.isf(level / 2, n - 1)) * stdev(differences) / math.sqrt(n)
    return mean - half, mean + half


def paired_p(differences: Sequence[float]) -> float | None:
    """Two-sided p-value of the paired t test; None without spread."""
    if not has_spread(differences):
        return None
    n = len(differences)
    return float(2 * stats.t.sf(abs(fmean(differences)) / (stdev(differences) / math.sqrt(n)), n - 1))


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Share of the 2^n assignments of signs whose sum is as far from 0 as the one seen; never below 2 / 2^n."""
    n = len(differences)
    if not 0 < n <= MAX_FLIPPED:
        return None
    seen = abs(math.fsum(differences)) * (1 - 1e-12)  # sums of the same numbers in other orders
    count = sum(abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True))) >= seen for signs in product((1, -1), repeat=n))
    return count / 2**n


def corrected_p(p_values: Sequence[float | None], correction: str) -> list[float | None]:
    """p-values for the family of all comparisons, Holm's (1979) or Bonferroni's; None stays None but counts in the family."""
    m = len(p_values)
    if correction != "holm":
        factor = m if correction == "bonferroni" else 1
        return [None if p is None else min(1.0, factor * p) for p in p_values]
    result: list[float | None] = [None] * m
    largest = 0.0
    for rank, index in enumerate(_by_p(p_values)):
        p = p_values[index]
        if p is not None:
            largest = max(largest, min(1.0, (m - rank) * p))
            result[index] = largest
    return result


def levels_of_tests(p_values: Sequence[float | None], level: float, correction: str) -> list[float]:
    """The level at which each comparison is tested. Holm's stays, for all that follow, where it first does not reject."""
    m = len(p_values)
    if correction != "holm":
        return [level / m if correction == "bonferroni" else level] * m
    result, stopped_at = [level] * m, None
    for rank, index in enumerate(_by_p(p_values)):
        p = p_values[index]
        at = level / (m - rank) if stopped_at is None else stopped_at
        result[index] = at
        if p is None or p > at:
            stopped_at = at
    return result


def _by_p(p_values: Sequence[float | None]) -> list[int]:
    """Indices in the order of p, those without one last."""
    return sorted(range(len(p_values)), key=lambda index: (p_values[index] is None, p_values[index] or 0.0))


def minimum_detectable(sd: float, pairs: int, level: float, power: float) -> float:
    """The mean difference that a two-sided paired t test at `level` finds, with the right sign, with probability `power`.

    Args:
        sd: standard deviation of the differences.
        pairs: 2 or more.
    """
    critical = stats.t.isf(level / 2, pairs - 1)

    def excess(noncentrality: float) -> float:
        return float(stats.nct.sf(critical, pairs - 1, noncentrality)) - power

    top = 1.0
    while excess(top) < 0:
        top *= 2
    return float(optimize.brentq(excess, 0.0, top)) * sd / math.sqrt(pairs)


def first_level(comparisons: int, level: float, correction: str) -> float:
    """The strictest level at which a comparison is tested: what the design can promise to find."""
    return level if correction == "none" else level / comparisons
