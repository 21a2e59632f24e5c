"""Whether runs may be compared: same plan, start, data, prompt stream, evaluation and budget. What differs is named with both values."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprorl.ablations.plan import EVALUATION_FIELDS, Plan, resolve
from jaxprorl.ablations.records import Drawn, Record, drawn_prompts
from jaxprorl.ablations.runs import Home, all_runs, changes_of, makes_start, stale_start
from jaxprorl.config import differences
from jaxprorl.errors import ConfigError

# What a run's config may differ in from the plan: where it lies, and how it is watched and saved.
ELSEWHERE = ("runs_dir", "cache_dir", "on_existing", "monitoring.", "checkpoint.", "grading.workers")
SHOWN = 6  # differences named in one message


def check(plan: Plan, home: Home, records: Sequence[Record]) -> None:
    """Refuses runs that are not matched.

    Raises:
        ConfigError: names runs, what differs, and both values.
        DataError: a file of a run cannot be read.
    """
    problems = strangers(plan, home.runs)
    for record in records:
        problems += foreign_config(plan, home, record) + wrong_budget(plan, record)
    for seed in plan.seeds:
        of_seed = [record for record in records if record.run.seed == seed]
        if of_seed and makes_start(plan) and home.start(seed).is_dir():  # runs keep a copy; theirs are compared by their weights
            problems += filter(None, [stale_start(plan, home, seed)])
        for other in of_seed[1:]:
            problems += unlike(of_seed[0], other) + other_stream(of_seed[0], other)
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ConfigError(f"{home.path}: the arms are not matched: {'; '.join(problems[:SHOWN])}{more}")


def strangers(plan: Plan, runs: Path) -> list[str]:
    """Folders among the runs that the plan does not know."""
    known = {run.name for run in all_runs(plan)}
    folders = sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    return [f"{runs / name} is not a run of the plan: move it away" for name in folders if name not in known and ".old-" not in name]


def foreign_config(plan: Plan, home: Home, record: Record) -> list[str]:
    """Fields in which a run is not the one planned."""
    planned = resolve(plan.experiment, changes_of(plan, home, record.run), record.name)
    return [
        f"{record.name} is not a run of the plan: its {field} is {theirs!r}, planned is {ours!r}"
        for field, theirs, ours in differences(record.config, planned)
        if not field.startswith(ELSEWHERE)
    ]


def wrong_budget(plan: Plan, record: Record) -> list[str]:
    """A run must end with the first step that uses the budget up."""
    kind, size = plan.budget["kind"], plan.budget["size"]
    spent = record.spent(kind)
    told = record.end["steps"] if kind == "steps" else record.end["spent"][kind]
    # Places of the prompt order that a step passed over are in no metric.
    if told != spent[-1] and kind != "prompts":
        return [f"{record.name}: its metrics make up {spent[-1]} {kind}, its end tells of {told}"]
    if told < size:
        return [f"{record.name} used {told} of the budget of {size} {kind} and ended; raise steps in fields (now {record.config['steps']})"]
    before = spent[-2] if len(spent) > 1 else 0
    if before >= size:
        return [f"{record.name} used {told} {kind}, the budget of {size} was used up more than one step earlier"]
    return []


def unlike(a: Record, b: Record) -> list[str]:
    """What two runs of a seed must share beside the stream."""
    pairs: list[tuple[str, Any, Any]] = [("start weights (digest)", a.start["start_digest"], b.start["start_digest"])]
    same_reward = a.config["reward"] == b.config["reward"]  # else it is what is asked about
    kinds = ("data", "tokenizer", "reward") if same_reward else ("data", "tokenizer")
    pairs += [(f"{kind} (digest)", a.start["identity"][kind], b.start["identity"][kind]) for kind in kinds]
    pairs += [
        (f"evaluation ({field})", ours, theirs)
        for field, ours, theirs in differences(a.config, b.config)
        if field.startswith(EVALUATION_FIELDS)
    ]
    pairs += [("evaluation (items)", _items(a.summary), _items(b.summary))]
    return [f"{a.name} and {b.name}: other {what}: {_short(ours)}, {_short(theirs)}" for what, ours, theirs in pairs if ours != theirs]


def other_stream(a: Record, b: Record) -> list[str]:
    """The first place at which two runs did not draw the same prompts; the shorter one is a prefix of the longer."""
    place = first_difference(drawn_prompts(a), drawn_prompts(b))
    if place is None:
        return []
    number, ours, theirs = place
    return [f"{a.name} and {b.name}: other prompt stream: prompt {number} is {ours}, {theirs}"]


def first_difference(a: Sequence[Drawn], b: Sequence[Drawn]) -> tuple[int, int, int] | None:
    """(place in `a`, prompt id there, prompt id in `b`) where the streams part, up to the end of the shorter; None if they do not.

    A prompt that a step held already was passed over by it (`rollout.collect`): such gaps are no difference.
    """
    i = j = 0
    while i < len(a) and j < len(b):
        ours, theirs = a[i], b[j]
        if ours.prompt_id == theirs.prompt_id:
            i, j = i + 1, j + 1
        elif ours.follows(theirs.prompt_id):
            j += 1
        elif theirs.follows(ours.prompt_id):
            i += 1
        else:
            return i, ours.prompt_id, theirs.prompt_id
    return None


def _items(summary: Mapping[str, Any]) -> dict[str, int]:
    return {task: row["n"] for task, row in summary["after"]["per_task"].items()}


def _short(value: Any) -> str:
    """A value for a message; of digests the beginning tells enough."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else json.dumps(value)
