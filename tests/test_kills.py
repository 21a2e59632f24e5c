"""Kill it anywhere: a run that is killed -9 and interrupted again and again equals the uninterrupted one, file by file and bit by bit."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_run

from jaxprorl import commit
from jaxprorl.checkpoint import read_host
from jaxprorl.checkpoint_diff import compare
from jaxprorl.preemption import INTERRUPTED

pytestmark = pytest.mark.slow

KILLED = -signal.SIGKILL
RANDOM = "random"  # SIGKILL from outside at a random time
CTRL_C = "ctrl_c"  # at a random time as well; any other name is a point of kill_at.py, for SIGKILL
CTRL_C_WITHIN_S = 5.0
PYTHON_STARTS_S = 0.3  # an earlier Ctrl-C meets the interpreter's own handler
# As few checkpoints as possible are kept, so that retention has something to remove.
OPTIONS = ("checkpoint.keep=1", "checkpoint.keep_resets=False", "checkpoint.keep_best=0")
CLOCKED = ("seconds", "completion_tokens_per_s", "peak_memory_bytes")  # of summary.json

SHORT = ("generation:5", "just_after_saving", "update:2", RANDOM, CTRL_C)

# One run each, of so many steps that a third of the time goes into the loop (and that the data's second epoch begins).
# A named point must be reached from every state that the kills before it may leave: those of the loop come first.
LONG_STEPS = 24
RUNS = {
    "without_executables": ("torn_entry:3", "compilation", "warm_start:2", "compilation:2", *[RANDOM] * 4, *[CTRL_C] * 3),
    "without_model": ("warm_start_model", "evaluation_before:2", "generation:3", "grading:4", *[RANDOM] * 4, *[CTRL_C] * 3),
    "first_steps": ("evaluation_before_file", "samples:2", "swap:2", "record", *[RANDOM] * 5, *[CTRL_C] * 3),
    "later_steps": ("just_after_saving", "reset", "update:2", "validation", "retention", *[RANDOM] * 4, *[CTRL_C] * 3),
    "end": ("saving:3", RANDOM, RANDOM, CTRL_C, "evaluation_after:2", RANDOM, "model", RANDOM, "summary", "report"),
}
TOTAL: list[str] = []  # of all these runs


@dataclass(frozen=True)
class Uninterrupted:
    """What the others are compared with.

    Attributes:
        run: its folder.
        options: of its command.
        seconds: what it took, without what restarts find in the cache: executables and warm-start model.
    """

    run: Path
    options: tuple[str, ...]
    seconds: float


def uninterrupted(folder: Path, *options: str) -> Uninterrupted:
    """Trains in `folder`."""
    options = (*OPTIONS, *options)
    names = [option.removeprefix("run_name=") for option in options if option.startswith("run_name=")]
    ended, run = tiny_run.train(folder, *options), folder / "runs" / (names[-1] if names else "tiny")
    compile_s = sum(event["time_s"] for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == "compile")
    warm_start_s = json.loads((run / "summary.json").read_text())["seconds"]["warm_start"]
    return Uninterrupted(run, options, ended.seconds - compile_s - warm_start_s)


class Victim:
    """A run that is killed and started again with the same command, in `place`.

    Args:
        place: the user's folder.
        uninterrupted: the run without kills; the times of random kills are uniform over its duration.
        seed: of these times.
    """

    def __init__(self, place: Path, uninterrupted: "Uninterrupted", seed: int):
        self.run = place / "runs/tiny"
        self.landed: list[str] = []  # where, how many seconds after the start, and the last event if the log was open again
        self._place, self._uninterrupted, self._random = place, uninterrupted, random.Random(seed)
        self._said = ""

    def kill(self, where: str) -> None:
        """One start and its kill, which has landed when this returns."""
        opened_ns = self._log_changed_ns()
        ended = self._at_a_random_time(where) if where in (RANDOM, CTRL_C) else self._at_a_point(where)
        self._said += ended.stdout
        last = tiny_run.lines(self.run / "events.jsonl")[-1:] if self._log_changed_ns() > opened_ns else []
        after = "".join(f", step {event['step']} {event['kind']}" for event in last)
        self.landed.append(f"{where} ({ended.seconds:.1f} s{after})")

    def finish(self) -> str:
        """The last start, which nobody disturbs; returns what all processes of this run printed."""
        return self._said + tiny_run.train(self._place, *self._uninterrupted.options).stdout

    def _log_changed_ns(self) -> int:
        log = self.run / "events.jsonl"
        return log.stat().st_mtime_ns if log.exists() else 0

    def _at_a_point(self, point: str) -> tiny_run.Ended:
        program = [str(tiny_run.ROOT / "tests/kill_at.py"), point, "--"]
        command = tiny_run.Command(self._place, *self._uninterrupted.options, program=program)
        ended = command.wait()
        assert ended.status == KILLED, f"{point} was not reached: exit status {ended.status}\n{ended.stdout}\n{ended.stderr}"
        assert not command.left_behind()
        return ended

    def _at_a_random_time(self, where: str) -> tiny_run.Ended:
        """If the run ended first, it is put back to where it was, and an earlier time is drawn."""
        before = self._place / "before"
        if self.run.exists():
            shutil.copytree(self.run, before)
        latest_s = self._uninterrupted.seconds
        while True:
            at_s = self._random.uniform(PYTHON_STARTS_S if where == CTRL_C else 0.0, latest_s)
            command = tiny_run.Command(self._place, *self._uninterrupted.options)
            try:
                command.process.wait(at_s)
            except subprocess.TimeoutExpired:
                if where == CTRL_C:
                    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does: to all of them
                else:
                    command.process.kill()
            ended = command.wait(CTRL_C_WITHIN_S if where == CTRL_C else 240)
            assert not command.left_behind()
            if ended.status == (INTERRUPTED if where == CTRL_C else KILLED):
                # A grader that was being born finds nobody at the other end of its pipe, and says so.
                assert where != CTRL_C or ended.stderr.count("Traceback") == ended.stderr.count("EOFError")
                shutil.rmtree(before, ignore_errors=True)
                return ended
            assert ended.status == 0, f"exit status {ended.status}\n{ended.stdout}\n{ended.stderr}"
            latest_s = min(at_s, ended.seconds)
            shutil.rmtree(self.run)
            if before.exists():
                shutil.copytree(before, self.run)


def assert_equal(run: Path, reference: Path) -> None:
    """Everything but the clock; `cached` of the event `warm_start` tells only whether a kill came after the warm start."""
    assert tiny_run.timeless_metrics(run) == tiny_run.timeless_metrics(reference)
    assert tiny_run.timeless_events(run, "resume") == tiny_run.timeless_events(reference, "resume")
    for folder in ("samples", "model", "base_model"):
        assert tiny_run.files(run / folder) == tiny_run.files(reference / folder), folder
    for name in ("config.json", "warm_start.json"):
        assert (run / name).read_bytes() == (reference / name).read_bytes(), name
    before, after = (json.loads((folder / "summary.json").read_text()) for folder in (run, reference))
    assert {**before, **dict.fromkeys(CLOCKED)} == {**after, **dict.fromkeys(CLOCKED)}

    ours, theirs = run / "checkpoints", reference / "checkpoints"
    assert commit.committed_steps(ours) == commit.committed_steps(theirs)
    (step,) = commit.committed_steps(ours)
    assert step == after["steps"]
    assert commit.damage(ours, step) is None
    assert compare(ours, step, theirs, step) == []
    # Nothing half-written lies about.
    assert names(run) == names(reference)
    assert names(ours) == names(theirs)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tear_entries(cache: Path) -> list[Path]:
    """Cuts every executable of the update in the compilation cache in half, as a kill does that comes while it is written."""
    torn = sorted(cache.glob("jit_train_step-*-cache"))
    for entry in torn:
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    return torn


def points() -> list[str]:
    """The names of kill_at.py's points."""
    text = (tiny_run.ROOT / "tests/kill_at.py").read_text()
    return re.findall(r'^    "(\w+)": ', text, re.MULTILINE)


