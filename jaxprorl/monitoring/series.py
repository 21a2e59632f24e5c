"""Robust statistics of short series, for whoever decides by them. Pure Python: every number can be checked by hand."""

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median

MAD_TO_SIGMA = 1.4826  # standard deviation over median absolute deviation, of a normal distribution


def robust_z(value: float, window: Sequence[float]) -> float | None:
    """(value - median) / (1.4826 MAD) of a window without `value`; None when the window has no spread to compare with."""
    centre = median(window)
    mad = median(abs(x - centre) for x in window)
    return (value - centre) / (MAD_TO_SIGMA * mad) if mad > 0 else None


def theil_sen_slope(values: Sequence[float]) -> float:
    """Median slope between all pairs, per step; needs two values (Theil 1950, Sen 1968)."""
    return median((values[j] - values[i]) / (j - i) for i, j in combinations(range(len(values)), 2))


def mann_kendall_z(values: Sequence[float]) -> float:
    """Test statistic for a monotonic trend, standard normal without one; ties and continuity are corrected for (Kendall 1975).

    0 for a constant series.
    """
    n = len(values)
    score = sum((b > a) - (b < a) for a, b in combinations(values, 2))
    ties = [values.count(value) for value in set(values)]
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    return (score - math.copysign(1, score)) / math.sqrt(variance) if score else 0.0
