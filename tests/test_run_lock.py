import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxprorl import files
from jaxprorl.errors import RunLockedError
from jaxprorl.interrupts import Interrupted, Interrupts
from jaxprorl.preemption import Preempted
from jaxprorl.run_lock import LOCK_NAME, RunLock, turn

ROOT = Path(__file__).resolve().parent.parent
HOLD = """
import sys
from pathlib import Path
from jaxprorl.run_lock import RunLock
with RunLock(Path(sys.argv[1])) as lock:
    print(lock.stale_owner, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "None\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for _ in range(2):  # being refused changes nothing
        with pytest.raises(RunLockedError) as caught:
            RunLock(tmp_path)
        assert f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}" in str(caught.value)
        assert "--config.run_name" in str(caught.value)


def test_a_lock_that_was_released_in_order_leaves_no_owner(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.communicate("")
    assert holder.returncode == 0
    with RunLock(tmp_path) as lock:
        assert lock.stale_owner is None
    assert (tmp_path / LOCK_NAME).read_text() == ""


def test_the_lock_of_a_killed_process_is_taken_over_and_names_it_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path) as lock:
        assert lock.stale_owner == {"pid": holder.pid, "host": socket.gethostname()}
    with RunLock(tmp_path) as lock:
        assert lock.stale_owner is None


def test_one_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(RunLockedError):
            RunLock(tmp_path)
        with pytest.raises(RunLockedError):
            RunLock(tmp_path)
    with RunLock(tmp_path):
        pass


def test_an_error_inside_releases_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path) as lock:
        assert lock.stale_owner is None


@pytest.mark.parametrize("content", ["", "{", "[]", "7", json.dumps({"pid": 1})])
def test_a_torn_or_strange_lock_file_is_no_obstacle(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    with RunLock(tmp_path) as lock:
        assert lock.stale_owner is None


TURN = """
import sys
from pathlib import Path
from jaxprorl.run_lock import turn
with turn(Path(sys.argv[1]), lambda who: print("waits for", who, flush=True)):
    print("its turn", flush=True)
    sys.stdin.read(1)
"""


def take_turn(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TURN, str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_one_has_its_turn_the_other_names_it_once_and_follows_when_it_ends_or_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "model.lock"
    first = take_turn(path)
    assert first.stdout and first.stdout.readline() == "its turn\n"
    second = take_turn(path)
    assert second.stdout and second.stdout.readline() == f"waits for process {first.pid} on {socket.gethostname()}\n"
    first.communicate("x")
    assert second.stdout.readline() == "its turn\n"
    third = take_turn(path)
    assert third.stdout and third.stdout.readline() == f"waits for process {second.pid} on {socket.gethostname()}\n"
    second.kill()
    second.communicate()
    assert third.stdout.readline() == "its turn\n"
    assert third.communicate("x")[0] == ""
    assert path.read_text() == ""


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Preempted)])
def test_whoever_waits_for_its_turn_leaves_when_a_signal_was_noted(
    number: signal.Signals, error: type[BaseException], tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    waited_for: list[str] = []

    def told(who: str) -> None:
        waited_for.append(who)
        signal.raise_signal(number)

    with pytest.raises(error), Interrupts(lambda: "more to come"), turn(tmp_path / LOCK_NAME, told):
        pytest.fail("the other process holds it")
    assert waited_for == [f"process {holder.pid} on {socket.gethostname()}"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_where_there_are_no_locks_nobody_waits_and_a_run_is_refused(
    number: int, tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with turn(tmp_path / LOCK_NAME, lambda who: pytest.fail(who)):
        pass
    with pytest.raises(OSError, match="this file system has no locks"):
        RunLock(tmp_path)
