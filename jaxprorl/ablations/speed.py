"""What a step costs in each arm, and how far the arms' numbers are apart while they train on the same samples."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from jaxprorl.ablations.plan import Plan
from jaxprorl.ablations.records import Record, completions

WARM_UP_STEPS = 1  # left out of times: caches are cold


@dataclass(frozen=True)
class Cost:
    """Of one arm, over the steps of all its runs but the first of each.

    Attributes:
        arm: its name.
        devices: that its runs had.
        step_s, update_s: (lower quartile, median, upper quartile) of a step and of its updates, seconds; an update's time goes to its
            metrics' arrival.
        tokens_per_s: completion tokens over step time.
        trained_tokens_per_s: tokens trained on over update time.
        peak_bytes: resident memory of the process and its graders (`summary.json`), the largest run.
        device_peak_bytes: largest peak of a device, where the platform tells.
        estimated_bytes: the compiler's estimate per device of the training step: arguments, outputs (shared ones once) and temporaries.
    """

    arm: str
    devices: int
    step_s: tuple[float, float, float]
    update_s: tuple[float, float, float]
    tokens_per_s: float
    trained_tokens_per_s: float
    peak_bytes: int
    device_peak_bytes: int | None
    estimated_bytes: int | None


@dataclass(frozen=True)
class Agreement:
    """How far the losses of an arm and another are apart in one seed.

    Attributes:
        seed: of the runs.
        arm, control: compared, see `Plan.comparisons`.
        steps: how many first steps had the same samples in both; later ones trained on different ones.
        per_step: difference of `loss.total` in each of these steps that made an update.
        largest: of them; None without such a step.
    """

    seed: int
    arm: str
    control: str
    steps: int
    per_step: tuple[float, ...]
    largest: float | None


def costs(plan: Plan, records: Sequence[Record]) -> list[Cost]:
    """One per arm with a finished run of more than WARM_UP_STEPS steps."""
    by_arm = {arm: [record for record in records if record.run.arm == arm] for arm in plan.arms}
    return [_cost(arm, found) for arm, found in by_arm.items() if any(len(record.rows) > WARM_UP_STEPS for record in found)]


def _cost(arm: str, records: Sequence[Record]) -> Cost:
    rows = [row for record in records for row in record.rows[WARM_UP_STEPS:]]
    peaks = [max(event["peak_bytes"]) for record in records for event in record.events if event["kind"] == "device_memory"]
    estimates = [memory for record in records for memory in _estimates(record.events)]
    return Cost(
        arm=arm,
        devices=max(record.start["devices"] for record in records),
        step_s=spread([row["time.step_s"] for row in rows]),
        update_s=spread([row["time.update_s"] for row in rows]),
        tokens_per_s=sum(row["tokens.completion"] for row in rows) / sum(row["time.step_s"] for row in rows),
        trained_tokens_per_s=sum(row["tokens.trained"] for row in rows) / sum(row["time.update_s"] for row in rows),
        peak_bytes=max(record.summary["peak_memory_bytes"] for record in records),
        device_peak_bytes=max(peaks, default=None),
        estimated_bytes=max(estimates, default=None),
    )


def _estimates(events: Sequence[Mapping[str, Any]]) -> list[int]:
    found = [event.get("memory_bytes") for event in events if event["kind"] == "compile" and event["name"] == "train_step"]
    return [memory["argument"] + memory["output"] - memory["alias"] + memory["temp"] for memory in found if memory]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def agreements(plan: Plan, records: Sequence[Record]) -> list[Agreement]:
    """One per seed and comparison of which both runs finished: an arm that samples otherwise takes none of the others with it."""
    by_run = {(record.run.arm, record.run.seed): record for record in records}
    samples = {run: completions(record) for run, record in by_run.items()}
    found = []
    for seed in plan.seeds:
        for arm, control in plan.comparisons:
            runs = [(arm, seed), (control, seed)]
            if all(run in by_run for run in runs):
                steps = equal_steps([samples[run] for run in runs])
                losses = [[by_run[run].rows[step].get("loss.total") for run in runs] for step in range(steps)]
                per_step = tuple(abs(a - b) for a, b in losses if a is not None and b is not None)
                found.append(Agreement(seed, arm, control, steps, per_step, max(per_step, default=None)))
    return found


def equal_steps(samples: Sequence[Sequence[Sequence[str]]]) -> int:
    """How many first steps have the same samples in all runs; run -> step -> texts."""
    count = 0
    for steps in zip(*samples, strict=False):
        if any(step != steps[0] for step in steps):
            break
        count += 1
    return count


def as_json(found: Sequence[Cost] | Sequence[Agreement]) -> list[dict[str, Any]]:
    """For `result.json`."""
    return [dataclasses.asdict(item) for item in found]
