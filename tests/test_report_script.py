"""launch/report.py beside a run under way and after one; what the report itself holds is tested in evaluation/test_report.py."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxprorl.run_lock import LOCK_NAME, RunLock

ROOT = Path(__file__).resolve().parent.parent

# A trainer as far as its folder goes: it holds the lock, mirrors a step, and another one each time it is told to.
TRAINER = """
import sys
from pathlib import Path
from jaxprorl.monitoring.metrics import MetricsLog
from jaxprorl.monitoring.tensorboard import TensorBoardMirror
from jaxprorl.run_lock import RunLock
run = Path(sys.argv[1])
with RunLock(run), MetricsLog(run / "metrics.jsonl") as log, TensorBoardMirror(run / "tensorboard") as mirror:
    for step in range(2):
        log.append(step, {"reward.mean": 0.25})
        mirror.add_metrics({"step": step, "reward.mean": 0.25})
        print(step, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def trainer(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that works in the run's folder."""
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "0\n"
        yield process
        process.kill()


def report(run: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/report.py"), "--run", str(run)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def event_files(run: Path) -> list[Path]:
    return sorted((run / "tensorboard").glob("events.out.tfevents.*"))


def test_beside_a_run_under_way_tensorboard_stays_the_trainers(run: Path, trainer: subprocess.Popen[str]) -> None:
    (file,) = event_files(run)
    before = file.stat()
    said = report(run)
    assert f"left as it is: {run} is in use by process {trainer.pid} on " in said
    assert (run / "report.html").is_file(), "the report is written all the same"
    assert str(trainer.pid) in (run / LOCK_NAME).read_text(), "the lock is still the trainer's"
    trainer.communicate("\n\n")
    assert event_files(run) == [file]
    after = file.stat()
    assert (after.st_ino, after.st_size > before.st_size) == (before.st_ino, True), "what the trainer writes later is there"


def test_after_the_run_tensorboard_is_rebuilt_and_nobody_holds_the_folder(run: Path, trainer: subprocess.Popen[str]) -> None:
    trainer.communicate("\n\n")
    assert f"{run / 'tensorboard'} (2 steps)" in report(run)
    assert len(event_files(run)) == 1
    with RunLock(run) as lock:
        assert lock.stale_owner is None


def test_after_a_kill_tensorboard_is_rebuilt_and_the_owner_who_died_is_named(run: Path, trainer: subprocess.Popen[str]) -> None:
    trainer.kill()
    trainer.wait()
    said = report(run)
    assert f"{run}: process {trainer.pid} on " in said and "its lock is taken over" in said
    assert f"{run / 'tensorboard'} (1 steps)" in said
