"""Triggers on series with known answers, among them those that must not fire."""

import math
import random
from collections.abc import Sequence
from statistics import median

import pytest

from jaxprorl.resets.triggers import AtSteps, BlindSignals, Level, Memory, Stagnation, Trend, Validation, all_signals

METRIC = "entropy"


def fired(trigger: Level | Trend, values: Sequence[float | None]) -> list[int]:
    """Indices of the values at which it fires; None = the metric is absent."""
    memory: Memory = ()
    found = []
    for index, value in enumerate(values):
        memory, statistics = trigger.observe(memory, BlindSignals(index + 1, {} if value is None else {METRIC: value}))
        found += [index] if statistics else []
    return found


def validated(trigger: Stagnation, rates: Sequence[float | None], items: int) -> list[tuple[int, str]]:
    memory: Memory = ()
    found = []
    for index, rate in enumerate(rates):
        memory, statistics = trigger.observe(memory, None if rate is None else Validation(rate, items))
        found += [(index, statistics["kind"])] if statistics else []
    return found


def noise(count: int, seed: int = 0, centre: float = 1.0, width: float = 0.1) -> list[float]:
    draws = random.Random(seed)
    return [draws.gauss(centre, width) for _ in range(count)]


def test_given_steps() -> None:
    trigger = AtSteps((2, 5))
    assert [step for step in range(10) if trigger.observe((), BlindSignals(step, {}))[1]] == [2, 5]


def test_a_robust_z_score_by_hand() -> None:
    # Median 3, absolute deviations 2 1 0 1 2, MAD 1: z of 9 is 6 / 1.4826.
    window = [1.0, 2.0, 3.0, 4.0, 5.0]
    memory, found = Level(METRIC, 5, z_above=4.0).observe(tuple(window), BlindSignals(6, {METRIC: 9.0}))
    assert found == {"metric": METRIC, "value": 9.0, "median": 3.0, "z": 6 / 1.4826, "observations": 5, "z_above": 4.0}
    assert memory == (2.0, 3.0, 4.0, 5.0, 9.0)
    assert fired(Level(METRIC, 5, z_above=4.05), [*window, 9.0]) == []
    assert fired(Level(METRIC, 5, z_above=4.04), [*window, 9.0]) == [5]


def test_a_spike_is_upwards_only() -> None:
    assert fired(Level(METRIC, 5, z_above=4.0), [1, 2, 3, 4, 5, -9]) == []


def test_an_outlier_fires_only_with_a_full_baseline() -> None:
    calm = noise(10)
    assert fired(Level(METRIC, 10, z_above=6.0), [*calm, 9.0]) == [10]
    assert fired(Level(METRIC, 11, z_above=6.0), [*calm, 9.0]) == []
    assert fired(Level(METRIC, 10, z_above=6.0), [*calm[:9], 9.0]) == []


def test_an_earlier_outlier_does_not_hide_the_next_one() -> None:
    # The mean and the standard deviation of the baseline would be carried away by the first; the median and the MAD are not.
    assert fired(Level(METRIC, 10, z_above=6.0), [*noise(10), 50.0, 1.0, 50.0]) == [10, 12]


def test_noise_and_slow_drift_do_not_fire() -> None:
    assert fired(Level(METRIC, 30, z_above=6.0), noise(2000)) == []  # of normal noise, 3.5e-5 lie above it
    drift = [0.001 * i + 0.002 * x for i, x in enumerate(noise(500))]
    assert fired(Level(METRIC, 20, z_above=6.0), drift) == []
    # A straight line: the next value is (w + 1) / 2 steps above the median and the MAD is w / 4 steps, z = 2 (1 + 1 / w) / 1.4826.
    line = [float(i) for i in range(100)]
    assert fired(Level(METRIC, 20, z_above=1.42), line) == []
    assert fired(Level(METRIC, 20, z_above=1.41), line) == list(range(20, 100))


