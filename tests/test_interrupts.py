import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from jaxprorl import interrupts
from jaxprorl.interrupts import Interrupted, Interrupts, safe_point
from jaxprorl.preemption import EXIT_STATUS, REPEATED_WITHIN_S, SIGNALS, Preempted

NUMBERS = (*SIGNALS, signal.SIGINT)


def listening() -> Interrupts:
    return Interrupts(lambda: "more to come")


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert interrupts._current is None


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Preempted), (signal.SIGUSR1, Preempted)])
def test_work_outside_the_loop_is_left_at_the_next_safe_point(number: signal.Signals, error: type[BaseException]) -> None:
    done = []
    with pytest.raises(error), listening():
        safe_point()
        signal.raise_signal(number)
        done.append("what is between safe points")
        safe_point()
        done.append("not reached")
    assert done == ["what is between safe points"]


@pytest.mark.parametrize("number", NUMBERS)
def test_guarded_work_goes_on_to_its_own_end(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    with pytest.raises((Interrupted, Preempted)), listening() as signals:
        with signals.guarded():
            for step in range(3):
                safe_point()
                steps.append(step)
                if step == 1:
                    signal.raise_signal(number)
                safe_point()
                if signals.requested:
                    break
        raise AssertionError("not reached")
    assert steps == [0, 1]
    assert signals.requested == number.name
    told = capsys.readouterr().err
    assert told.count(f"{number.name}: the step is finished and saved first") == 1


def test_a_second_ctrl_c_leaves_guarded_work_at_the_next_safe_point() -> None:
    with pytest.raises(Interrupted), listening() as signals, signals.guarded():
        signal.raise_signal(signal.SIGINT)
        safe_point()
        signal.raise_signal(signal.SIGINT)
        safe_point()
        raise AssertionError("not reached")


def test_a_third_one_meets_the_closing_which_it_does_not_cut_short() -> None:
    closed = []
    with pytest.raises(Interrupted), listening():
        try:
            signal.raise_signal(signal.SIGINT)
            safe_point()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            closed.append(True)
    assert closed == [True]


def test_sigterm_twice_within_moments_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Preempted), listening() as signals, signals.guarded():
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        safe_point()
        later_s = time.monotonic() + REPEATED_WITHIN_S + 1
        monkeypatch.setattr(time, "monotonic", lambda: later_s)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted):
            safe_point()


def test_what_is_raised_says_what_comes_next_and_is_no_ordinary_error() -> None:
    with pytest.raises(KeyboardInterrupt, match="interrupted: more to come") as raised, listening():
        signal.raise_signal(signal.SIGINT)
    assert type(raised.value) is Interrupted
    assert not isinstance(raised.value, Exception)
    with pytest.raises(SystemExit) as left, listening():
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == EXIT_STATUS


def test_what_comes_next_is_told_by_what_is_there_once_everything_is_closed() -> None:
    saved: list[str] = []
    with pytest.raises(Interrupted, match="interrupted: from step 3"), Interrupts(lambda: f"from {saved[0]}"):
        try:
            signal.raise_signal(signal.SIGINT)
            safe_point()
        finally:
            saved.append("step 3")


def test_another_error_on_its_way_wins() -> None:
    with pytest.raises(KeyError), listening():
        signal.raise_signal(signal.SIGINT)
        raise KeyError


def test_signals_that_the_caller_ignores_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with listening() as signals:
            signal.raise_signal(signal.SIGINT)
            safe_point()
        assert signals.requested is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_callers_own_handler_hears_of_its_signal_once_everything_is_closed() -> None:
    order: list[object] = []

    def own(number: int, frame: FrameType | None) -> None:
        order.append((number, signal.getsignal(number) is own))

    before = signal.signal(signal.SIGUSR1, own)
    try:
        with pytest.raises(Preempted), listening():
            try:
                signal.raise_signal(signal.SIGUSR1)
                safe_point()
            finally:
                order.append("closed")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert order == ["closed", (signal.SIGUSR1, True)]


def test_a_handler_of_c_code_is_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(signal.SIGUSR1, nowhere)
        try:
            with listening():
                pass
            os.kill(os.getpid(), signal.SIGUSR1)  # would end this process
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_in_another_thread_it_runs_without_signals() -> None:
    found: list[object] = []

    def work() -> None:
        with listening() as signals, signals.guarded():
            safe_point()
            found.append([signal.getsignal(number) for number in NUMBERS])

    before = [signal.getsignal(number) for number in NUMBERS]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_safe_points_of_other_threads_are_not_meant() -> None:
    raised = []

    def work() -> None:
        try:
            safe_point()
        except BaseException as error:
            raised.append(error)

    with pytest.raises(Interrupted), listening():
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not raised


def test_a_forked_childs_signals_are_its_own() -> None:
    program = """
import multiprocessing, time
from jaxprorl.interrupts import Interrupts
with Interrupts(str) as signals:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(0.3)
    child.terminate()
    child.join()
    print(child.exitcode, signals.requested)
"""
    assert python(program).communicate(timeout=60)[0] == "-15 None\n"


# Where a handler must wait until the main thread comes back, and where it comes back at once.
WAITS = {
    "sleep": "time.sleep(2)",
    "a lock": "threading.Event().wait(2)",
    "futures": "concurrent.futures.wait([concurrent.futures.Future()], timeout=2)",
    "compiled code": "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**6)",
}


@pytest.mark.parametrize("where", WAITS)
def test_the_process_lives_on_wherever_ctrl_c_meets_it(where: str) -> None:
    program = f"""
import concurrent.futures, hashlib, threading, time
from jaxprorl.interrupts import Interrupted, Interrupts, safe_point
kept = 42
try:
    with Interrupts(lambda: "more to come"):
        print("ready", flush=True)
        while True:
            {WAITS[where]}
            safe_point()
except Interrupted as error:
    print(error, kept)
"""
    process = python(program)
    assert process.stdout and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted: more to come 42\n"
    assert process.returncode == 0


def python(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=os.path.dirname(os.path.dirname(__file__)))
