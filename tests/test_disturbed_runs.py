"""Whole runs whose views fail, whose streams go away, or whose disk is full: real processes, compared with an undisturbed run."""

import os
import pty
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_run
from places import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = [sys.executable, str(tiny_run.ROOT / "launch/train.py"), f"--config={tiny_run.ROOT}/tests/tiny_run.py:"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with one finished, undisturbed run in it; its cache serves the others."""
    folder = tiny_run.new_home(tmp_path_factory)
    tiny_run.train(folder)
    return folder


@pytest.fixture
def place(home: Path, tmp_path: Path) -> Path:
    """A fresh folder that shares `home`'s cache."""
    (tmp_path / ".cache").symlink_to(home / ".cache")
    return tmp_path


def start(place: Path, shell: str, **variables: str) -> subprocess.Popen[str]:
    """The command as a shell starts it: `shell` holds "$@", and its status is that of the command."""
    return subprocess.Popen(
        ["bash", "-c", f"{shell}; exit ${{PIPESTATUS[0]}}", "bash", *TRAIN], cwd=place, env=tiny_run.user_environment() | variables,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def assert_undisturbed(run: Path, home: Path, *views: str) -> None:
    """Every log equals that of the undisturbed run, but for an event for each of `views`, in this order."""
    reference = home / "runs/tiny"
    ignored = ("resume", "compile", "view_failed")
    assert tiny_run.timeless_metrics(run) == tiny_run.timeless_metrics(reference)
    assert tiny_run.timeless_events(run, *ignored) == tiny_run.timeless_events(reference, *ignored)
    assert tiny_run.files(run / "samples") == tiny_run.files(reference / "samples")
    assert tiny_run.files(run / "model") == tiny_run.files(reference / "model")
    failed = [event for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == "view_failed"]
    assert [event["view"] for event in failed] == list(views)
    assert all(event["error"] for event in failed)
    assert (run / ".lock").read_text() == "", "nobody holds it, and no message was written into it"


def test_the_reference_has_no_failed_view(home: Path) -> None:
    assert_undisturbed(home / "runs/tiny", home)


def test_a_reader_that_leaves_ends_no_run_and_neither_do_tensorboard_and_report(place: Path, home: Path) -> None:
    run = place / "runs/tiny"
    (run / "report.html").mkdir(parents=True)
    (run / "tensorboard").write_text("a file in the folder's place")
    process = start(place, '"$@" | head -1')
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert stdout.count("\n") == 1
    assert stderr == "WARNING: standard output failed and is left out from here on: Broken pipe\n"
    assert_undisturbed(run, home, "TensorBoard", "standard output", "report")
    assert (run / "tensorboard").read_text() == "a file in the folder's place"


@pytest.mark.parametrize(
    "command",
    [
        "checkpoints.py list runs/tiny",
        "replay.py --run runs/tiny",
        "report.py --run runs/tiny --output OUT",
        "export_hf.py --run runs/tiny --output OUT/model",
        "sample.py --run runs/tiny --prompts 1",
        f"train.py --config={tiny_run.ROOT}/tests/tiny_run.py:",
    ],
)
def test_a_script_whose_output_nobody_reads_ends_well(home: Path, tmp_path: Path, command: str) -> None:
    script, *arguments = command.replace("OUT", str(tmp_path)).split()
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, str(tiny_run.ROOT / "launch" / script), *arguments], cwd=home, env=tiny_run.user_environment(), stdout=theirs,
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_goes_away_ends_no_run(place: Path, home: Path) -> None:
    ours, theirs = pty.openpty()
    command = tiny_run.Command(place, terminal=theirs)
    os.close(theirs)
    shown = b""
    while b"compiling" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)
    assert command.wait(300).status == 0
    assert_undisturbed(place / "runs/tiny", home, "standard output")


def test_closed_descriptors_end_no_run_and_no_file_takes_their_place(place: Path, home: Path) -> None:
    process = start(place, '"$@" <&- >&- 2>&-')
    lock, owners = place / "runs/tiny/.lock", set()
    while process.poll() is None:
        if lock.is_file():
            owners.add(lock.read_text()[:8])
        time.sleep(0.02)
    assert process.returncode == 0
    assert owners <= {'{"pid": ', ""} and '{"pid": ' in owners
    assert_undisturbed(place / "runs/tiny", home)


def one_line(stderr: str) -> str:
    """The only line, an error; no library adds its own."""
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    return stderr


def until(process: subprocess.Popen[str], true: Callable[[], bool]) -> None:
    while not true():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def test_a_disk_that_fills_up_is_one_line_and_the_run_resumes_exactly(place: Path, home: Path) -> None:
    """Then on a standard output that cannot show what the table is drawn with."""
    with small_disk(place / "runs", 120) as disk:
        process = start(place, '"$@"')
        until(process, (disk / "tiny/checkpoints/step_2.commit.json").exists)
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left on device"):
            while True:
                filler.write(bytes(1 << 20))
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 2
        told = one_line(stderr)
        assert "runs/tiny/" in told and "free" in told and "make room" in told
        (disk / "filler").unlink()

        process = start(place, '"$@"', PYTHONIOENCODING="ascii")
        stdout, stderr = process.communicate(timeout=300)
        assert (process.returncode, stderr) == (0, "")
        assert "going on from the checkpoint of step" in stdout
        assert stdout.isascii() and "number_filtering |" in stdout and "\\u" not in stdout
        assert_undisturbed(disk / "tiny", home)


def test_a_file_over_the_limit_is_one_line_and_the_run_resumes_exactly(place: Path, home: Path) -> None:
    run = place / "runs/tiny"
    process = start(place, 'exec "$@"')
    until(process, (run / "checkpoints/step_2.commit.json").exists)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "File too large" in one_line(stderr) and "ulimit -f" in stderr
    assert stdout.count("WARNING: TensorBoard failed and is left out from here on: OSError: [Errno 27] File too large\n") <= 1

    tiny_run.train(place)
    assert_undisturbed(run, home)