def test_a_constant_baseline_has_no_z_score_but_bounds_hold() -> None:
    assert fired(Level(METRIC, 5, z_above=3.0), [1.0] * 10 + [100.0]) == []
    assert fired(Level(METRIC, 5, z_above=3.0, above=50.0), [1.0] * 10 + [100.0]) == [10]


def test_any_and_all_of_the_tests() -> None:
    series = [1.0, 1.1, 0.9, 1.0, 1.1, 3.0, 1.0, 1.1, 0.9, 1.0, 9.0]
    assert fired(Level(METRIC, 5, z_above=5.0, above=5.0), series) == [5, 10]
    assert fired(Level(METRIC, 5, z_above=5.0, above=5.0, all_of=True), series) == [10]
    assert fired(Level(METRIC, 5, z_above=5.0, above=5.0, all_of=True), [9.0] * 8) == []  # high, and nothing new
    assert fired(Level(METRIC, 5), series) == []


def test_a_bound_is_passed_not_touched() -> None:
    assert fired(Level(METRIC, above=1.0, below=0.5), [1.0, 1.0 + 2**-52, 0.5, 0.5 - 2**-53]) == [1, 3]


def test_a_fall_is_relative_to_the_baselines_median() -> None:
    trigger = Level(METRIC, 4, fall=0.5)
    assert fired(trigger, [1.0, 1.2, 0.8, 1.0, 0.51, 0.46]) == []  # medians 1 and 0.9
    assert fired(trigger, [1.0, 1.2, 0.8, 1.0, 0.51, 0.44]) == [5]
    assert fired(trigger, [1.0, 1.2, 0.8, 1.0, 0.49]) == [4]
    # Halving over 40 steps is no fall within 4; a floor sees it.
    slow = [1.0 - 0.0125 * i for i in range(41)]
    assert fired(trigger, slow) == []
    assert fired(Level(METRIC, 4, fall=0.5, below=0.52), slow) == [39, 40]


def test_a_rise_is_relative_to_the_baselines_median() -> None:
    trigger = Level(METRIC, 5, rise=2.0)
    assert fired(trigger, [10, 11, 9, 10, 30, 20.1, 20]) == [5]  # 30 is the fifth: no full baseline yet; then the median is 10
    assert fired(trigger, [10 * 1.1**i for i in range(60)]) == []  # 1.1^3 = 1.33 above the median all along


