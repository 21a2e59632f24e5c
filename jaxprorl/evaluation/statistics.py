"""Solve rates with honest intervals. Pure Python, no dependencies: these numbers decide whether a gain may be called one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

SOLVED = 1.0 - 1e-9  # a score from here on counts as solved; graders that average floats may miss 1.0 by rounding


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion, in [0, 1] and valid at 0 and n successes.

    Raises:
        ValueError: n < 1, successes outside [0, n], confidence outside (0, 1).
    """
    if n < 1:
        raise ValueError(f"an interval needs at least one item, got n = {n}")
    if not 0 <= successes <= n:
        raise ValueError(f"successes = {successes} is outside [0, {n}]")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence = {confidence} is outside (0, 1)")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else (centre - half) / scale  # exact at the ends, where rounding would leave 1e-17
    high = 1.0 if successes == n else (centre + half) / scale
    return low, high


def newcombe_difference_interval(
    successes_before: int, n_before: int, successes_after: int, n_after: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of (after - before) by Newcombe's method 10 (1998), which joins two Wilson intervals.

    It treats the two samples as independent. Before and after share their items, so where solving them is positively
    correlated the interval is wider than need be, never too narrow.
    """
    before, after = successes_before / max(n_before, 1), successes_after / max(n_after, 1)
    low_before, high_before = wilson_interval(successes_before, n_before, confidence)
    low_after, high_after = wilson_interval(successes_after, n_after, confidence)
    gain = after - before
    return gain - math.hypot(after - low_after, high_before - before), gain + math.hypot(high_after - after, before - low_before)


def intervals_touch(a: Sequence[float], b: Sequence[float]) -> bool:
    """True when two (low, high) intervals share at least a point."""
    return a[0] <= b[1] and b[0] <= a[1]


def _summary(values: Sequence[float]) -> dict[str, Any]:
    solved = sum(1 for value in values if value >= SOLVED)
    return {
        "solve_rate": solved / len(values),
        "mean_score": math.fsum(values) / len(values),
        "ci95": list(wilson_interval(solved, len(values))),
        "n": len(values),
    }


def solve_summary(scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Summarises task -> scores of its items (each in [0, 1], 1 = solved).

    Returns:
        {"solve_rate", "mean_score", "ci95": [low, high], "n", "per_task": {task: the same four}}; the total pools all items.

    Raises:
        ValueError: no task, a task without items, or a score that is not finite (names the task).
    """
    if not scores:
        raise ValueError("no task to summarise")
    for task, values in scores.items():
        if not len(values):
            raise ValueError(f"task {task!r} has no scored item")
        if not all(math.isfinite(value) for value in values):
            raise ValueError(f"task {task!r} has a score that is not finite")
    plain = {task: [float(value) for value in scores[task]] for task in sorted(scores)}
    everything = [value for values in plain.values() for value in values]
    return {**_summary(everything), "per_task": {task: _summary(values) for task, values in plain.items()}}


@dataclass(frozen=True)
class GainRow:
    """One row of a before/after table; rates are shares, `task` is "all" for the pooled row.

    `gain_ci95` belongs to `after - before`; `clear` says that the two 95 % intervals do not touch. Greedy rates are None when
    greedy decoding was not evaluated.
    """

    task: str
    before: float
    before_ci95: tuple[float, float]
    after: float
    after_ci95: tuple[float, float]
    gain: float
    gain_ci95: tuple[float, float]
    clear: bool
    mean_before: float
    mean_after: float
    n: int
    greedy_before: float | None
    greedy_after: float | None


def gain_rows(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    greedy_before: Mapping[str, Any] | None = None,
    greedy_after: Mapping[str, Any] | None = None,
) -> list[GainRow]:
    """Rows per task, then "all", from two results of `solve_summary` (or the same parts of `summary.json`).

    Raises:
        ValueError: the tasks of before and after differ.
    """
    if set(before["per_task"]) != set(after["per_task"]):
        raise ValueError(f"tasks differ: before {sorted(before['per_task'])}, after {sorted(after['per_task'])}")

    def row(task: str, b: Mapping[str, Any], a: Mapping[str, Any], n: tuple[int, int], greedy: list[float | None]) -> GainRow:
        counts = round(b["solve_rate"] * n[0]), n[0], round(a["solve_rate"] * n[1]), n[1]
        ci_before, ci_after = tuple(b["ci95"]), tuple(a["ci95"])
        return GainRow(
            task,
            b["solve_rate"],
            ci_before,
            a["solve_rate"],
            ci_after,
            a["solve_rate"] - b["solve_rate"],
            newcombe_difference_interval(*counts),
            not intervals_touch(ci_before, ci_after),
            b["mean_score"],
            a["mean_score"],
            n[1],
            greedy[0],
            greedy[1],
        )

    def greedy_of(pick: Any) -> list[float | None]:
        return [None if g is None else pick(g) for g in (greedy_before, greedy_after)]

    rows = []
    for task, b in before["per_task"].items():
        a = after["per_task"][task]
        greedy = greedy_of(lambda g, task=task: g["per_task"][task]["solve_rate"] if task in g["per_task"] else None)
        rows.append(row(task, b, a, (b["n"], a["n"]), greedy))
    totals = tuple(sum(part["n"] for part in side["per_task"].values()) for side in (before, after))
    rows.append(row("all", before, after, (totals[0], totals[1]), greedy_of(lambda g: g["solve_rate"])))
    return rows
