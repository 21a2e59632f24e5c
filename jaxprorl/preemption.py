"""Signals that end a run. SIGTERM and SIGUSR1 (clusters send them before they take a machine away) and SIGHUP (the terminal was closed)
save first; Ctrl-C leaves at once.
"""

import _thread
import contextlib
import faulthandler
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from jaxprorl.rollout import segments

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the work is saved, start the same command again
INTERRUPTED = 130  # after Ctrl-C, as shells have it
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

REPEATED_WITHIN_S = 2.0  # so soon, one of SIGNALS is the first one again: to the process and to its group, or sent on by a parent
LEAVE_WITHIN_S = 2.0
SAVED_EVERY_S = 0.05  # how often a save under way is looked at

_CLOSE = 0  # among the numbers of signals in the pipe: nothing more is to be heard
_SHOW_CURSOR = b"\x1b[?25h\n"  # a live panel hides it


class Preempted(SystemExit):
    """The run stops on request, saved. An exit with EXIT_STATUS."""

    def __init__(self) -> None:
        super().__init__(EXIT_STATUS)


class Preemption:
    """Listens for the signals while it is entered; only the main thread may enter it.

    Inside `guarded` work (the loop) SIGNALS only set `requested`, and the loop leaves at its next step boundary.
    Elsewhere (data, warm start, evaluation) nothing new would be saved, so they end the process at once, or as soon as it is not `saving`.
    Ctrl-C ends it at once everywhere, and so do a second signal, and `save_within_s` running out, which tells where the process hangs.

    At once is what `kill -9` does, and a run goes on from that exactly; only the names of shared memory are removed before. The kernel ends
    graders and workers with the process, and frees the run's lock. Nothing is closed and no exception is raised: between any two
    instructions, one leaves locks locked (that of `Popen.poll`, those of futures, those of libraries), and closing then waits for ever.
    A thread of its own listens, since a handler would have to wait until the main thread comes back from compiled code.

    Args:
        save_within_s: seconds from one of SIGNALS to the exit, at most.
        what_comes_next: a few words for whoever ends the process at once; called then, in the listening thread.

    Attributes:
        requested: name of the signal that guarded work should end for; None before it.
        saving: whether a save is under way; to be set once there can be one. Called in the listening thread.
    """

    def __init__(self, save_within_s: float = 0.0, what_comes_next: Callable[[], str] | None = None):
        self._save_within_s, self._what_comes_next = save_within_s, what_comes_next
        self._lock = threading.Lock()  # of what follows, which the listening thread and the main thread share
        self._guarded = False
        self._first: int | None = None
        self._first_s = self._deadline_s = math.inf
        self._waits_for_save = False
        self.requested: str | None = None
        self.saving: Callable[[], bool] = lambda: False

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Work that saves and ends by itself once `requested` is set; leaving it then raises Preempted."""
        with self._lock:
            self._guarded = True
        try:
            yield
        finally:
            with self._lock:
                self._guarded = False
        if self.requested:
            raise Preempted

    def _listen(self) -> None:
        """Body of the listening thread: Python writes the number of every signal into the pipe, from whatever thread it comes to."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while True:
            left_s = max(0.0, min(3600.0, self._deadline_s - time.monotonic()))
            if poll.poll(1000 * (min(left_s, SAVED_EVERY_S) if self._waits_for_save else left_s)):
                for number in os.read(self._read, 64):
                    if number == _CLOSE:
                        return
                    if number in (*SIGNALS, signal.SIGINT):
                        self._hear(number)
            if self._waits_for_save and not self.saving():
                self._leave(_name(self._first))
            if time.monotonic() >= self._deadline_s:
                self._give_up()

    def _hear(self, number: int) -> None:
        now_s = time.monotonic()
        with self._lock:
            if self._first is None:
                self._first, self._first_s = number, now_s
                if number != signal.SIGINT and (self._guarded or self.saving()):
                    self._deadline_s = now_s + self._save_within_s
                    self._waits_for_save = not self._guarded
                    if self._guarded:
                        self.requested = _name(number)
                    return
            elif number != signal.SIGINT and now_s < self._first_s + REPEATED_WITHIN_S:
                return
        self._leave(_name(number))

    def _give_up(self) -> NoReturn:
        """Time is up: whoever reports a hang has something to show."""
        try:
            self._exit_soon()
            os.write(2, f"{_name(self._first)}: not ended {self._save_within_s:g} s later; the process leaves and was here:\n".encode())
            faulthandler.dump_traceback(2)
        finally:
            self._leave(_name(self._first))

    def _leave(self, reason: str) -> NoReturn:
        """Ends the process, whatever its other threads do, and whether anyone reads what it says or not."""
        try:
            self._exit_soon()
            segments.unlink_owned()
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            with contextlib.suppress(Exception):
                reason += f": {self._what_comes_next()}" if self._what_comes_next else ""
            os.write(2, f"{reason}\n".encode())
        finally:
            os._exit(self._status())

    def _exit_soon(self) -> None:
        """In LEAVE_WITHIN_S seconds at the latest: pipes may be full and disks away."""

        def exit_then() -> NoReturn:
            time.sleep(LEAVE_WITHIN_S)
            os._exit(self._status())

        _thread.start_new_thread(exit_then, ())

    def _status(self) -> int:
        return INTERRUPTED if self._first == signal.SIGINT else EXIT_STATUS

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        self._previous_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {number: signal.signal(number, _heard) for number in listened()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_pipe)
        os.write(self._write, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)


def listened() -> tuple[signal.Signals, ...]:
    """SIGNALS and Ctrl-C; without SIGHUP where the process ignores it, as `nohup` has it."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return tuple(number for number in (*SIGNALS, signal.SIGINT) if number not in ignored)


def _name(number: int | None) -> str:
    return "interrupted" if number == signal.SIGINT else signal.Signals(number or 0).name


def _heard(number: int, frame: FrameType | None) -> None:
    """Nothing: the listening thread acts. Python passes a signal on only where it has a handler."""


def _forget() -> None:
    """In a forked child, which has the pipe but no listening thread: its signals are its own."""
    for number in (*SIGNALS, signal.SIGINT):
        if signal.getsignal(number) is _heard:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
