"""`events.jsonl`: everything the run decided, one line each. Plots, reports and docs read it; nothing edits it.

No event holds a wall-clock value except in fields that start with `time_`, so that two runs can be compared line by line.
"""

from typing import Any

from jaxprorl.monitoring import jsonl
from jaxprorl.monitoring.jsonl import read, truncate

__all__ = ["EVENTS", "EventLog", "read", "truncate"]

# kind -> (meaning, the fields it carries; `?` marks those that may be absent)
EVENTS: dict[str, tuple[str, str]] = {
    "run_start": (
        "a run begins from nothing",
        "seed, steps, parameters (count), devices (count), micro_batch_rows, attention, remat, versions {package: version}, "
        "identity {data, tokenizer, reward: digest}, start_digest (of the start parameters)",
    ),
    "resume": ("a run goes on from a checkpoint", "checkpoint_step, metrics_offset?, events_offset?, devices, micro_batch_rows"),
    "warm_start": ("the base model is ready", "cached (bool), fingerprint, skill_updates?, careless_updates?, solve_rate?"),
    "data": (
        "splits made and compared",
        "train, validation, held_out (items), duplicates_removed?, fingerprint?, findings? {kind: count} (rows left out as duplicate, "
        "conflict or overlong, and look_alike ones, which stay), rows? [the first of them: kind, place, other, detail; all are in "
        "data_findings.jsonl where they are more]",
    ),
    "compile": (
        "an executable was built before the loop",
        "name, shapes?, time_s?, memory_bytes? {argument, output, alias (shared by these), temp: the compiler's estimate per device}, "
        "cache_bytes? {group size: of the embedded engine's cache, all devices together}, "
        "temporary_bytes? {group size: what that engine takes beside cache and weights, the compiler's estimate per device}",
    ),
    "evaluation": (
        "held-out split graded",
        "when (before or after), temperature, solve_rate and mean_score (of graded items; null without any), ungraded (items), "
        "per_task? {task: solve_rate}, ungraded_per_task? {task: items}",
    ),
    "stage": (
        "a stage begins, right before this step",
        "number (from 1), name, reason (how the one before ended), changes {field: value}, micro_batch_rows, "
        "surplus_dropped (groups that do not fit it), tokens_wasted (theirs)",
    ),
    "stage_end": (
        "a stage has ended with this step",
        "number, name, steps, trigger (steps, plateau or manual), reason, signals (what it read: step, validation, person), "
        "statistics {name: value}",
    ),
    "reset": (
        "reference, optimizer or both reset, right before this step",
        "reference (bool: it became the policy), optimizer (what of it, docs/resets.md), reason, trigger, "
        "(stage = it comes with a stage), statistics {name: value}, signals (what the trigger read: step, "
        "training, validation, person), blind (bool: no trigger of the run can see validation), also (other triggers that fired), "
        "before {metric: value in the step before}",
    ),
    "reset_effect": ("the first step after a reset", "trigger, before {metric: value in the step before}, after {metric: value}"),
    "alarm": ("an alarm begins to ring", "alarm, action, reason, statistics {name: value} (time_statistics of stalled_engine)"),
    "drop": ("groups without a signal left the batch", "prompt_ids, all_correct?, all_wrong?"),
    "refill": ("more prompts drawn to fill the batch", "round, prompts (count)"),
    "cap_reached": ("no more prompts may be drawn this step", "drawn, kept, wanted"),
    "skipped_updates": ("gradients that are not finite: the updates were skipped", "count, in_a_row"),
    "swap": (
        "the engine took new weights",
        "policy_version; of workers: bytes? (of the weights), probe_nats?, probe_mean_nats? (largest and mean difference "
        "to the trainer's log-probs), lost_workers? (since the swap before), time_swap_s?, time_load_s? (of the slowest)",
    ),
    "validation": ("validation split graded", "solve_rate, mean_score, ungraded, per_task?, ungraded_per_task? (as of evaluation)"),
    "grader_errors": (
        "samples without a score",
        "of (step, validation, evaluation before, ...), count, share, examples? (what the graders said)",
    ),
    "checkpoint": ("a checkpoint was written", "checkpoint_step?, bytes?, time_s?"),
    "interrupted": ("a signal stopped the run after this step", "signal"),
    "device_memory": ("peak since this process began, where the platform tells", "peak_bytes [per device]"),
    "view_failed": (
        "something derived or only shown cannot be made and is left out from here on; the run goes on",
        "view (progress, TensorBoard, report, profile, standard output or standard error), error",
    ),
    "run_end": (
        "all steps or stages done, or a budget used up",
        "steps, resets, spent {completion_tokens (of validations too), updates (skipped ones too), prompts}",
    ),
}
_CLOCK_SUFFIXES = ("_s", "seconds", "timestamp", "elapsed", "duration")


class EventLog(jsonl.JsonLog):
    """The event file of a run, open for appending (continued when it exists; `truncate` it first on resume)."""

    def append(self, step: int, kind: str, **fields: Any) -> None:
        """Writes {"step": step, "kind": kind, field: value, ...} with sorted fields of JSON types.

        Raises:
            ValueError: unknown kind, NaN or infinity, a field whose name says it is a duration or a date but does not start with `time_`.
            TypeError: a value that is not JSON.
        """
        if kind not in EVENTS:
            raise ValueError(f"event kind {kind!r} is not in EVENTS (jaxprorl/monitoring/events.py); known: {', '.join(EVENTS)}")
        row: dict[str, Any] = {"step": int(step), "kind": kind}
        for name in sorted(fields):
            if name.endswith(_CLOCK_SUFFIXES) and not name.startswith("time_"):
                raise ValueError(f"event {kind!r}, field {name!r}: a wall-clock value must be named time_*")
            try:
                jsonl.encode(fields[name])
            except (TypeError, ValueError) as error:
                raise type(error)(f"event {kind!r}, field {name!r}: {error}") from error
            row[name] = fields[name]
        self.append_row(row)
