"""From finished runs to `runs.csv`, `result.json` and `report.html`; nothing is concluded from runs that are not matched."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprorl.ablations import speed
from jaxprorl.ablations.analysis import Comparison, compare
from jaxprorl.ablations.matching import check
from jaxprorl.ablations.plan import Plan
from jaxprorl.ablations.records import Record, read_record
from jaxprorl.ablations.runs import Home, Run, all_runs, makes_start, planned_start, read_outcome
from jaxprorl.files import write_atomically

COLUMNS = (
    "run", "arm", "seed", "state", "error", "metric", "held_out_before", "held_out_after", "validation_last", "ungraded", "steps",
    "updates", "prompts", "groups_drawn", "groups_kept", "resets", "completion_tokens", "validation_tokens", "spent", "time_rl_s",
    "time_total_s", "start_digest", "start_fields_digest",
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """A run without a result; `state` is "failed" or "not run"."""

    run: Run
    line: str
    state: str = "failed"


@dataclass(frozen=True)
class Result:
    """All that the report shows. `comparisons` are those of "outcome", `costs` and `agreements` those of "speed"."""

    plan: Plan
    changes: list[dict[str, Any]]
    records: list[Record]
    failures: list[Failure]
    comparisons: list[Comparison]
    costs: list[speed.Cost]
    agreements: list[speed.Agreement]

    def of_arm(self, arm: str) -> list[Record]:
        """Its finished runs."""
        return [record for record in self.records if record.run.arm == arm]


def conclude(plan: Plan, home: Home, changes: list[dict[str, Any]]) -> Result:
    """Reads the runs and compares them.

    Raises:
        ConfigError: they are not matched.
        DataError: a file of a run cannot be read.
    """
    records, failures = [], []
    for run in all_runs(plan):
        outcome = read_outcome(home, run)
        if outcome and outcome.done:
            records.append(read_record(run, home.runs / run.name))
        else:
            failures.append(Failure(run, outcome.line) if outcome else Failure(run, "not run yet", "not run"))
    check(plan, home, records)
    comparisons: list[Comparison] = []
    if plan.question == "outcome":
        values = {arm: {record.run.seed: record.metric(plan.metric) for record in records if record.run.arm == arm} for arm in plan.arms}
        pairs = [(arm, control) for arm, control in plan.comparisons]
        comparisons = compare(values, pairs, plan.confidence, plan.correction, plan.power)
    is_speed = plan.question == "speed"
    return Result(
        plan, changes, records, failures, comparisons,
        costs=speed.costs(plan, records) if is_speed else [],
        agreements=speed.agreements(plan, records) if is_speed else [],
    )  # fmt: skip


def rows(result: Result) -> list[dict[str, Any]]:
    """One row of `runs.csv` per planned run; what a run without a result does not have is empty."""
    done = {record.run: _row(result.plan, record) for record in result.records}
    failed = {
        failure.run: {
            "run": failure.run.name,
            "arm": failure.run.arm,
            "seed": failure.run.seed,
            "state": failure.state,
            "error": failure.line,
        }
        for failure in result.failures
    }
    found: Mapping[Run, dict[str, Any]] = done | failed
    return [{column: found[run].get(column, "") for column in COLUMNS} for run in all_runs(result.plan)]


def _row(plan: Plan, record: Record) -> dict[str, Any]:
    summary, spent = record.summary, record.end["spent"]
    validations = [row["validation.solve_rate"] for row in record.rows if "validation.solve_rate" in row]
    return {
        "run": record.name,
        "arm": record.run.arm,
        "seed": record.run.seed,
        "state": "done",
        "metric": record.metric(plan.metric) if plan.question == "outcome" else "",
        "held_out_before": summary["before"]["solve_rate"],
        "held_out_after": summary["after"]["solve_rate"],
        "validation_last": validations[-1] if validations else "",
        "ungraded": record.ungraded,
        "steps": record.end["steps"],
        "updates": record.total("updates"),
        "prompts": spent["prompts"],
        "groups_drawn": record.total("groups.drawn"),
        "groups_kept": record.total("groups.kept"),
        "resets": record.end["resets"],
        "completion_tokens": record.total("tokens.completion"),
        "validation_tokens": record.total("validation.completion_tokens"),
        "spent": record.spent(plan.budget["kind"])[-1],
        "time_rl_s": round(summary["seconds"]["rl"], 2),
        "time_total_s": round(summary["seconds"]["total"], 2),
        "start_digest": record.start["start_digest"],
        "start_fields_digest": planned_start(plan, record.run.seed)["digest"] if makes_start(plan) else "",
    }


def as_json(result: Result) -> dict[str, Any]:
    """The content of `result.json`."""
    plan = result.plan
    return {
        "name": plan.name,
        "question": plan.question,
        "metric": plan.metric if plan.question == "outcome" else None,
        "plan_digest": plan.digest,
        "plan_changes": result.changes,
        "minimum_detectable": plan.minimum_detectable,
        "comparisons": [dataclasses.asdict(found) | {"verdict": found.verdict} for found in result.comparisons],
        "costs": speed.as_json(result.costs),
        "agreements": speed.as_json(result.agreements),
        "failed": [{"run": failure.run.name, "error": failure.line} for failure in result.failures],
        "runs": rows(result),
    }


def write_results(home: Home, result: Result, report: str) -> None:
    """Writes the three files, each whole or not at all."""
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows(result))
    write_atomically(home.path / "runs.csv", out.getvalue())
    write_atomically(home.path / "result.json", json.dumps(as_json(result), indent=2, allow_nan=False) + "\n")
    write_atomically(home.path / "report.html", report)


def forget_results(home: Home) -> None:
    """Removes results of an earlier time, which must not stand beside runs that have changed since."""
    for name in ("runs.csv", "result.json", "report.html"):
        (home.path / name).unlink(missing_ok=True)


def ungraded(result: Result) -> str:
    """Which runs have items that are in no rate, in words; empty where all were graded."""
    found = [f"{record.name} {record.ungraded}" for record in result.records if record.ungraded]
    return f"items of evaluations and validations that could not be graded: {', '.join(found)}" if found else ""


def lost_pairs(result: Result) -> Sequence[str]:
    """What each comparison lacks: seeds of which an arm has no result."""
    done = {record.run for record in result.records}
    told = []
    for arm, control in result.plan.comparisons:
        lost = [seed for seed in result.plan.seeds if not {Run(arm, seed), Run(control, seed)} <= done]
        if lost:
            told.append(f"{arm} − {control}: without seed{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}")
    return told
