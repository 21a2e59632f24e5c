"""Start models of seeds: made under the plan's fields or not at all. launch/ is replaced by functions that write what it would."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_ablation

from jaxprorl.ablations import runs
from jaxprorl.ablations.matching import check
from jaxprorl.ablations.plan import Plan, make_plan
from jaxprorl.ablations.records import Record
from jaxprorl.ablations.report import render, text
from jaxprorl.ablations.results import COLUMNS, as_json, conclude
from jaxprorl.ablations.runs import Home, Run, all_runs, begun, execute, make_start, planned_start, read_outcome, stale_start
from jaxprorl.errors import ConfigError

Launched = list[tuple[str, str]]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "ablation")
    found.path.mkdir()
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    """(script, last change that tells which run) of each process. The start model of seed 13 cannot be made; runs come to an end."""
    calls: Launched = []

    def run_process(script: str, experiment: str, changes: Sequence[str], log: Path) -> tuple[int, str]:
        given = dict(change.split("=", 1) for change in changes)
        calls.append((script, given["seed"] if script == "warmstart.py" else given["run_name"]))
        if script == "train.py":
            return 0, ""
        if given["seed"] == "13":
            return 2, "error: data.tasks.chain_sum: out of questions\n"
        folder = tmp_path / "cache" / given["warmstart.skill_updates"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(given["warmstart.skill_updates"])
        return 0, f"a line\n{folder} (from the cache)\n"

    monkeypatch.setattr(runs, "run_process", run_process)
    return calls


def plan_of(skill_updates: int = 50, **changes: Any) -> Plan:
    settings = tiny_ablation.get_config().to_dict() | changes
    fields = (*settings["fields"], f"warmstart.skill_updates={skill_updates}", "warmstart.max_skill_updates=90")
    return make_plan(settings | {"fields": fields})


def test_a_start_model_is_made_once_and_tells_under_what(home: Home, launched: Launched) -> None:
    plan = plan_of()
    assert not begun(home)
    make_start(plan, home, 0)
    make_start(plan, home, 0)
    assert launched == [("warmstart.py", "0")] and begun(home), "a start model binds the plan"
    made = json.loads((home.start(0) / "made_under.json").read_text())
    assert made == json.loads(json.dumps(planned_start(plan, 0)))
    assert (made["fields"]["warmstart"]["skill_updates"], made["fields"]["seed"]) == (50, 0)
    assert stale_start(plan, home, 0) == ""


@pytest.mark.parametrize(
    ("field", "same"),
    [
        ("warmstart.careless_updates=3", False),
        ("model.hidden_size=64", False),
        ("data.train_per_task=30", False),
        ("mesh.strategy=fsdp", False),
        ("rollout.slots=16", False),
        ("optimizer.learning_rate=0.5", True),
        ("model.reference_dtype=bfloat16", True),
        ("validation.every_steps=1", True),
    ],
)
def test_the_digest_is_of_what_the_start_model_depends_on(field: str, same: bool) -> None:
    plan, fields = plan_of(), tiny_ablation.get_config().fields
    other = plan_of(fields=(*fields, field))
    assert (planned_start(other, 0)["digest"] == planned_start(plan, 0)["digest"]) == same
    assert planned_start(plan, 1)["digest"] != planned_start(plan, 0)["digest"]


def test_a_stale_start_model_is_moved_aside_and_made_again(home: Home, launched: Launched) -> None:
    make_start(plan_of(50), home, 0)
    make_start(plan_of(60), home, 0)
    assert len(launched) == 2
    assert (home.start(0) / "weights").read_text() == "60"
    assert (home.path / "start/seed_0.old-1/weights").read_text() == "50"


def test_a_stale_start_model_from_which_runs_began_is_refused(home: Home, launched: Launched) -> None:
    make_start(plan_of(50), home, 0)
    for run in ("often-seed_0", "often-seed_1"):
        (home.runs / run).mkdir(parents=True)
        (home.runs / run / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"warmstart.skill_updates was 50, now 60\), and often-seed_0 began from it: move"):
        make_start(plan_of(60), home, 0)
    assert (home.start(0) / "weights").read_text() == "50"
    (home.start(0) / "made_under.json").unlink()
    with pytest.raises(ConfigError, match=r"seed_0 does not tell under which fields it was made"):
        make_start(plan_of(50), home, 0)


def test_runs_beside_a_stale_start_model_are_not_compared(home: Home, launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("foreign_config", "wrong_budget"):
        monkeypatch.setattr(f"jaxprorl.ablations.matching.{name}", lambda *_: [])
    make_start(plan_of(50), home, 0)
    record = Record(Run("often", 0), home.runs / "often-seed_0", {}, {}, {}, [], [], {})
    check(plan_of(50), home, [record])
    with pytest.raises(ConfigError, match=r"not matched: .*seed_0 was made under other fields \(warmstart.skill_updates was 50, now 60\)"):
        check(plan_of(60), home, [record])


def test_a_start_model_that_cannot_be_made_fails_its_seed_and_no_other(home: Home, launched: Launched) -> None:
    plan, told = plan_of(seeds=(13, 1)), list[str]()
    execute(plan, home, told.append)
    assert launched == [("warmstart.py", "13"), ("warmstart.py", "1"), *(("train.py", f"{arm}-seed_1") for arm in plan.arms)], "tried once"
    for run in all_runs(plan):
        outcome = read_outcome(home, run)
        assert outcome and outcome.done == (run.seed == 1)
        assert outcome.done or outcome.line.startswith("seed 13: no start model could be made: data.tasks.chain_sum: out of questions (all")
    assert sum("FAILED: seed 13: no start model" in line for line in told) == 3


def test_an_ablation_without_any_start_model_has_a_report_of_that(home: Home, launched: Launched) -> None:
    plan = plan_of(seeds=(13,))
    execute(plan, home, lambda _: None)
    result = conclude(plan, home, [])
    assert [failure.run for failure in result.failures] == all_runs(plan)
    assert "out of questions" in render(result) and "FAILED often-seed_13" in text(result)
    assert all("out of questions" in failed["error"] for failed in as_json(result)["failed"])
    assert all(set(row) == set(COLUMNS) for row in as_json(result)["runs"])


def test_a_start_process_that_prints_no_folder_is_a_failure(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "run_process", lambda *_: (0, ""))
    with pytest.raises(ConfigError, match=r"seed 0: no start model could be made: launch/warmstart.py printed no folder"):
        make_start(plan_of(), home, 0)
    assert not home.start(0).exists()