def show(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}", end="")
        sys.stdout.flush()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with the cache that this session shares."""
    return tiny_run.new_home(tmp_path_factory)


@pytest.fixture(scope="module")
def reference(home: Path) -> Uninterrupted:
    """The tiny run."""
    return uninterrupted(home)


@pytest.fixture(scope="module")
def long_reference(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """The same with more steps, its executables and model in the cache of `home`."""
    return uninterrupted(tiny_run.new_home(tmp_path_factory), f"steps={LONG_STEPS}")


@pytest.mark.timeout(600)
def test_a_run_killed_five_times_equals_the_uninterrupted_one(
    home: Path, reference: Uninterrupted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: a torn entry of the compilation cache, found at a restart, is removed, said and made again."""
    shutil.copytree(home / ".cache", tmp_path / ".cache")
    victim = Victim(tmp_path, reference, seed=0)
    victim.kill(SHORT[0])
    torn = tear_entries(tmp_path / ".cache/xla")
    for where in SHORT[1:]:
        victim.kill(where)
    said = victim.finish()
    show(capsys, f"{len(victim.landed)} kills landed: {'; '.join(victim.landed)}")
    assert len(victim.landed) == 5
    assert torn
    assert all(said.count(f"removed the torn cache entry {entry.name}") == 1 for entry in torn)
    assert any(entry.exists() for entry in torn), "made again"
    assert_equal(victim.run, reference.run)


