"""What a finished run tells of itself, read from the files in its folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from jaxprorl.ablations.runs import Run
from jaxprorl.errors import DataError
from jaxprorl.monitoring import jsonl


@dataclass(frozen=True)
class Record:
    """A run that ended well.

    Attributes:
        run: which one.
        folder: of the run.
        config: `config.json`.
        start: its event `run_start`.
        end: its event `run_end`.
        events: all events.
        rows: `metrics.jsonl`.
        summary: `summary.json`.
    """

    run: Run
    folder: Path
    config: dict[str, Any]
    start: dict[str, Any]
    end: dict[str, Any]
    events: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the run."""
        return self.run.name

    def steps_spent(self, kind: str) -> list[int]:
        """What each step used of a budget of that kind, by the step's own metrics."""
        if kind == "completion_tokens":
            return [int(row["tokens.completion"] + row.get("validation.completion_tokens", 0)) for row in self.rows]
        if kind == "updates":
            return [int(row.get("updates", 0) + row.get("updates.skipped", 0)) for row in self.rows]  # none in a step without groups
        return [int(row["groups.drawn"]) if kind == "prompts" else 1 for row in self.rows]

    def spent(self, kind: str) -> list[int]:
        """The same, summed up to each step."""
        return list(accumulate(self.steps_spent(kind)))

    def total(self, metric: str) -> int:
        """Sum of a metric of counts over the steps."""
        return int(sum(row.get(metric, 0) for row in self.rows))

    def metric(self, name: str) -> float:
        """The metric by which arms are compared, one of `plan.METRICS`.

        Raises:
            DataError: the run had no validation, or none of the items could be graded.
        """
        side, field = name.split(".")
        if side == "validation":
            found = [row["validation.solve_rate"] for row in self.rows if "validation.solve_rate" in row]
            if not found:
                raise DataError(f"{self.folder}: no graded validation in {len(self.rows)} steps; lower validation.every_steps in fields")
            return float(found[-1])
        after = self.summary["greedy"]["after"] if field == "greedy_solve_rate" else self.summary["after"]
        value = after["solve_rate" if field == "greedy_solve_rate" else field]
        if value is None:
            raise DataError(f"{self.folder}: no {name}, its {after['ungraded']} items could not be graded; mend the reward")
        return float(value)

    @property
    def ungraded(self) -> int:
        """Items of all evaluations and validations that are in no rate; 0 in the files of runs that did not count them."""
        evaluations = (self.summary["before"], self.summary["after"], *self.summary["greedy"].values())
        return sum(result.get("ungraded", 0) for result in evaluations) + self.total("validation.ungraded")


@dataclass(frozen=True)
class Drawn:
    """A prompt drawn in training, its place in the step, and the places of all prompts of the step; carried ones come first."""

    prompt_id: int
    place: int
    places: Mapping[int, int]

    def follows(self, prompt_id: int) -> bool:
        """Whether the step held that prompt already when it drew this one."""
        return self.places.get(prompt_id, self.place) < self.place


def read_record(run: Run, folder: Path) -> Record:
    """Reads a finished run.

    Raises:
        DataError: a file is missing, cannot be read, or tells of no end; names it.
    """
    try:
        config, summary = (json.loads((folder / name).read_text()) for name in ("config.json", "summary.json"))
        events, rows = (jsonl.read(folder / name) for name in ("events.jsonl", "metrics.jsonl"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: not a finished run: {error}") from None
    starts, ends = ([event for event in events if event["kind"] == kind] for kind in ("run_start", "run_end"))
    if not starts or not ends or not rows:
        raise DataError(f"{folder}/events.jsonl: tells of no {'end' if starts else 'start'} of the run, though there is a summary.json")
    if "start_digest" not in starts[0] or "spent" not in ends[-1]:
        raise DataError(f"{folder}/events.jsonl: an older version of jaxprorl wrote it, without what runs are matched by; run it again")
    return Record(run, folder, config, starts[0], ends[-1], events, rows, summary)


def drawn_prompts(record: Record) -> list[Drawn]:
    """Every group drawn, in the order of drawing, from the stored samples.

    Raises:
        DataError: the samples of a step are missing or cannot be read.
    """
    drawn: list[Drawn] = []
    for row, table in zip(record.rows, _steps_of_samples(record, ["prompt_id"]), strict=True):
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(table["prompt_id"]))}  # a step holds none twice
        drawn += [Drawn(prompt, place, places) for prompt, place in places.items() if place >= row["groups.carried"]]
    return drawn


def completions(record: Record) -> list[list[str]]:
    """The text of every sample of each step, in their order. Raises like `drawn_prompts`."""
    return [table["completion"] for table in _steps_of_samples(record, ["completion"])]


def _steps_of_samples(record: Record, columns: Sequence[str]) -> Iterator[Mapping[str, list[Any]]]:
    for row in record.rows:
        path = record.folder / "samples" / f"step_{row['step']:06d}.parquet"
        try:
            yield pq.read_table(path, columns=columns).to_pydict()
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
