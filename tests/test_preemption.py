import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_run

from jaxprorl.preemption import EXIT_STATUS, INTERRUPTED, LEAVE_WITHIN_S, REPEATED_WITHIN_S, SIGNALS, Preempted, Preemption
from jaxprorl.rollout import segments

ROOT = Path(__file__).resolve().parent.parent
LONG_S = 60.0


def test_the_status_is_the_documented_one() -> None:
    assert EXIT_STATUS == 75 == os.EX_TEMPFAIL
    assert Preempted().code == 75
    assert set(SIGNALS) == {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


@pytest.mark.parametrize("number", SIGNALS)
def test_guarded_work_goes_on_to_its_own_end(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(Preempted), Preemption(LONG_S) as preemption:
        with preemption.guarded():
            for step in range(3):
                if step == 1:
                    signal.raise_signal(number)
                    until(lambda: preemption.requested is not None)
                steps.append(step)
                if preemption.requested:
                    break
        raise AssertionError("not reached")
    assert steps == [0, 1]
    assert preemption.requested == number.name


def test_an_error_inside_guarded_work_wins() -> None:
    with pytest.raises(KeyError), Preemption(LONG_S) as preemption, preemption.guarded():
        signal.raise_signal(signal.SIGTERM)
        until(lambda: preemption.requested == "SIGTERM")
        raise KeyError


def test_a_signal_that_comes_to_another_thread_is_heard() -> None:
    with pytest.raises(Preempted), Preemption(LONG_S) as preemption, preemption.guarded():
        thread = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
        thread.start()
        thread.join()
        until(lambda: preemption.requested == "SIGTERM")


def test_without_a_signal_nothing_happens_and_everything_is_put_back() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)]

    before, files, threads = handlers(), len(os.listdir("/proc/self/fd")), threading.active_count()
    with Preemption(LONG_S) as preemption:
        assert not set(handlers()) & set(before)
        with preemption.guarded():
            pass
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.001)


# Guarded work that takes a minute to save; or, outside it, work with a clean-up that would take as long.
SLOW = """
import sys, time
from jaxprorl.preemption import Preemption
with Preemption(float(sys.argv[1]), lambda: "more to come") as preemption:
    if sys.argv[2] == "guarded":
        with preemption.guarded():
            print("ready", flush=True)
            while not preemption.requested: time.sleep(0.01)
            print("saving", flush=True)
            time.sleep(60)
    else:
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("cleaning up", flush=True)
            time.sleep(60)
"""


def program(text: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("first", "where", "status"),
    [
        (signal.SIGTERM, "outside", EXIT_STATUS), (signal.SIGUSR1, "outside", EXIT_STATUS), (signal.SIGHUP, "outside", EXIT_STATUS),
        (signal.SIGINT, "outside", INTERRUPTED), (signal.SIGINT, "guarded", INTERRUPTED),
    ],
)  # fmt: skip
def test_what_has_nothing_to_save_ends_at_once(first: signal.Signals, where: str, status: int) -> None:
    with program(SLOW, LONG_S, where) as process:
        started_s = time.perf_counter()
        process.send_signal(first)
        stdout, stderr = process.communicate(timeout=30)
    assert time.perf_counter() - started_s < 5
    assert (process.returncode, stdout) == (status, "")
    assert stderr == f"{'interrupted' if first == signal.SIGINT else first.name}: more to come\n"


# Its guarded work is saved, into a file, as soon as it is asked for.
SAVES = """
import sys, time
from pathlib import Path
from jaxprorl.preemption import Preemption
with Preemption(60.0) as preemption, preemption.guarded():
    Path(sys.argv[1], "ready").touch()
    while not preemption.requested: time.sleep(0.01)
    Path(sys.argv[1], "saved").write_text(preemption.requested)
"""