@pytest.mark.timeout(600)
def test_groups_without_room_are_in_the_checkpoint_and_trained_on_after_a_kill(home: Path, tmp_path: Path) -> None:
    options = ("rollout.max_staleness=1", "checkpoint.every_steps=1", "steps=3")
    reference = uninterrupted(home, *options, "run_name=stale")
    (tmp_path / ".cache").symlink_to(home / ".cache")
    victim = Victim(tmp_path, reference, seed=0)
    victim.run = tmp_path / "runs/stale"
    victim.kill("just_after_saving")
    assert commit.committed_steps(victim.run / "checkpoints") == [1]
    waiting = read_host(victim.run / "checkpoints", 1).surplus
    assert waiting and all(len(group["completions"]) == 4 for group in waiting)
    victim.finish()
    assert tiny_run.timeless_metrics(victim.run)[1]["groups.carried"] == len(waiting)
    assert_equal(victim.run, reference.run)


@pytest.mark.timeout(300)
def test_a_run_killed_between_summary_and_report_gets_its_report_at_the_next_start(
    home: Path, reference: Uninterrupted, tmp_path: Path
) -> None:
    (tmp_path / ".cache").symlink_to(home / ".cache")
    shutil.copytree(reference.run, tmp_path / "runs/tiny")
    (tmp_path / "runs/tiny/summary.json").unlink()
    (tmp_path / "runs/tiny/report.html").write_text("of fewer steps")
    victim = Victim(tmp_path, reference, seed=0)
    victim.kill("report")
    victim.finish()
    assert "of fewer steps" not in (victim.run / "report.html").read_text()
    assert_equal(victim.run, reference.run)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_named_points_and_at_random_times_equals_the_uninterrupted_one(
    name: str, home: Path, long_reference: Uninterrupted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "without_model":
        shutil.copytree(home / ".cache/xla", tmp_path / ".cache/xla")
    elif name != "without_executables":
        (tmp_path / ".cache").symlink_to(home / ".cache")
    victim = Victim(tmp_path, long_reference, seed=list(RUNS).index(name))
    for where in RUNS[name]:
        victim.kill(where)
    said = victim.finish()
    TOTAL.extend(victim.landed)
    by_chance = sum(where.startswith((RANDOM, CTRL_C)) for where in TOTAL)
    show(capsys, f"{len(TOTAL)} kills landed so far, {by_chance} of them at random times; in this run: {'; '.join(victim.landed)}")
    assert ("removed the torn cache entry" in said) == (name == "without_executables")
    assert_equal(victim.run, long_reference.run)


def test_the_long_form_kills_often_enough_and_at_every_point() -> None:
    kills = [kill.partition(":")[0] for kills in RUNS.values() for kill in kills]
    assert len(kills) >= 30
    assert kills.count(RANDOM) >= 15
    assert kills.count(CTRL_C) >= 10
    assert set(kills) - {RANDOM, CTRL_C} == set(points())
