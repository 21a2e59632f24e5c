"""Names, order, command lines and ends of runs; starting them is in test_ablation.py."""

import signal
import threading
import time
from pathlib import Path

import tiny_ablation

from jaxprorl.ablations.plan import make_plan
from jaxprorl.ablations.runs import Home, Outcome, Run, all_runs, changes_of, last_error, read_outcome, wait_for_orphan, write_outcome
from jaxprorl.run_lock import RunLock


def test_the_arms_of_a_seed_run_together() -> None:
    plan = make_plan(tiny_ablation.get_config().to_dict())
    assert [run.name for run in all_runs(plan)] == [
        "never-seed_0", "broken-seed_0", "often-seed_0", "never-seed_1", "broken-seed_1", "often-seed_1",
    ]  # fmt: skip


def test_a_run_is_the_experiment_with_the_arms_changes_last_but_for_its_own(tmp_path: Path) -> None:
    plan, home = make_plan(tiny_ablation.get_config().to_dict()), Home(tmp_path)
    changes = changes_of(plan, home, Run("often", 1))
    assert changes == [
        *plan.fields, "resets.every_steps=1", "resets.optimizer=none", f"runs_dir={tmp_path}/runs", "run_name=often-seed_1", "seed=1",
        f"budget.completion_tokens={tiny_ablation.BUDGET}", f"model.path={tmp_path}/start/seed_1",
    ]  # fmt: skip
    speed = make_plan(tiny_ablation.get_config("strategies").to_dict())
    assert "steps=3" in changes_of(speed, home, Run("never", 0)), "the last of several counts"


def test_the_line_that_tells_why_a_run_failed() -> None:
    assert last_error(2, "step 1/3\nerror: steps = 0: must be greater than 0\n") == "steps = 0: must be greater than 0"
    assert last_error(1, "Traceback (most recent call last):\n  File\nZeroDivisionError: division by zero\n\n") == (
        "ZeroDivisionError: division by zero"
    )
    assert last_error(-signal.SIGKILL, "step 1/3\n") == "killed by SIGKILL"
    assert "an alarm paused it" in last_error(75, "ALARM\n")
    assert last_error(3, "") == "ended with status 3 and printed nothing"


def test_outcomes_are_remembered(tmp_path: Path) -> None:
    home, run = Home(tmp_path), Run("often", 1)
    assert read_outcome(home, run) is None
    outcome = Outcome(False, 2, "error", ["seed=1"], 1.5)
    write_outcome(home, run, outcome)
    assert read_outcome(home, run) == outcome


def test_a_process_that_outlived_the_harness_is_waited_for(tmp_path: Path) -> None:
    told: list[str] = []
    wait_for_orphan(tmp_path / "none", told.append)
    lock = RunLock(tmp_path)
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    started_s = time.monotonic()
    wait_for_orphan(tmp_path, told.append)
    assert time.monotonic() - started_s >= 0.3
    assert len(told) == 1 and "is in use by process" in told[0]
