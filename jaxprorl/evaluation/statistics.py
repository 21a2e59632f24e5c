"""Solve rates with honest intervals. Pure Python: these numbers decide whether a gain may be called one.

Rates and intervals count solved items, mean scores are of rewards. Items whose grader failed are in neither; they are counted beside them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from jaxprorl.types import Score


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


def _summary(scores: Sequence[Score]) -> dict[str, Any]:
    values = [score.value for score in scores if score.outcome == "scored"]
    solved, n = sum(score.solved for score in scores), len(values)
    return {
        "solve_rate": solved / n if n else None,
        "mean_score": math.fsum(values) / n if n else None,
        "ci95": list(wilson_interval(solved, n)) if n else None,
        "n": n,
        "ungraded": len(scores) - n,
    }


def solve_summary(scores: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """Summarises task -> scores of its items.

    Returns:
        {"solve_rate", "mean_score", "ci95": [low, high], "n", "ungraded", "per_task": {task: the same five}}; the total pools all items.
        `n` counts graded items; where it is 0, the first three are None.

    Raises:
        ValueError: no task, a task without items, or a reward that is not finite (names the task).
    """
    if not scores:
        raise ValueError("no task to summarise")
    for task, values in scores.items():
        if not values:
            raise ValueError(f"task {task!r} has no item")
        if not all(math.isfinite(score.value) for score in values):
            raise ValueError(f"task {task!r} has a score that is not finite")
    everything = [score for task in sorted(scores) for score in scores[task]]
    return {**_summary(everything), "per_task": {task: _summary(scores[task]) for task in sorted(scores)}}


def event_fields(result: Mapping[str, Any]) -> dict[str, Any]:
    """What an event tells of a `solve_summary`: rates, and for each task with ungraded items their number."""
    per_task = result["per_task"]
    told = {name: result[name] for name in ("solve_rate", "mean_score", "ungraded")}
    told["per_task"] = {task: row["solve_rate"] for task, row in per_task.items()}
    ungraded = {task: row["ungraded"] for task, row in per_task.items() if row["ungraded"]}
    return told | ({"ungraded_per_task": ungraded} if ungraded else {})


def rate_text(result: Mapping[str, Any]) -> str:
    """The solve rate of a `solve_summary` (or of a part of one) in words: `0.250`, `0.250 (3 ungraded)` or `none (400 ungraded)`."""
    rate = "none" if result["solve_rate"] is None else f"{result['solve_rate']:.3f}"
    return f"{rate} ({result['ungraded']} ungraded)" if result["ungraded"] else rate


@dataclass(frozen=True)
class GainRow:
    """One row of a before/after table; rates are shares, `task` is "all" for the pooled row.

    `gain_ci95` belongs to `after - before`; `clear` says that the two 95 % intervals do not touch. Whatever an evaluation without a graded
    item would have to tell is None, and so are greedy rates when greedy decoding was not evaluated.

    Attributes:
        n: graded items after.
        ungraded: of the sampled evaluations before and after, items in no rate.
        greedy_ungraded: the same of the greedy ones.
    """

    task: str
    before: float | None
    before_ci95: tuple[float, float] | None
    after: float | None
    after_ci95: tuple[float, float] | None
    gain: float | None
    gain_ci95: tuple[float, float] | None
    clear: bool
    mean_before: float | None
    mean_after: float | None
    n: int
    greedy_before: float | None
    greedy_after: float | None
    ungraded: tuple[int, int]
    greedy_ungraded: tuple[int, int]


def gain_rows(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    greedy_before: Mapping[str, Any] | None = None,
    greedy_after: Mapping[str, Any] | None = None,
) -> list[GainRow]:
    """Rows per task, then "all", from two results of `solve_summary` (or the same parts of `summary.json`).

    Summaries of an older version have no `ungraded`: their grader errors are zeros in the rates.

    Raises:
        ValueError: the tasks of before and after differ.
    """
    if set(before["per_task"]) != set(after["per_task"]):
        raise ValueError(f"tasks differ: before {sorted(before['per_task'])}, after {sorted(after['per_task'])}")
    sides = [before, after, greedy_before or {"per_task": {}}, greedy_after or {"per_task": {}}]
    rows = [_gain_row(task, [side["per_task"].get(task) for side in sides]) for task in before["per_task"]]
    return [*rows, _gain_row("all", [_pooled(side) for side in sides])]


def _pooled(result: Mapping[str, Any]) -> dict[str, Any] | None:
    parts = result["per_task"].values()
    counts = {"n": sum(part["n"] for part in parts), "ungraded": sum(part.get("ungraded", 0) for part in parts)}
    return {**result, **counts} if parts else None


def _gain_row(task: str, parts: Sequence[Mapping[str, Any] | None]) -> GainRow:
    before, after, greedy_before, greedy_after = (part or _NOTHING for part in parts)
    rates = before["solve_rate"], after["solve_rate"]
    intervals = [None if part["ci95"] is None else (part["ci95"][0], part["ci95"][1]) for part in (before, after)]
    gain = gain_ci95 = None
    if None not in rates:
        gain = rates[1] - rates[0]
        gain_ci95 = newcombe_difference_interval(round(rates[0] * before["n"]), before["n"], round(rates[1] * after["n"]), after["n"])
    return GainRow(
        task=task,
        before=rates[0],
        before_ci95=intervals[0],
        after=rates[1],
        after_ci95=intervals[1],
        gain=gain,
        gain_ci95=gain_ci95,
        clear=intervals[0] is not None and intervals[1] is not None and not intervals_touch(intervals[0], intervals[1]),
        mean_before=before["mean_score"],
        mean_after=after["mean_score"],
        n=after["n"],
        greedy_before=greedy_before["solve_rate"],
        greedy_after=greedy_after["solve_rate"],
        ungraded=(before.get("ungraded", 0), after.get("ungraded", 0)),
        greedy_ungraded=(greedy_before.get("ungraded", 0), greedy_after.get("ungraded", 0)),
    )


_NOTHING: Mapping[str, Any] = {"solve_rate": None, "mean_score": None, "ci95": None, "n": 0}
