"""Processes that share a cache_dir or a runs_dir, started at the same time, with any of them killed."""

import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny_run

KILLED = -9
WARM_START = (str(tiny_run.ROOT / "launch/warmstart.py"),)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cached base model of a process that nobody disturbs, in a cache with its executables."""
    home = tiny_run.new_home(tmp_path_factory)
    ended = tiny_run.Command(home, program=WARM_START).wait(600)
    assert ended.status == 0, ended.stderr
    return home / ended.stdout.splitlines()[-1].removesuffix(" (from the cache)")


@pytest.fixture
def home(alone: Path, tmp_path: Path) -> Path:
    """A user's folder with the executables in its cache, and no base model."""
    (tmp_path / ".cache").mkdir()
    shutil.copytree(alone.parents[1] / "xla", tmp_path / ".cache/xla")
    return tmp_path


def holder(home: Path) -> int | None:
    """The process that makes the base model now."""
    for lock in (home / ".cache/warmstart").glob("*.lock"):
        text = lock.read_text()
        return int(json.loads(text)["pid"]) if text else None
    return None


def wait_until(true: Callable[[], bool], commands: Sequence[tiny_run.Command], timeout_s: float = 240) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end_s or all(command.process.poll() is not None for command in commands):
            said = [command.wait(1) for command in commands if command.process.poll() is not None]
            for command in commands:
                command.kill_group()
            raise AssertionError(f"the moment did not come: {said}")
        time.sleep(0.01)


def assert_one_whole_model(home: Path, alone: Path) -> None:
    assert sorted(path.name for path in (home / ".cache/warmstart").iterdir()) == [alone.name, f"{alone.name}.lock"], "no debris"
    assert tiny_run.files(home / ".cache/warmstart" / alone.name) == tiny_run.files(alone)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.long)])
def test_runs_started_together_with_one_empty_cache_and_one_runs_dir_all_end_well(number: int, tmp_path: Path, alone: Path) -> None:
    """One makes the base model, the others wait and say for whom; the runs are equal."""
    options = ("steps=1", "checkpoint.every_steps=1", "resets.every_steps=0")
    commands = [tiny_run.Command(tmp_path, *options, f"run_name=run_{i}") for i in range(number)]
    ended = [command.wait(900) for command in commands]
    assert [each.status for each in ended] == [0] * number, [each.stderr for each in ended]
    assert sum("making the base model, once" in each.stdout for each in ended) == 1
    pids = [command.process.pid for command, each in zip(commands, ended, strict=True) if "making the base model, once" in each.stdout]
    assert any(f"warm start: process {pids[0]} on " in each.stdout for each in ended)
    assert not any("removed the torn cache entry" in each.stdout for each in ended)
    assert_one_whole_model(tmp_path, alone)
    runs = [tmp_path / f"runs/run_{i}" for i in range(number)]
    cached = [event["cached"] for run in runs for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == "warm_start"]
    assert sorted(cached) == [False] + [True] * (number - 1)
    for run in runs[1:]:
        assert tiny_run.timeless_metrics(run) == tiny_run.timeless_metrics(runs[0])
        assert tiny_run.files(run / "model").keys() == tiny_run.files(runs[0] / "model").keys()
        assert (run / "model/model.safetensors").read_bytes() == (runs[0] / "model/model.safetensors").read_bytes()
        assert not list(run.rglob("*.writing"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_who_waits_for_a_killed_process_makes_the_base_model(home: Path, alone: Path) -> None:
    """Of four the one that makes it is killed, and the one that takes over too; the last two end with the right bytes."""
    commands, said = [], {}
    for i in range(4):
        with (home / f"output_{i}").open("w") as output:  # a file, to be read while the process runs
            commands.append(tiny_run.Command(home, program=WARM_START, terminal=output.fileno()))
        said[commands[-1].process.pid] = home / f"output_{i}"
    living = {command.process.pid: command for command in commands}

    def all_wait_for(pid: int | None) -> bool:
        return all(f"process {pid} on " in said[each].read_text() for each in living if each != pid)

    for moment in ("*.writing/tokenizer.json", "*.writing/chat_template.jinja"):
        wait_until(lambda: holder(home) in living and all_wait_for(holder(home)), commands)
        wait_until(lambda moment=moment: any((home / ".cache/warmstart").glob(moment)), commands)
        pid = holder(home)
        assert pid
        killed = living.pop(pid)
        killed.process.kill()
        assert killed.wait().status == KILLED
        assert not killed.left_behind()
        wait_until(lambda pid=pid: holder(home) not in (None, pid), commands)
    assert [command.wait(600).status for command in living.values()] == [0, 0], [said[each].read_text() for each in living]
    last_lines = [said[each].read_text().splitlines()[-1] for each in living]
    assert sorted(line.endswith(" (from the cache)") for line in last_lines) == [False, True]
    assert_one_whole_model(home, alone)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_processes_killed_at_random_moments_spoil_nothing(home: Path, alone: Path) -> None:
    draw = random.Random(0)
    for _ in range(10):
        shutil.rmtree(home / ".cache/warmstart", ignore_errors=True)
        commands = [tiny_run.Command(home, program=WARM_START) for _ in range(4)]
        for command in draw.sample(commands, 3):
            time.sleep(draw.uniform(0.0, 8.0))
            command.process.kill()
        ended = [command.wait(600) for command in commands]
        assert all(each.status in (0, KILLED) for each in ended), [each.stderr for each in ended]
        assert 0 in [each.status for each in ended]
        assert_one_whole_model(home, alone)
