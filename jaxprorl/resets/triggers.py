"""What makes a reset due: pure functions of one step's signals and of what was remembered of the steps before.

Every trigger is a frozen set of bounds with `observe(memory, signals) -> (memory, statistics or None)`; statistics mean that it fires, and
are the numbers that made it. A memory is a tuple of numbers, so it is JSON. A metric that is absent (or not finite) is no observation: the
memory stays, nothing fires. Fields and meaning of every trigger: docs/resets-when.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from jaxprorl.evaluation.statistics import newcombe_difference_interval
from jaxprorl.monitoring.metrics import check_name
from jaxprorl.monitoring.series import mann_kendall_z, robust_z, theil_sen_slope

Memory = tuple[float, ...]
Statistics = dict[str, Any]  # JSON
Observed = tuple[Memory, Statistics | None]

HIDDEN = ("validation.", "time.")  # what the names begin with that no blind signal holds: validation results, and the clock


@dataclass(frozen=True)
class BlindSignals:
    """What is known right before step `step` (its rollout is under way): the training metrics of the step before, and no older ones.

    Raises:
        ValueError: a validation result or a time is among them, or a name that is no metric.
    """

    step: int
    training: Mapping[str, float]

    def __post_init__(self) -> None:
        for name in self.training:
            check_name(name)
            if name.startswith(HIDDEN):
                raise ValueError(f"metric {name!r}: blind signals cannot hold validation results, and no decision reads the clock")


@dataclass(frozen=True)
class Validation:
    """One validation: the share of its graded items that are solved (not their rewards), and their number."""

    solve_rate: float
    items: int


@dataclass(frozen=True)
class Signals:
    """The same with the validation after the step before, if there was one. No subclass: it cannot pass for blind signals."""

    blind: BlindSignals
    validation: Validation | None


def blind_signals(step: int, values: Mapping[str, float]) -> BlindSignals:
    """What a blind controller sees of the metrics of step `step` - 1: all but validation results and whatever depends on the clock."""
    return BlindSignals(step, {name: value for name, value in values.items() if not name.startswith(HIDDEN)})


def all_signals(step: int, values: Mapping[str, float]) -> Signals:
    """Blind signals and the validation beside them."""
    rate, items = values.get("validation.solve_rate"), values.get("validation.items")
    return Signals(blind_signals(step, values), None if rate is None or items is None else Validation(rate, int(items)))


@dataclass(frozen=True)
class EverySteps:
    """Fires before every step that `steps` divides, but the first. Depends on nothing else, not even on the run's length."""

    steps: int
    reads: ClassVar = "step"
    cleared: ClassVar = False

    def observe(self, memory: Memory, signals: BlindSignals) -> Observed:
        """Remembers nothing."""
        due = signals.step > 0 and signals.step % self.steps == 0
        return memory, {"every": self.steps} if due else None


@dataclass(frozen=True)
class AtSteps:
    """Fires before each of the given steps."""

    steps: tuple[int, ...]
    reads: ClassVar = "step"
    cleared: ClassVar = False

    def observe(self, memory: Memory, signals: BlindSignals) -> Observed:
        """Remembers nothing."""
        return memory, {"step": signals.step} if signals.step in self.steps else None


@dataclass(frozen=True)
class Level:
    """Fires when a metric is where it should not be; each test is left out by None.

    The last `window` observations are the baseline. It is compared with the value before the value joins it, and only once it is full.

    Attributes:
        metric: its name.
        window: length of the baseline, observations.
        above, below: absolute bounds.
        z_above: the value lies more than this many robust standard deviations above the baseline.
        rise, fall: the value is more than `rise` x, or less than `fall` x, the baseline's median.
        all_of: every test must hold, not any.
        cleared: a reset of the reference empties the baseline (it makes no sense of what the metric was before).
    """

    metric: str
    window: int = 0
    above: float | None = None
    below: float | None = None
    z_above: float | None = None
    rise: float | None = None
    fall: float | None = None
    all_of: bool = False
    cleared: bool = False
    reads: ClassVar = "training"

    def observe(self, memory: Memory, signals: BlindSignals) -> Observed:
        """`memory`: the last `window` observations, oldest first."""
        return self.judge(memory, observation(signals.training, self.metric))

    def judge(self, memory: Memory, value: float | None) -> Observed:
        """The same of a value; None = there is none."""
        if value is None:
            return memory, None
        full = self.window > 0 and len(memory) == self.window
        centre = median(memory) if full else None
        score = robust_z(value, memory) if full else None
        outcomes = {  # bound -> what came of it
            "above": self.above is not None and value > self.above,
            "below": self.below is not None and value < self.below,
            "z_above": self.z_above is not None and score is not None and score > self.z_above,
            "rise": self.rise is not None and centre is not None and value > self.rise * centre,
            "fall": self.fall is not None and centre is not None and value < self.fall * centre,
        }
        bounds = {name: getattr(self, name) for name in outcomes if getattr(self, name) is not None}
        fires = bool(bounds) and (all if self.all_of else any)(outcomes[name] for name in bounds)
        found = {"metric": self.metric, "value": value, "median": centre, "z": score, "observations": len(memory)} | bounds
        return tail((*memory, value), self.window), found if fires else None


