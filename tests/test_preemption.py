import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tiny_run

from jaxprorl.preemption import EXIT_STATUS, INTERRUPTED, SIGNALS, Preempted, Preemption, UninterruptedStack, interrupts_held
from jaxprorl.rollout import segments

ROOT = Path(__file__).resolve().parent.parent
LONG_S = 60.0


def test_the_status_is_the_documented_one() -> None:
    assert EXIT_STATUS == 75 == os.EX_TEMPFAIL
    assert Preempted().code == 75
    assert set(SIGNALS) == {signal.SIGTERM, signal.SIGUSR1}


@pytest.mark.parametrize("number", SIGNALS)
def test_guarded_work_goes_on_to_its_own_end(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(Preempted), Preemption(LONG_S) as preemption:
        with preemption.guarded():
            for step in range(3):
                if step == 1:
                    signal.raise_signal(number)
                steps.append(step)
                if preemption.requested:
                    break
        raise AssertionError("not reached")
    assert steps == [0, 1]
    assert preemption.requested == number.name


def test_unguarded_work_is_left_at_once() -> None:
    with pytest.raises(Preempted), Preemption(LONG_S):
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("not reached")


def test_an_error_inside_guarded_work_wins() -> None:
    with pytest.raises(KeyError), Preemption(LONG_S) as preemption, preemption.guarded():
        signal.raise_signal(signal.SIGTERM)
        raise KeyError


def test_without_a_signal_nothing_happens_and_handlers_are_put_back() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)]

    before = handlers()
    with Preemption(LONG_S) as preemption:
        assert not set(handlers()) & set(before)
        with preemption.guarded():
            pass
    assert handlers() == before


def test_ctrl_c_leaves_guarded_work_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Preemption(LONG_S) as preemption, preemption.guarded():
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")


def test_ctrl_c_that_a_library_swallows_ends_guarded_work_at_its_next_boundary() -> None:
    with pytest.raises(KeyboardInterrupt), Preemption(LONG_S) as preemption:
        with preemption.guarded():
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert preemption.requested == "SIGINT"
        raise AssertionError("not reached")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)])
def test_held_interrupts_are_raised_when_the_outermost_hold_ends(number: signal.Signals, error: type[BaseException]) -> None:
    done = []
    with pytest.raises(error) as raised, Preemption(LONG_S):
        with interrupts_held():
            with interrupts_held():
                signal.raise_signal(number)
                done.append("inner")
            done.append("outer")
            raise KeyError("its own")
        raise AssertionError("not reached")
    assert done == ["inner", "outer"]
    assert isinstance(raised.value.__context__, KeyError)
    with Preemption(LONG_S), interrupts_held():
        pass  # it is raised once


def test_another_threads_work_holds_nothing() -> None:
    holding, release = threading.Event(), threading.Event()

    @interrupts_held()
    def hold() -> None:
        holding.set()
        release.wait(LONG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert holding.wait(LONG_S)
        with pytest.raises(KeyboardInterrupt), Preemption(LONG_S):
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")
    finally:
        release.set()
        thread.join()


def test_a_stack_closes_everything_before_ctrl_c_goes_on() -> None:
    closed = []
    with pytest.raises(KeyboardInterrupt), Preemption(LONG_S):
        with UninterruptedStack() as stack:
            stack.callback(lambda: closed.append("first"))
            stack.callback(lambda: (signal.raise_signal(signal.SIGINT), closed.append("second")))
        raise AssertionError("not reached")
    assert closed == ["second", "first"]


# Guarded work that takes a minute to save; or, outside it, a clean-up that takes as long.
SLOW = """
import sys, time
from jaxprorl.preemption import Preemption
with Preemption(float(sys.argv[1])) as preemption:
    if sys.argv[2] == "guarded":
        with preemption.guarded():
            print("ready", flush=True)
            while not preemption.requested: time.sleep(0.01)
            print("saving", flush=True)
            time.sleep(60)
    else:
        try:
            print("ready", flush=True)  # here: a signal before the try would find no clean-up to do
            time.sleep(60)
        finally:
            print("saving", flush=True)
            time.sleep(60)
"""


@pytest.mark.parametrize(
    ("first", "where", "status"),
    [(signal.SIGTERM, "guarded", EXIT_STATUS), (signal.SIGTERM, "outside", EXIT_STATUS), (signal.SIGINT, "outside", INTERRUPTED)],
)
@pytest.mark.parametrize(
    ("save_within_s", "second"), [(LONG_S, signal.SIGUSR1), (LONG_S, signal.SIGTERM), (LONG_S, signal.SIGINT), (3.0, None)]
)
def test_a_second_signal_or_the_end_of_the_time_leaves_at_once(
    first: int, where: str, status: int, save_within_s: float, second: int | None
) -> None:
    command = [sys.executable, "-c", SLOW, str(save_within_s), where]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(first)
        started_s = time.perf_counter()
        assert process.stdout.readline() == "saving\n"
        if second:
            process.send_signal(second)
        assert process.wait(30) == status
    seconds = time.perf_counter() - started_s
    assert seconds < 30
    assert second or seconds >= 2.9


# A closing that waits for ever, as for a lock that an interrupted call left locked, with shared memory in use.
STUCK = """
import sys, threading
from pathlib import Path
from jaxprorl.preemption import Preemption, UninterruptedStack
from jaxprorl.rollout import segments
run = Path(sys.argv[1])
def waits_for_ever():
    lock = threading.Lock()
    lock.acquire()
    print("stuck", flush=True)
    lock.acquire()
with Preemption(float(sys.argv[2])), UninterruptedStack() as stack:
    stack.enter_context(segments.create(segments.SHARED_MEMORY, run, "weights", 0, 4096))
    stack.callback(waits_for_ever)
    print("ready", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_ends_a_process_whose_closing_hangs_and_says_where(tmp_path: Path, twice: bool) -> None:
    command = [sys.executable, "-c", STUCK, str(tmp_path), str(LONG_S if twice else 1.0)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"
        assert list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(tmp_path)}-*"))
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stuck\n"
        if twice:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == INTERRUPTED
        said = process.stderr.read()
    assert ("SIGINT: not ended 1 s later" in said) != twice
    assert ("in waits_for_ever" in said) != twice
    assert not list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(tmp_path)}-*"))


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
