"""Ablations of small real runs through launch/ablate.py, killed on the way; and what the check finds in folders that were tampered with."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import tiny_ablation
import tiny_run

from jaxprorl import commit
from jaxprorl.ablations.plan import make_plan
from jaxprorl.ablations.results import Result, conclude
from jaxprorl.ablations.runs import Home
from jaxprorl.errors import ConfigError, DataError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FILE = str(Path(tiny_ablation.__file__))
HOME = Path("ablations/resets")


def start(folder: Path, *arguments: str, kind: str = "resets") -> subprocess.Popen[str]:
    command = [sys.executable, str(tiny_run.ROOT / "launch/ablate.py"), "--config", f"{FILE}:{kind}", *arguments]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=tiny_run.user_environment(), text=True, **streams)  # type: ignore[call-overload,no-any-return]


def ablate(folder: Path, *arguments: str, kind: str = "resets", status: int = 0) -> tuple[str, str]:
    process = start(folder, *arguments, kind=kind)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == status, f"{process.returncode}\n{stdout}\n{stderr}"
    return stdout, stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished ablation. Its harness was killed in the second run, which went on for a while and was killed too."""
    folder = tiny_run.new_home(tmp_path_factory)
    harness = start(folder)
    run = folder / HOME / "runs/often-seed_0"
    end_s = time.monotonic() + 240
    while not commit.committed_steps(run / "checkpoints"):
        assert harness.poll() is None and time.monotonic() < end_s, harness.communicate()
        time.sleep(0.01)
    (trainer,) = (child for child in psutil.Process(harness.pid).children() if "launch/train.py" in " ".join(child.cmdline()))
    harness.kill()
    harness.communicate()
    trainer.kill()
    while trainer.is_running() and trainer.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    log = (folder / HOME / "logs/never-seed_0.log").read_bytes()
    stdout, stderr = ablate(folder, status=1)
    (folder / "stdout").write_text(stdout)
    assert stderr == ""
    assert (folder / HOME / "logs/never-seed_0.log").read_bytes() == log, "the finished run is not started again"
    return folder