@dataclass(frozen=True)
class Trend:
    """Fires when a metric rises steadily over the last `window` observations: slope and significance both beyond their bounds.

    Attributes:
        slope: of the Theil-Sen line, per step.
        z: of the Mann-Kendall test, one-sided.
    """

    metric: str
    window: int
    slope: float
    z: float
    cleared: bool = False
    reads: ClassVar = "training"

    def observe(self, memory: Memory, signals: BlindSignals) -> Observed:
        """`memory`: the last `window` observations, oldest first."""
        value = observation(signals.training, self.metric)
        if value is None:
            return memory, None
        memory = tail((*memory, value), self.window)
        if len(memory) < self.window:
            return memory, None
        slope, score = theil_sen_slope(memory), mann_kendall_z(memory)
        found = {"metric": self.metric, "slope": slope, "slope_bound": self.slope, "z": score, "z_bound": self.z, "window": self.window}
        return memory, found if slope > self.slope and score > self.z else None


@dataclass(frozen=True)
class Onset:
    """Fires when its rule begins to hold, and again only once the rule has ceased to hold in between: a level that lasts is one reason."""

    rule: Level | Trend
    reads: ClassVar = "training"

    @property
    def cleared(self) -> bool:
        """As the rule's; it is then ready to fire again."""
        return self.rule.cleared

    def observe(self, memory: Memory, signals: BlindSignals) -> Observed:
        """`memory`: 1 while the rule holds and else 0, then the rule's."""
        if observation(signals.training, self.rule.metric) is None:
            return memory, None
        held, rest = memory[:1] == (1.0,), memory[1:]
        rest, found = self.rule.observe(rest, signals)
        return (float(found is not None), *rest), None if held else found


@dataclass(frozen=True)
class Stagnation:
    """Fires when the last `patience` validations are, beyond noise, not better than the `patience` before them, or are worse.

    Solved items are pooled over each block. The interval of the difference (Newcombe) treats them as independent; they are the same items
    in both blocks, so it is wider than need be, never too narrow. A plateau: all of the interval lies below `min_change`. A drop: all of it
    lies below 0. What noise could explain is neither.

    Attributes:
        drop_only: a plateau is no reason.
    """

    patience: int
    min_change: float
    confidence: float
    drop_only: bool
    reads: ClassVar = "validation"
    cleared: ClassVar = True

    def observe(self, memory: Memory, validation: Validation | None) -> Observed:
        """`memory`: solved, items of each validation, oldest first."""
        if validation is None or not math.isfinite(validation.solve_rate) or validation.items < 1:
            return memory, None
        solved = round(validation.solve_rate * validation.items)
        memory = tail((*memory, solved, validation.items), 4 * self.patience)
        if len(memory) < 4 * self.patience:
            return memory, None
        before, after = memory[: 2 * self.patience], memory[2 * self.patience :]
        solved_before, n_before, solved_after, n_after = (int(sum(part)) for block in (before, after) for part in (block[::2], block[1::2]))
        low, high = newcombe_difference_interval(solved_before, n_before, solved_after, n_after, self.confidence)
        kind = "drop" if high < 0 else "plateau" if high < self.min_change and not self.drop_only else None
        found = {
            "kind": kind,
            "solve_rate_before": solved_before / n_before,
            "solve_rate_after": solved_after / n_after,
            "items_per_block": n_after,
            "change_low": low,
            "change_high": high,
            "min_change": self.min_change,
        }
        return memory, found if kind else None


BlindTrigger = EverySteps | AtSteps | Level | Trend | Onset


@dataclass(frozen=True)
class Firing:
    """A trigger that fires right before step `step`.

    Attributes:
        trigger: its name.
        reads: what it looked at: "step", "training", "validation", or "person" (a command).
        reason: in words.
        statistics: the numbers that made it fire.
    """

    step: int
    trigger: str
    reads: str
    reason: str
    statistics: Mapping[str, Any]


def observe_all(
    triggers: Mapping[str, BlindTrigger], memories: Mapping[str, Sequence[float]], signals: BlindSignals
) -> tuple[dict[str, Memory], list[Firing]]:
    """Shows `signals` to every trigger. Returns what they remember now, and who fires, in the order of `triggers`."""
    after: dict[str, Memory] = {}
    firings = []
    for name, trigger in triggers.items():
        after[name], found = trigger.observe(tuple(memories.get(name, ())), signals)
        if found is not None:
            firings.append(Firing(signals.step, name, trigger.reads, reason_of(name, found), found))
    return after, firings


def reason_of(name: str, found: Statistics) -> str:
    """The statistics of a firing as one line."""
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items() if value is not None)
    return f"{name}: {', '.join(shown)}"


def observation(values: Mapping[str, float], metric: str) -> float | None:
    """The value of a metric in this step; None when it has none, or none that is a number."""
    value = values.get(metric)
    return float(value) if value is not None and math.isfinite(value) else None


def tail(memory: Memory, length: int) -> Memory:
    """The newest `length` numbers."""
    return memory[-length:] if length else ()