def test_a_terminal_that_is_closed_lets_guarded_work_save(tmp_path: Path) -> None:
    master, terminal = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=take_terminal) as process:
        os.close(terminal)
        until((tmp_path / "ready").exists)
        os.close(master)
        assert process.wait(30) == EXIT_STATUS
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(["nohup", sys.executable, "-c", SAVES, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_STATUS
    assert (tmp_path / "saved").read_text() == "SIGTERM"


@pytest.mark.parametrize(
    ("save_within_s", "second"), [(LONG_S, signal.SIGUSR1), (LONG_S, signal.SIGTERM), (LONG_S, signal.SIGINT), (3.0, None)]
)
def test_a_second_signal_or_the_end_of_the_time_ends_what_saves(save_within_s: float, second: signal.Signals | None) -> None:
    with program(SLOW, save_within_s, "guarded") as process:
        process.send_signal(signal.SIGTERM)
        started_s = time.perf_counter()
        assert process.stdout and process.stdout.readline() == "saving\n"
        if second:
            process.send_signal(signal.SIGTERM)  # the first one again
            time.sleep(0 if second == signal.SIGINT else REPEATED_WITHIN_S + 0.1)
            assert process.poll() is None
            process.send_signal(second)
        _, stderr = process.communicate(timeout=30)
    seconds = time.perf_counter() - started_s
    assert process.returncode == EXIT_STATUS
    assert stderr.endswith(": more to come\n")
    assert seconds < 5 if second else 2.9 < seconds < 30
    assert ("SIGTERM: not ended 3 s later" in stderr and "<module>" in stderr) == (second is None)


# No guarded work; a save that is under way for as long as a file is missing.
SAVING = """
import sys, time
from pathlib import Path
from jaxprorl.preemption import Preemption
with Preemption(float(sys.argv[1])) as preemption:
    preemption.saving = lambda: not Path(sys.argv[2]).exists()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, EXIT_STATUS), (signal.SIGINT, INTERRUPTED)])
def test_only_ctrl_c_does_not_wait_for_a_save_under_way(tmp_path: Path, number: int, status: int) -> None:
    with program(SAVING, LONG_S, tmp_path / "committed") as process:
        process.send_signal(number)
        if number != signal.SIGINT:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            (tmp_path / "committed").touch()
        assert process.wait(5) == status


def test_a_save_outside_of_the_loop_has_its_time_too(tmp_path: Path) -> None:
    with program(SAVING, 1.0, tmp_path / "never") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == EXIT_STATUS
        assert process.stderr and "SIGTERM: not ended 1 s later" in process.stderr.read()


@pytest.mark.parametrize("save_within_s", [1e9, float("inf")])
def test_any_time_to_save_may_be_given(save_within_s: float) -> None:
    with program(SLOW, save_within_s, "guarded") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout and process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == EXIT_STATUS


def test_nobody_has_to_read_what_it_says() -> None:
    text = f"""
import os, time
from jaxprorl.preemption import Preemption
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x" * 65536)
except BlockingIOError:
    os.set_blocking(2, True)
with Preemption():
    print("ready", flush=True)
    time.sleep({LONG_S})
"""
    with program(text) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(LEAVE_WITHIN_S + 5) == INTERRUPTED


def test_a_forked_childs_signals_are_its_own() -> None:
    text = """
import multiprocessing, time
from jaxprorl.preemption import Preemption
with Preemption() as preemption, preemption.guarded():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    print("ready", flush=True)
    time.sleep(0.5)
    child.terminate()
    child.join()
    time.sleep(0.5)
    print(child.exitcode, preemption.requested)
"""
    with program(text) as process:
        assert process.communicate(timeout=30)[0] == "-15 None\n"
        assert process.returncode == 0


# A main thread that never comes back to its instructions, one that holds a lock that starting a thread needs, one that makes names.
STUCK = {
    "in compiled code": "print('ready', flush=True)\nhashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
    "behind locks": "threading._active_limbo_lock.acquire()\nprint('ready', flush=True)\nthreading.Event().wait()",
    "making names": "print('ready', flush=True)\nwhile True: made.append(segments.create(segments.SHARED_MEMORY, run, 'weights', 1, 4096))",
}


@pytest.mark.parametrize("where", STUCK)
def test_ctrl_c_ends_a_process_wherever_it_is_and_leaves_no_shared_memory(tmp_path: Path, where: str) -> None:
    text = f"""
import hashlib, sys, threading
from pathlib import Path
from jaxprorl.preemption import Preemption
from jaxprorl.rollout import segments
run = Path(sys.argv[1])
with Preemption(60.0):
    made = [segments.create(segments.SHARED_MEMORY, run, "weights", 0, 4096)]
{textwrap.indent(STUCK[where], "    ")}
"""
    names = f"{segments.run_prefix(tmp_path)}-*"
    with program(text, tmp_path) as process:
        assert list(segments.SHARED_MEMORY.glob(names))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == INTERRUPTED
        assert process.stderr and process.stderr.read() == "interrupted\n"
    assert not list(segments.SHARED_MEMORY.glob(names))


def test_on_a_terminal_the_cursor_comes_back() -> None:
    ours, theirs = pty.openpty()
    text = "import time\nfrom jaxprorl.preemption import Preemption\nwith Preemption():\n    print('ready', flush=True)\n    time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            assert terminal.readline() == b"ready\r\n"
            process.send_signal(signal.SIGINT)
            assert terminal.readline() == b"\x1b[?25h\r\n"
        assert process.wait(30) == INTERRUPTED


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with an uninterrupted run."""
    folder = tiny_run.new_home(tmp_path_factory)
    tiny_run.train(folder)
    return folder


def place(home: Path, tmp_path: Path) -> Path:
    (tmp_path / ".cache").symlink_to((home / ".cache").resolve())
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_preempted_run_saves_leaves_with_75_and_goes_on_to_equal_the_uninterrupted_one(home: Path, tmp_path: Path) -> None:
    """SIGTERM to the process alone; then SIGUSR1 to its whole group, as Slurm sends it."""
    folder, run, reference = place(home, tmp_path), tmp_path / "runs/tiny", home / "runs/tiny"
    last = 0
    for name in ("SIGTERM", "SIGUSR1"):
        command = tiny_run.Command(folder)
        command.until(lambda: len(tiny_run.lines(run / "metrics.jsonl")) > last)  # noqa: B023
        sent_s = time.perf_counter()
        number = signal.Signals[name]
        command.process.send_signal(number) if name == "SIGTERM" else os.killpg(command.process.pid, number)
        ended = command.wait(60)
        assert time.perf_counter() - sent_s < 20
        assert ended.status == EXIT_STATUS, ended.stderr
        assert "Traceback" not in ended.stderr
        assert not command.left_behind()
        steps = len(tiny_run.lines(run / "metrics.jsonl"))
        assert last < steps < tiny_run.STEPS
        assert f"{name}: saved after step {steps}; the same command goes on from there" in ended.stdout
        assert (run / f"checkpoints/step_{steps}.commit.json").is_file()
        assert tiny_run.lines(run / "events.jsonl")[-1] == {"step": steps, "kind": "interrupted", "signal": name}
        assert (run / ".lock").read_text() == ""
        last = steps
    ended = tiny_run.train(folder)
    assert f"going on from the checkpoint of step {last}" in ended.stdout
    assert tiny_run.timeless_metrics(run) == tiny_run.timeless_metrics(reference)
    assert tiny_run.timeless_events(run, "resume", "compile") == tiny_run.timeless_events(reference, "resume", "compile")
    assert tiny_run.files(run / "samples") == tiny_run.files(reference / "samples")
    assert tiny_run.files(run / "model") == tiny_run.files(reference / "model")
    script = [sys.executable, str(ROOT / "launch/checkpoints.py"), "diff", str(run), str(reference)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_in_the_warm_start_leaves_at_once_and_nothing_behind(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / ".cache/xla", tmp_path / ".cache/xla")
    command = tiny_run.Command(tmp_path, "warmstart.skill_updates=100000", "warmstart.max_skill_updates=100000")
    assert command.process.stdout and "warm start" in command.process.stdout.readline()
    command.process.send_signal(signal.SIGUSR1)
    sent_s = time.perf_counter()
    ended = command.wait(60)
    assert ended.status == EXIT_STATUS
    assert time.perf_counter() - sent_s < 10
    assert "Traceback" not in ended.stderr
    assert not command.left_behind()
    assert not (tmp_path / "runs/tiny/metrics.jsonl").exists()
    assert not list((tmp_path / "runs/tiny").glob("checkpoints/*"))


# launch/train.py on a disk that takes a minute for every checkpoint.
SLOW_DISK = """
import sys, time
sys.path[:0] = [{launch!r}, {root!r}]
import train as command
from jaxprorl import commit
write_record = commit.write_record
commit.write_record = lambda *arguments: time.sleep(60) or write_record(*arguments)
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_save_that_takes_too_long_is_given_up_in_time_and_commits_nothing(home: Path, tmp_path: Path) -> None:
    folder, run = place(home, tmp_path), tmp_path / "runs/tiny"
    program = SLOW_DISK.format(launch=str(ROOT / "launch"), root=str(ROOT))
    command = tiny_run.Command(folder, "checkpoint.save_within_s=3.0", program=["-c", program])
    command.until(lambda: bool(tiny_run.lines(run / "metrics.jsonl")))
    command.process.send_signal(signal.SIGTERM)
    sent_s = time.perf_counter()
    assert command.wait(60).status == EXIT_STATUS
    assert time.perf_counter() - sent_s < 10
    assert not command.left_behind()
    assert not list(run.glob("checkpoints/*.commit.json"))