@pytest.fixture
def copy(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs in a folder of their own, which is the current one."""
    shutil.copytree(place / "ablations", tmp_path / "ablations")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def concluded(**changes: Any) -> Result:
    return conclude(make_plan(tiny_ablation.get_config().to_dict() | changes), Home(HOME), [])


def test_the_plan_comes_first_and_every_run_is_told_of(place: Path) -> None:
    told = (place / "stdout").read_text().splitlines()
    assert told[0].startswith("resets: 3 arms x 2 seeds = 6 runs of 6,000 completion tokens; plan ")
    assert "held_out.mean_score: a difference of 2.31 is found with 80% chance" in told[1]
    assert "1/6 never-seed_0: done" in told
    assert any(line.startswith("2/6 broken-seed_0: FAILED: mesh.strategy = 'tp' splits 1 attention heads over 2 devices") for line in told)
    plan = json.loads((place / HOME / "plan.json").read_text())
    assert plan["changes"] == [] and plan["digest"].startswith(told[0].split()[-1])


def test_the_killed_run_went_on_and_ended_with_its_budget(place: Path) -> None:
    runs = place / HOME / "runs"
    kinds = [event["kind"] for event in tiny_run.lines(runs / "often-seed_0/events.jsonl")]
    assert "resume" in kinds and kinds[-1] == "run_end"
    for name in ("never-seed_0", "often-seed_0", "never-seed_1", "often-seed_1"):
        rows = tiny_run.lines(runs / name / "metrics.jsonl")
        assert tokens_of(rows[:-1]) < tiny_ablation.BUDGET <= tokens_of(rows)


def test_arms_of_a_seed_share_their_start_and_seeds_do_not(place: Path) -> None:
    digests = {}
    for arm in ("never", "often"):
        for seed in (0, 1):
            first = next(e for e in tiny_run.lines(place / HOME / f"runs/{arm}-seed_{seed}/events.jsonl") if e["kind"] == "run_start")
            digests[arm, seed] = first["start_digest"]
    assert digests["never", 0] == digests["often", 0] != digests["never", 1] == digests["often", 1]


def test_results_are_paired_differences_and_failures_are_in_all_of_them(place: Path) -> None:
    home = place / HOME
    result = json.loads((home / "result.json").read_text())
    often = next(found for found in result["comparisons"] if found["arm"] == "often")
    scores = {path.name: json.loads((path / "summary.json").read_text())["after"]["mean_score"] for path in (home / "runs").glob("[no]*")}
    assert often["differences"] == [scores[f"often-seed_{seed}"] - scores[f"never-seed_{seed}"] for seed in (0, 1)]
    assert often["seeds"] == [0, 1] and often["verdict"] == "not distinguishable"
    broken = next(found for found in result["comparisons"] if found["arm"] == "broken")
    assert (broken["seeds"], broken["verdict"]) == ([], "no pairs")
    assert [failure["run"] for failure in result["failed"]] == ["broken-seed_0", "broken-seed_1"]

    with (home / "runs.csv").open() as file:
        table = {row["run"]: row for row in csv.DictReader(file)}
    assert len(table) == 6 and table["broken-seed_1"]["state"] == "failed" and "attention heads" in table["broken-seed_1"]["error"]
    row = table["often-seed_0"]
    assert int(row["spent"]) == int(row["completion_tokens"]) + int(row["validation_tokens"]) >= tiny_ablation.BUDGET
    assert int(row["resets"]) == int(row["steps"]) - 1 and int(table["never-seed_0"]["resets"]) == 0
    assert int(row["groups_kept"]) > 0 and int(row["updates"]) == 2 * int(row["steps"]) and float(row["time_rl_s"]) > 0

    report = (home / "report.html").read_text()
    assert "broken − never: without seeds 0, 1" in report and "2 runs have no result" in report
    assert "not distinguishable" in report and report.count("<svg") >= 4
    assert "http" not in report and "<script" not in report


def test_a_second_call_starts_nothing(place: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (place / HOME / "runs").rglob("metrics.jsonl")}
    stdout, _ = ablate(place, status=1)
    assert all(f"{run}: done" in stdout for run in ("never-seed_0", "often-seed_0", "never-seed_1", "often-seed_1"))
    assert {path: path.stat().st_mtime_ns for path in (place / HOME / "runs").rglob("metrics.jsonl")} == before


def test_another_plan_is_refused_for_these_runs_unless_a_reason_is_given(copy: Path) -> None:
    _, stderr = ablate(copy, "--report", "--config.metric=held_out.solve_rate", status=2)
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert "metric was 'held_out.mean_score', now 'held_out.solve_rate'" in stderr
    stdout, _ = ablate(copy, "--report", "--config.metric=held_out.solve_rate", "--changed=to see what happens", status=1)
    assert "held_out.solve_rate" in stdout
    assert "The plan was changed after runs had begun: “to see what happens”" in (copy / HOME / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config.metricc=x",), "configs/ablations/base.py"),
        (("--config.budget.kind=seconds",), "budget.kind = 'seconds'"),
        (("--config", str(tiny_ablation.EXPERIMENT)), "no ablation but an experiment"),
        (("surplus",), "unexpected argument 'surplus'"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    _, stderr = ablate(tmp_path, *arguments, status=2)
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and words in stderr
    assert not list(tmp_path.iterdir())


def edit_event(run: str, kind: str, change: Callable[[dict[str, Any]], Any]) -> None:
    path = HOME / "runs" / run / "events.jsonl"
    events = tiny_run.lines(path)
    for event in events:
        if event["kind"] == kind:
            change(event)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def edit_json(run: str, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    path = HOME / "runs" / run / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def other_prompt(run: str) -> None:
    path = HOME / "runs" / run / "samples/step_000001.parquet"
    table = pq.read_table(path)
    ids = table["prompt_id"].to_pylist()
    changed = [12345 if prompt == ids[0] else prompt for prompt in ids]
    pq.write_table(table.set_column(table.schema.get_field_index("prompt_id"), "prompt_id", [changed]), path)


def tokens_of(rows: list[dict[str, Any]]) -> int:
    return int(sum(row["tokens.completion"] + row.get("validation.completion_tokens", 0) for row in rows))


def rewrite_metrics(run: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Changes the metrics, and what the run's end tells of them accordingly."""
    path = HOME / "runs" / run / "metrics.jsonl"
    rows = change(tiny_run.lines(path))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    edit_event(run, "run_end", lambda event: event["spent"].update(completion_tokens=tokens_of(rows)))


def spend_too_much(run: str) -> None:
    rewrite_metrics(run, lambda rows: [{**rows[0], "tokens.completion": rows[0]["tokens.completion"] + tiny_ablation.BUDGET}, *rows[1:]])


def spend_too_little(run: str) -> None:
    rewrite_metrics(run, lambda rows: rows[:1])


MISMATCHES: dict[str, tuple[Callable[[str], None], str]] = {
    "stream": (other_prompt, r"never-seed_1 and often-seed_1: other prompt stream: prompt \d+ is \d+, 12345"),
    "start": (
        lambda run: edit_event(run, "run_start", lambda event: event.update(start_digest="0" * 64)),
        r"never-seed_1 and often-seed_1: other start weights \(digest\): \w{12}…, 000000000000…",
    ),
    **{
        kind: (
            lambda run, kind=kind: edit_event(run, "run_start", lambda event: event["identity"].update({kind: "1" * 64})),  # type: ignore[misc]
            rf"never-seed_1 and often-seed_1: other {kind} \(digest\): .*, 111111111111…",
        )
        for kind in ("data", "tokenizer", "reward")
    },
    "too much": (spend_too_much, r"often-seed_1 used \d+ completion_tokens, the budget of 6000 was used up more than one step earlier"),
    "too little": (spend_too_little, r"often-seed_1 used \d+ of the budget of 6000 completion_tokens and ended; raise steps"),
    "config": (
        lambda run: edit_json(run, "config.json", lambda config: config["optimizer"].update(learning_rate=0.5)),
        r"often-seed_1 is not a run of the plan: its optimizer.learning_rate is 0.5, planned is 0.001",
    ),
    "evaluation": (
        lambda run: edit_json(run, "config.json", lambda config: config["evaluation"].update(seed=7)),
        r"never-seed_1 and often-seed_1: other evaluation \(evaluation.seed\): 20, 7",
    ),
    "items": (
        lambda run: edit_json(run, "summary.json", lambda summary: summary["after"]["per_task"]["chain_sum"].update(n=15)),
        r"other evaluation \(items\): .*16.*15",
    ),
    "stranger": (
        lambda run: shutil.copytree(HOME / "runs" / run, HOME / "runs/better-seed_1") and None,
        r"ablations/resets/runs/better-seed_1 is not a run of the plan",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_an_unmatched_arm_is_caught(copy: Path, kind: str) -> None:
    assert concluded().records, "before it is tampered with, all is well"
    tamper, words = MISMATCHES[kind]
    tamper("often-seed_1")
    with pytest.raises(ConfigError, match=words) as caught:
        concluded()
    assert str(caught.value).startswith("ablations/resets: the arms are not matched: ") and "\n" not in str(caught.value)


def test_results_of_unmatched_runs_are_not_left_standing(copy: Path) -> None:
    other_prompt("often-seed_1")
    _, stderr = ablate(copy, "--report", status=2)
    assert "other prompt stream" in stderr and stderr.count("\n") == 1
    assert not {"report.html", "result.json", "runs.csv"} & set(os.listdir(HOME))


@pytest.mark.parametrize("name", ["samples/step_000000.parquet", "summary.json", "metrics.jsonl"])
def test_a_run_with_a_file_missing_is_refused(copy: Path, name: str) -> None:
    (HOME / "runs/often-seed_1" / name).unlink()
    with pytest.raises(DataError, match=name):
        concluded()


def test_sigterm_saves_the_run_under_way_and_the_same_command_goes_on_to_the_report(place: Path, tmp_path: Path) -> None:
    (tmp_path / ".cache").symlink_to((place / ".cache").resolve())
    harness = start(tmp_path, kind="strategies")
    run = tmp_path / "ablations/strategies/runs/never-seed_0"
    end_s = time.monotonic() + 240
    while not tiny_run.lines(run / "metrics.jsonl"):
        assert harness.poll() is None and time.monotonic() < end_s, harness.communicate()
        time.sleep(0.005)
    harness.send_signal(signal.SIGTERM)
    _, stderr = harness.communicate(timeout=120)
    assert harness.returncode == 75 and "the same command goes on" in stderr
    assert not (run / "summary.json").exists()

    stdout, _ = ablate(tmp_path, kind="strategies")
    result = json.loads((tmp_path / "ablations/strategies/result.json").read_text())
    costs = {cost["arm"]: cost for cost in result["costs"]}
    assert set(costs) == {"never", "fsdp"} and all(cost["devices"] == 2 and cost["step_s"][1] > 0 for cost in costs.values())
    # Parameters, reference and two moments are float32: split over two devices, a quarter of them and more leaves each.
    assert 0 < costs["fsdp"]["estimated_bytes"] < costs["never"]["estimated_bytes"]
    (agreement,) = result["agreements"]
    assert (agreement["arm"], agreement["control"]) == ("never", "fsdp") and agreement["steps"] >= 1
    assert agreement["largest"] < 1e-5, "the loss is of order 1, computed in float32"
    assert "same samples" in stdout and "Cost of a step" in (tmp_path / "ablations/strategies/report.html").read_text()
