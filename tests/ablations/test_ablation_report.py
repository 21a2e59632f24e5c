"""The report and its figures from made-up results; those of real runs are in test_ablation.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_ablation

from jaxprorl.ablations.analysis import compare
from jaxprorl.ablations.figures import band, series
from jaxprorl.ablations.plan import make_plan
from jaxprorl.ablations.records import Record
from jaxprorl.ablations.report import headline, render, text
from jaxprorl.ablations.results import Failure, Result, as_json, lost_pairs, rows
from jaxprorl.ablations.runs import Run
from jaxprorl.errors import DataError

PLAN = make_plan(tiny_ablation.get_config().to_dict() | {"seeds": (0, 1, 2)})


def record(arm: str, seed: int, score: float) -> Record:
    metrics = [
        {
            "step": step,
            "tokens.completion": 3500,
            "groups.drawn": 8,
            "groups.kept": 8,
            "updates": 2,
            "reward.mean": 0.1 * step,
            "kl.k1": 0.0,
        }
        for step in range(2)
    ]
    metrics[1] |= {"validation.solve_rate": 0.25, "validation.completion_tokens": 70}
    side = {"solve_rate": score, "mean_score": score, "per_task": {}}
    summary = {"before": side, "after": side, "seconds": {"rl": 1.0, "total": 2.0}, "greedy": {"after": {"solve_rate": 1.0}}}
    start, end = {"start_digest": "d" * 64}, {"steps": 2, "resets": 0, "spent": {"completion_tokens": 7070, "updates": 4, "prompts": 16}}
    return Record(Run(arm, seed), Path(arm), {"batch": {"updates": 2}}, start, end, [], metrics, summary)


def result(differences: list[float], failures: list[Failure], changes: list[dict[str, Any]] | None = None) -> Result:
    records = [record("never", seed, 0.5) for seed in range(3)]
    records += [record("often", seed, 0.5 + difference) for seed, difference in enumerate(differences)]
    values = {arm: {r.run.seed: r.metric("held_out.mean_score") for r in records if r.run.arm == arm} for arm in PLAN.arms}
    found = compare(values, [(arm, control) for arm, control in PLAN.comparisons], 0.95, "holm", 0.8)
    return Result(PLAN, changes or [], records, failures, found, [], [])


BROKEN = [Failure(Run("broken", seed), "no <b>heads</b>") for seed in range(3)]


def test_what_is_better_is_said() -> None:
    found = result([0.2, 0.21, 0.19], BROKEN)
    assert headline(found) == "6 of 9 runs finished; often better than never (+0.2) (held_out.mean_score, comparisons: 2)."
    assert '<span class="good">better</span>' in render(found)


def test_what_cannot_be_told_apart_is_said_with_what_would_have_been_seen() -> None:
    found = result([0.2, -0.2, 0.1], BROKEN)
    assert "no two arms are distinguishable" in headline(found)
    told = text(found)
    assert "often - never: +0.03333, corrected interval" in told and "not distinguishable" in told
    assert "would have been found with 80% chance at the spread seen" in told


def test_items_without_a_grade_are_told_beside_the_rates() -> None:
    found = result([0.2, 0.21, 0.19], BROKEN)
    assert "graded" not in text(found)
    record = found.records[0]
    record.rows[1]["validation.ungraded"] = 4
    record.summary["greedy"]["after"]["ungraded"] = 2
    record.summary["before"]["ungraded"] = 1  # before and after are one in these made-up summaries
    assert "could not be graded: never-seed_0 8" in text(found)
    assert "could not be graded: never-seed_0 8." in render(found)
    assert rows(found)[0]["ungraded"] == 8
    record.summary["after"]["mean_score"] = None
    with pytest.raises(DataError, match=r"never: no held_out\.mean_score, its 1 items could not be graded"):
        record.metric("held_out.mean_score")


def test_failures_lost_pairs_and_changed_plans_cannot_be_missed() -> None:
    changes = [{"why": "too <few>", "fields": ["seeds was [0], now [0, 1, 2]"], "digest": "x"}]
    found = result([0.2, 0.1], [*BROKEN, Failure(Run("often", 2), "killed by SIGKILL")], changes)
    assert lost_pairs(found) == ["broken − never: without seeds 0, 1, 2", "often − never: without seed 2"]
    page = render(found)
    assert "4 runs have no result" in page and "often-seed_2: killed by SIGKILL" in page and "without seed 2" in page
    assert "no &lt;b&gt;heads&lt;/b&gt;" in page and "<b>heads" not in page
    assert "too &lt;few&gt;" in page and "seeds was [0], now [0, 1, 2]" in page
    assert "FAILED often-seed_2: killed by SIGKILL" in text(found)
    assert len(as_json(found)["failed"]) == 4


def test_rows_are_all_runs_in_their_order() -> None:
    table = rows(result([0.2, 0.1, 0.3], BROKEN))
    assert [row["run"] for row in table[:3]] == ["never-seed_0", "broken-seed_0", "often-seed_0"]
    assert table[1]["error"] == "no <b>heads</b>" and table[1]["metric"] == ""
    row = table[2]
    assert (row["metric"], row["spent"], row["completion_tokens"], row["validation_tokens"], row["updates"]) == (0.7, 7070, 7000, 70, 4)
    assert (row["groups_kept"], row["validation_last"], row["time_total_s"]) == (16, 0.25, 2.0)


def test_bands_cover_what_all_seeds_cover() -> None:
    found = band([([0.0, 10.0], [0.0, 1.0]), ([5.0, 15.0], [2.0, 2.0])])
    assert found is not None
    grid, mean, low, high = found
    assert (grid[0], grid[-1]) == (5.0, 10.0)
    np.testing.assert_allclose((low[0], mean[0], high[0]), (0.5, 1.25, 2.0))
    assert band([([0.0, 1.0], [0.0, 0.0]), ([2.0, 3.0], [0.0, 0.0])]) is None
    assert band([([], [])]) is None


def test_curves_run_over_what_was_spent_and_skip_steps_without_the_metric() -> None:
    one = record("never", 0, 0.5)
    assert series(one, "validation.solve_rate", "completion_tokens", smooth=False) == ([7070.0], [0.25])
    spent, values = series(one, "reward.mean", "prompts", smooth=True)
    assert spent == [8.0, 16.0] and values == [0.0, pytest.approx(0.05)]
