"""Resets that a trigger, a person or an alarm causes, in real runs: told in full, repeated after a kill, replayed from the logs."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

from jaxprorl import commit
from jaxprorl.checkpoint import read_host
from jaxprorl.checkpoint_diff import compare
from jaxprorl.resets.commands import TAKEN, WAITING
from jaxprorl.resets.replay import replay
from jaxprorl.watch import from_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KL = "kl.k3_median"
# The first step's updates already move the policy: half of the KL that a run without resets reaches is passed after some steps.
NO_RESETS = ("resets.every_steps=0", "checkpoint.every_steps=100")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.new_home(tmp_path_factory)


@pytest.fixture(scope="module")
def untouched(home: Path) -> Path:
    """The tiny run without any reset."""
    tiny_run.train(home, *NO_RESETS, "run_name=untouched")
    return home / "runs/untouched"


@pytest.fixture(scope="module")
def bound(untouched: Path) -> float:
    """A bound that KL passes between the first and the last step."""
    series = [row[KL] for row in tiny_run.lines(untouched / "metrics.jsonl")]
    return (max(series[:3]) + max(series)) / 2


@pytest.fixture(scope="module")
def options(bound: float) -> tuple[str, ...]:
    return (*NO_RESETS, "resets.kl_spike.on=True", "resets.kl_spike.z=0.0", f"resets.kl_spike.above={bound!r}", "steps=8")


@pytest.fixture(scope="module")
def triggered(home: Path, options: tuple[str, ...]) -> Path:
    """A run whose only resets are those of a KL bound."""
    tiny_run.train(home, *options, "run_name=triggered")
    return home / "runs/triggered"


def place_in(tmp_path: Path, home: Path) -> Path:
    (tmp_path / ".cache").symlink_to(home / ".cache")
    return tmp_path


def kill(place: Path, point: str, *options: str) -> None:
    program = [str(tiny_run.ROOT / "tests/kill_at.py"), point, "--"]
    ended = tiny_run.Command(place, *options, program=program).wait()
    assert ended.status == -signal.SIGKILL, f"{point} was not reached: {ended.status}\n{ended.stdout}\n{ended.stderr}"


def resets_of(run: Path) -> list[dict]:
    return [event for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == "reset"]


def assert_same_run(run: Path, reference: Path) -> None:
    assert tiny_run.timeless_metrics(run) == tiny_run.timeless_metrics(reference)
    assert tiny_run.timeless_events(run, "resume", "compile") == tiny_run.timeless_events(reference, "resume", "compile")
    assert tiny_run.files(run / "samples") == tiny_run.files(reference / "samples")
    assert tiny_run.files(run / "model") == tiny_run.files(reference / "model")
    assert commit.committed_steps(run / "checkpoints") == commit.committed_steps(reference / "checkpoints")
    last = commit.committed_steps(run / "checkpoints")[-1]
    assert compare(run / "checkpoints", last, reference / "checkpoints", last) == []


def test_a_trigger_resets_after_the_first_step_that_it_dislikes(triggered: Path, bound: float) -> None:
    rows = tiny_run.lines(triggered / "metrics.jsonl")
    expected = [row["step"] + 1 for row in rows if row[KL] > bound and row["step"] + 1 < len(rows)]
    resets = resets_of(triggered)
    assert expected and [event["step"] for event in resets] == expected
    assert all(rows[step]["reference.age_steps"] == 0 for step in expected)


def test_the_events_tell_why_what_was_seen_and_what_came_of_it(triggered: Path, bound: float) -> None:
    rows = tiny_run.lines(triggered / "metrics.jsonl")
    events = tiny_run.lines(triggered / "events.jsonl")
    names = (KL, "kl.k1", "entropy", "grad_norm")
    first = resets_of(triggered)[0]
    step = first["step"]
    before = {name: rows[step - 1][name] for name in names}
    assert first["before"] == before
    assert (first["trigger"], first["signals"], first["blind"], first["also"]) == ("kl_spike", "training", True, [])
    assert first["statistics"] == {
        "metric": KL, "value": before[KL], "median": None, "z": None, "observations": first["statistics"]["observations"], "above": bound,
    }  # fmt: skip
    effect = next(event for event in events if event["kind"] == "reset_effect")
    after = {name: rows[step][name] for name in names}
    assert effect == {"step": step, "kind": "reset_effect", "trigger": "kl_spike", "before": before, "after": after}
    assert after[KL] < before[KL]


def test_the_checkpoint_before_a_reset_holds_its_decision(triggered: Path) -> None:
    resets = resets_of(triggered)
    folder = triggered / "checkpoints"
    boundaries = [step for step in commit.committed_steps(folder) if commit.read_record(folder, step).reset_boundary]
    assert [event["step"] for event in resets] == [step for step in boundaries if step < 8]
    host = read_host(folder, resets[0]["step"])
    decision = from_json(host.watch).control.due(host.run.step)
    assert decision and decision.firing.trigger == "kl_spike"
    assert host.run.resets == 0, "the state is that before the reset"


@pytest.mark.long
def test_killed_around_a_triggered_reset_a_run_equals_the_uninterrupted_one(
    triggered: Path, options: tuple[str, ...], home: Path, tmp_path: Path
) -> None:
    """Its checkpoint on the disk; then with the reset dispatched, before its event; then in the step after it, before `reset_effect`."""
    place = place_in(tmp_path, home)
    for point in ("just_after_saving", "reset", "update:1"):
        kill(place, point, *options, "run_name=triggered")
        assert commit.committed_steps(place / "runs/triggered/checkpoints") == [resets_of(triggered)[0]["step"]]
    tiny_run.train(place, *options, "run_name=triggered")
    assert_same_run(place / "runs/triggered", triggered)


def test_a_replay_of_the_run_finds_its_own_resets(triggered: Path) -> None:
    result = replay(triggered)
    assert result.differs_at is None and result.last == 8
    recorded = [(event["step"], "kl_spike", event["reason"]) for event in resets_of(triggered)]
    done = [(f.firing.step, f.firing.trigger, f.firing.reason) for f in result.fired if f.outcome == "reset"]
    assert [row for row in done if row[0] < 8] == recorded


def test_a_replay_holds_up_to_the_first_reset_that_differs(triggered: Path, untouched: Path) -> None:
    first = resets_of(triggered)[0]["step"]
    without = replay(triggered, {"kl_spike": {"on": False}})
    assert (without.fired, without.differs_at) == ([], first)
    assert "the run has a reset by kl_spike (reference True, optimizer 'all'), with these triggers there is no reset" in without.difference
    earlier = replay(triggered, {"at_steps": [1, first]})
    assert earlier.differs_at == 1 and [f.firing.trigger for f in earlier.fired] == ["at_steps"]
    same = replay(triggered, {"at_steps": [first]})
    assert [(f.firing.trigger, f.outcome) for f in same.fired[:2]] == [("at_steps", "reset"), ("kl_spike", "with at_steps")]
    other = replay(untouched, {"kl_spike": {"on": True, "z": 0.0, "above": 1e-9}, "max_resets": 1})
    assert other.differs_at == 1 and "the run has no reset, with these triggers there is a reset by kl_spike" in other.difference


@pytest.mark.long
def test_a_command_is_repeated_at_its_step_by_a_run_that_was_killed_while_taking_it(home: Path, tmp_path: Path) -> None:
    """The reference is a run that finds the command in its list from the start."""
    run = home / "runs/commanded"
    run.mkdir(parents=True)
    (run / TAKEN).write_text('{"step": 1, "id": "a", "kind": "reset", "reason": "to see"}\n')
    options = (*NO_RESETS, "run_name=commanded", "steps=3")
    tiny_run.train(home, *options)
    (event,) = resets_of(run)
    assert (event["step"], event["trigger"], event["signals"], event["reason"]) == (1, "manual", "person", "command: to see")
    assert tiny_run.lines(run / "metrics.jsonl")[1]["reference.age_steps"] == 0

    place = place_in(tmp_path, home)
    victim = place / "runs/commanded"
    kill(place, "update:1", *options)  # no checkpoint yet
    command = [sys.executable, str(tiny_run.ROOT / "launch/reset.py"), "--run", str(victim), "--reason", "to see"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith(str(victim / WAITING))
    kill(place, "command_taken", *options)
    assert (victim / WAITING).exists() and [row["step"] for row in tiny_run.lines(victim / TAKEN)] == [1]
    kill(place, "command_removed", *options)
    assert not (victim / WAITING).exists()
    shutil.rmtree(victim / "checkpoints")  # as if none of them had been committed
    (victim / "events.jsonl").unlink()  # which tells of them
    tiny_run.train(place, *options)
    assert [row["step"] for row in tiny_run.lines(victim / TAKEN)] == [1]
    assert_same_run(victim, run)
    assert replay(victim).differs_at is None


def test_pause_saves_and_leaves_and_the_same_command_goes_on(untouched: Path, home: Path, tmp_path: Path) -> None:
    place = place_in(tmp_path, home)
    options = (*NO_RESETS, "run_name=paused", "alarms.entropy_collapse.action=pause", "alarms.entropy_collapse.floor=100.0")
    ended = tiny_run.Command(place, *options).wait()
    assert ended.status == 75, ended.stderr
    run = place / "runs/paused"
    (alarm,) = [event for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == "alarm"]
    assert (alarm["step"], alarm["alarm"], alarm["action"]) == (0, "entropy_collapse", "pause")
    assert commit.committed_steps(run / "checkpoints") == [1]
    tiny_run.train(place, *options)
    assert tiny_run.timeless_metrics(run) == tiny_run.timeless_metrics(untouched), "it rings on, and pauses no more"


@pytest.mark.long
def test_stop_saves_and_ends_with_an_error(home: Path, tmp_path: Path) -> None:
    place = place_in(tmp_path, home)
    options = (*NO_RESETS, "run_name=stopped", "alarms.entropy_collapse.action=stop", "alarms.entropy_collapse.floor=100.0")
    for steps_done in (1, 2):  # it stops again as long as it rings
        ended = tiny_run.Command(place, *options).wait()
        assert ended.status == 2 and "error: step" in ended.stderr and "alarms.entropy_collapse" in ended.stderr
        assert commit.committed_steps(place / "runs/stopped/checkpoints")[-1] == steps_done
    assert json.loads((place / "runs/stopped/config.json").read_text())["alarms"]["entropy_collapse"]["action"] == "stop"
