"""`metrics.jsonl`: one line of numbers per step. Every name is in METRICS, so a typo is an error and the table is the documentation.

Whatever depends on the clock lives under `time.`; all other values repeat bit for bit when a run is repeated.
"""

import math
import os
from collections.abc import Collection, Mapping

import numpy as np

from jaxprorl.monitoring import jsonl
from jaxprorl.monitoring.jsonl import read, truncate

__all__ = ["METRICS", "MetricsLog", "check_name", "read", "truncate"]

# name -> (unit, meaning). `.TASK` stands for the name of any task, `.DOMAIN` of any domain. "Groups" are those of the step's rollout batch;
# means over tokens or samples are over what the step trained on unless said otherwise.
METRICS: dict[str, tuple[str, str]] = {
    "reward.mean": ("reward", "mean over all graded samples of the step, dropped groups included; grader errors excluded"),
    "reward.solve_rate": ("share", "solved samples (`grading.solved_from`, or the grader's word) among the graded ones"),
    "reward.TASK": ("reward", "mean over the graded samples of one task"),
    "reward_mean.DOMAIN": ("reward", "mean over the graded samples of one domain"),
    "reward_std.DOMAIN": ("reward", "standard deviation of the same"),
    "advantage_mean.DOMAIN": ("1", "mean over the samples of one domain that the step trained on"),
    "advantage_std.DOMAIN": ("1", "standard deviation of the same"),
    "response_tokens.mean": ("tokens", "mean completion length, stop token included"),
    "response_tokens.max": ("tokens", "longest completion of the step"),
    "response.stop_share": ("share", "completions in which the model drew a stop token itself"),
    "repetition.unique_share": ("share", "different tokens over tokens, mean over the completions of the step"),
    "repetition.ngram_share": ("share", "4-grams that occurred earlier in the same completion, mean over the completions of the step"),
    "groups.drawn": ("groups", "prompts sampled this step, refills included"),
    "groups.kept": ("groups", "groups trained on"),
    "groups.carried": ("groups", "of those, surplus of earlier steps"),
    "groups.zero_spread_share": ("share", "drawn groups without a signal (`filtering`): dropped"),
    "groups.all_correct_share": ("share", "drawn groups in which every sample is solved"),
    "groups.surplus": ("groups", "drawn groups with a signal, over the batch size"),
    "groups.cap_steps": ("steps", "in a row, up to this one, whose batch was not full at the cap on drawn prompts"),
    "groups.staleness_max": ("versions", "weight swaps since the oldest sample of the batch was made; 0 = on-policy"),
    "samples.dropped_share": ("share", "samples that left their group: grader or engine error, aborted, log-probs that are not finite"),
    "groups.refill_rounds": ("rounds", "extra draws needed to fill the batch"),
    "grader.error_share": ("share", "samples whose grader failed; they leave their group"),
    "tokens.completion": ("tokens", "sampled this step"),
    "tokens.trained": ("tokens", "completion tokens in the step's updates, each counted once"),
    "tokens.per_update": ("tokens", "mean of that over the updates"),
    "tokens.padding_share": (
        "share",
        "positions that hold no token, of all that the step's updates compute: rows are filled up to whole micro-batches "
        "(docs/performance.md, Padding)",
    ),
    "tokens.wasted": ("tokens", "sampled and never trained on: groups dropped in this step, and surplus that was discarded or expired"),
    "updates": ("updates", "optimizer updates made in this step"),
    "updates.skipped": ("updates", "not made, because their gradient or the change was not finite"),
    "loss.policy": ("1", "corrected policy loss, aggregated as configured, mean over the step's updates"),
    "loss.total": ("1", "the same with KL and entropy bonus"),
    "kl.k1": ("nats/token", "mean of log(policy / reference): unbiased, may be negative"),
    "kl.k2": ("nats/token", "mean of half the squared log-ratio: low variance, biased"),
    "kl.k3": (
        "nats/token",
        "mean of exp(-r) - 1 + r with r = log(policy / reference): GRPO's estimate; one rare token can make it jump",
    ),
    "kl.k3_median": ("nats/token", "median of the same estimate over the tokens of an update, which no rare token moves"),
    "entropy": ("nats/token", "mean entropy of the policy at the sampling temperature"),
    "ratio.max": ("1", "largest policy / old policy probability ratio, of tokens or, for gspo, of answers"),
    "ratio.min": ("1", "smallest policy / old policy probability ratio"),
    "ratio.p01": ("1", "its 1st percentile over the tokens of an update"),
    "ratio.p99": ("1", "its 99th percentile"),
    "clip.low_share": ("share", "tokens clipped at the lower bound; 0 for the policy loss that clips nothing, reinforce"),
    "clip.high_share": ("share", "tokens clipped at the upper bound"),
    "grad_norm": ("1", "global gradient norm before clipping, mean over the step's updates"),
    "update_norm": ("1", "global norm of the parameter change, mean over the step's updates"),
    "learning_rate": ("1", "of the step's last update"),
    "mismatch.mean": (
        "nats",
        "mean |engine log-prob - trainer's| over tokens, the trainer's under the old policy; "
        "with `algorithm.old_logp` = engine none is computed, and it is the policy's as it is in each update",
    ),
    "mismatch.p99": ("nats", "its 99th percentile"),
    "mismatch.max": ("nats", "its largest value"),
    "mismatch.k3": ("nats/token", "k3 estimate of KL(engine || trainer)"),
    "mismatch.effective_share": (
        "share",
        "effective sample size of the importance weights trainer / engine, over the tokens; 1 = equal",
    ),
    "correction.mean": ("1", "mean weight of the engine correction; 1 = none"),
    "correction.masked_share": ("share", "tokens that it takes out of the loss"),
    "stage": ("number", "of the stage, from 1; only in runs that have stages"),
    "policy.version": ("version", "weights that the step's rollouts came from"),
    "reference.age_steps": ("steps", "since the reference was last set to the policy"),
    "validation.solve_rate": ("share", "graded validation items that are solved; only in the lines of steps with a validation"),
    "validation.mean_score": ("reward", "mean reward on the graded validation items"),
    "validation.items": ("items", "graded validation items"),
    "validation.ungraded": ("items", "validation items whose grader failed; they are in no rate"),
    "validation.completion_tokens": ("tokens", "sampled for them"),
    "validation.TASK": ("share", "graded validation items of one task that are solved"),
    "rollout.slot_use": ("share", "decode steps of the embedded engine's slots that made a token of a completion"),
    "time.rollout_s": ("s", "sampling"),
    "time.update_s": ("s", "optimizer updates"),
    "time.grading_wait_s": ("s", "waiting for graders after the last completion"),
    "time.step_s": ("s", "the whole step"),
    "time.completion_tokens_per_s": ("tokens/s", "sampled tokens over sampling time"),
}
_PLACEHOLDERS = (".TASK", ".DOMAIN")

