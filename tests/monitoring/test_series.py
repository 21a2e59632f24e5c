import math
import random

import numpy as np
import pytest
from scipy import stats

from jaxprorl.monitoring.series import mann_kendall_z, robust_z, theil_sen_slope


def test_a_robust_z_by_hand() -> None:
    assert robust_z(9.0, [1, 2, 3, 4, 5]) == 6 / 1.4826
    assert robust_z(-9.0, [1, 2, 3, 4]) == -11.5 / 1.4826
    assert robust_z(3.0, [1, 2, 3, 4, 5]) == 0
    assert robust_z(5.0, [1, 1, 1, 1, 9]) is None


def test_slopes_by_hand() -> None:
    assert theil_sen_slope([1, 3, 5, 7]) == 2
    assert theil_sen_slope([1, 3, 100, 7, 9]) == pytest.approx(2)
    assert theil_sen_slope([2, 2, 2]) == 0


def test_mann_kendall_by_hand() -> None:
    assert mann_kendall_z([1, 2, 3, 4]) == pytest.approx(5 / math.sqrt(4 * 3 * 13 / 18))
    assert mann_kendall_z([4, 3, 2, 1]) == pytest.approx(-5 / math.sqrt(4 * 3 * 13 / 18))
    assert mann_kendall_z([1, 1, 1]) == 0
    # One tie of two: S = 5, variance (4*3*13 - 2*1*9) / 18.
    assert mann_kendall_z([1, 1, 2, 3]) == pytest.approx(4 / math.sqrt(138 / 18))


def test_they_agree_with_scipy() -> None:
    draws = random.Random(0)
    for count in (5, 20, 41):
        values = [draws.gauss(0, 1) + 0.05 * i for i in range(count)]
        assert theil_sen_slope(values) == pytest.approx(stats.theilslopes(values).slope)
        others = [draws.gauss(0, 1) for _ in range(count)]
        mad = stats.median_abs_deviation(others)
        assert robust_z(2.0, others) == pytest.approx((2 - np.median(others)) / (1.4826 * mad))
        # Kendall's tau with time has the same S.
        score = stats.kendalltau(range(count), values).statistic * count * (count - 1) / 2
        variance = count * (count - 1) * (2 * count + 5) / 18
        assert mann_kendall_z(values) == pytest.approx((score - math.copysign(1, score)) / math.sqrt(variance))