@pytest.mark.parametrize("absent", [None, math.nan, math.inf, -math.inf])
def test_what_is_absent_or_no_number_is_no_observation(absent: float | None) -> None:
    trigger = Level(METRIC, 5, z_above=4.0, above=100.0)
    with_gaps = [1.0, absent, 2.0, 3.0, absent, absent, 4.0, 5.0, absent, 9.0, absent]
    assert fired(trigger, with_gaps) == [9]
    trend = [float(i // 2) if i % 2 else absent for i in range(12)]
    assert fired(Trend(METRIC, 6, slope=0.5, z=2.0), trend) == [11]


def test_a_trend_by_hand() -> None:
    # Six rising values: S = 15, variance = 6 * 5 * 17 / 18, z = 14 / sqrt(28.333) = 2.630; every slope is 2.
    rising = [2.0 * i for i in range(6)]
    _, found = Trend(METRIC, 6, slope=1.0, z=2.0).observe(tuple(rising[:5]), BlindSignals(6, {METRIC: rising[5]}))
    assert found and (found["slope"], found["z"]) == (2.0, pytest.approx(14 / math.sqrt(510 / 18)))
    assert fired(Trend(METRIC, 6, slope=1.99, z=2.62), rising) == [5]
    assert fired(Trend(METRIC, 6, slope=2.0, z=2.0), rising) == []
    assert fired(Trend(METRIC, 6, slope=1.0, z=2.64), rising) == []
    assert fired(Trend(METRIC, 7, slope=1.0, z=2.0), rising) == []
    assert fired(Trend(METRIC, 6, slope=1.0, z=2.0), rising[::-1]) == []


def test_noise_is_no_trend_and_one_outlier_makes_none() -> None:
    assert fired(Trend(METRIC, 30, slope=0.0, z=3.5), noise(300)) == []
    flat = [1.0] * 29 + [100.0] + [1.0] * 29
    assert fired(Trend(METRIC, 30, slope=0.0, z=1.0), flat) == []


def test_validation_blocks_by_hand() -> None:
    # 500 of 1000, then 400 of 1000: Wilson intervals [.4691, .5309] and [.3701, .4307];
    # upper end of the difference -.1 + sqrt(.0307^2 + .0309^2) = -.0564.
    trigger = Stagnation(patience=1, min_change=0.01, confidence=0.95, drop_only=False)
    _, found = trigger.observe((500.0, 1000.0), Validation(0.4, 1000))
    assert found and found["kind"] == "drop"
    assert found["change_high"] == pytest.approx(-0.0564, abs=1e-4)
    assert (found["solve_rate_before"], found["solve_rate_after"], found["items_per_block"]) == (0.5, 0.4, 1000)


def test_a_drop_within_the_interval_is_no_drop() -> None:
    trigger = Stagnation(1, 0.01, 0.95, drop_only=True)
    assert validated(trigger, [0.5, 0.4], 1000) == [(1, "drop")]
    assert validated(trigger, [0.5, 0.4], 100) == []  # half-width about .14
    assert validated(trigger, [0.5, 0.47], 1000) == []
    assert validated(trigger, [0.5, 0.0], 4) == []
    assert validated(trigger, [0.0, 0.0, 0.0], 1000) == []


def test_a_plateau_is_when_a_gain_worth_having_can_be_ruled_out() -> None:
    trigger = Stagnation(2, 0.05, 0.95, drop_only=False)
    flat = [0.5] * 4
    assert validated(trigger, flat, 1000) == [(3, "plateau")]  # half-width .031 of 2000 against 2000
    assert validated(trigger, flat, 100) == []  # .098: a gain of .05 may well be there
    assert validated(Stagnation(2, 0.05, 0.95, drop_only=True), flat, 1000) == []
    assert validated(trigger, [0.5, 0.5, 0.6, 0.6], 1000) == []
    assert validated(trigger, [0.30, 0.36, 0.42, 0.48, 0.54], 1000) == []
    assert validated(trigger, [0.5] * 3, 1000) == [], "patience"


def test_one_bad_validation_is_pooled_with_its_neighbours() -> None:
    trigger = Stagnation(3, 0.02, 0.95, drop_only=True)
    assert validated(trigger, [0.50, 0.52, 0.51, 0.53, 0.47, 0.52, 0.51, 0.52], 400) == []


def test_noise_alone_is_seldom_a_drop() -> None:
    draws = random.Random(1)
    runs = [[sum(draws.random() < 0.5 for _ in range(50)) / 50 for _ in range(2)] for _ in range(1000)]
    drops = sum(bool(validated(Stagnation(1, 0.0, 0.95, drop_only=True), run, 50)) for run in runs)
    # One side of a 95 % interval: 2.5 % of 1000, standard deviation 4.9; five of them above.
    assert drops <= 50


def test_steps_without_validation_are_no_observation() -> None:
    trigger = Stagnation(1, 0.0, 0.95, drop_only=True)
    assert validated(trigger, [None, 0.5, None, None, 0.4, None, math.nan], 1000) == [(4, "drop")]
    assert all_signals(3, {METRIC: 1.0}).validation is None
    assert all_signals(3, {"validation.solve_rate": 0.5, "validation.items": 8}).validation == Validation(0.5, 8)
    assert validated(trigger, [0.5, 0.4], 0) == []


def test_median_is_the_baselines() -> None:
    values = noise(21)
    _, found = Level(METRIC, 20, rise=0.0).observe(tuple(values[:20]), BlindSignals(21, {METRIC: values[20]}))
    assert found and found["median"] == median(values[:20])