# Names that no task may have, since a metric has them: of "validation.items" it is "items".
TAKEN_BY_METRICS = frozenset(
    rest for head, _, rest in (name.partition(".") for name in METRICS) if f"{head}.TASK" in METRICS and rest != "TASK"
)


def check_name(name: str, tasks: Collection[str] | None = None, domains: Collection[str] | None = None) -> None:
    """Raises ValueError unless `name` is in METRICS, where `.TASK` and `.DOMAIN` match one of those given (None: any)."""
    if name in METRICS and not name.endswith(_PLACEHOLDERS):
        return
    head, _, rest = name.partition(".")
    for placeholder, kind, allowed in zip(_PLACEHOLDERS, ("tasks", "domains"), (tasks, domains), strict=True):
        if rest and head + placeholder in METRICS:
            if allowed is None or rest in allowed:
                return
            raise ValueError(f"metric {name!r}: neither in METRICS nor is {rest!r} one of the {kind} {sorted(allowed)}")
    raise ValueError(f"metric {name!r} is not in METRICS (jaxprorl/monitoring/metrics.py): a typo, or add it with unit and meaning")


def _taken_by(task: str) -> str:
    return next(name for name in METRICS if name.partition(".")[2] == task and f"{name.partition('.')[0]}.TASK" in METRICS)


def _number(name: str, value: float) -> int | float:
    if isinstance(value, bool | np.bool_) or np.ndim(value) != 0:
        raise TypeError(f"metric {name!r}: {value!r} is not a number")
    number = int(value) if isinstance(value, int | np.integer) else float(value)
    if not math.isfinite(number):
        raise ValueError(f"metric {name!r} is {number}")
    return number


class MetricsLog(jsonl.JsonLog):
    """The metrics file of a run, open for appending.

    Args:
        path: the file; made with its folder when missing, continued when not (after `truncate`, on resume).
        tasks: the run's task names; then a per-task metric must name one of them. None accepts any.
        domains: the same for domains.

    Raises:
        ValueError: a task's name would hide another metric (`reward.mean`).
    """

    def __init__(self, path: str | os.PathLike[str], tasks: Collection[str] | None = None, domains: Collection[str] | None = None) -> None:
        for task in sorted(TAKEN_BY_METRICS.intersection(tasks or ())):
            raise ValueError(f"a task named {task!r} would collide with the metric {_taken_by(task)!r}: rename the task")
        super().__init__(path)
        self._tasks = None if tasks is None else frozenset(tasks)
        self._domains = None if domains is None else frozenset(domains)
        rows = read(path)
        self._last_step = rows[-1]["step"] if rows else -1

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Writes {"step": step, name: value, ...} with sorted names. Integers stay integers, floats keep every bit.

        Raises:
            ValueError: unknown name, NaN or infinity (names the metric), or a step not after the last one written.
            TypeError: a value that is no scalar number.
        """
        if step <= self._last_step:
            raise ValueError(f"{self.path}: step {step} after step {self._last_step}; on resume truncate to the checkpoint's offset first")
        row: dict[str, int | float] = {"step": int(step)}
        for name in sorted(values):
            check_name(name, self._tasks, self._domains)
            row[name] = _number(name, values[name])
        self.append_row(row)
        self._last_step = int(step)
