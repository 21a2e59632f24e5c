"""Signals that end a run: SIGTERM and SIGUSR1, which clusters send before they take a machine away (save first), and Ctrl-C (leave now)."""

import contextlib
import faulthandler
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
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_CLOSE = 0  # among the numbers of signals in the pipe: nothing more is to be heard
_SHOW_CURSOR = b"\x1b[?25h\n"  # a live panel hides it


class Preempted(SystemExit):
    """The run stops on request, saved. An exit with EXIT_STATUS."""

    def __init__(self) -> None:
        super().__init__(EXIT_STATUS)


class Preemption:
    """Listens for the signals while it is entered; only the main thread may enter it.

    Inside `guarded` work (the loop) SIGTERM and SIGUSR1 only set `requested`, and the loop leaves at its next step boundary.
    Elsewhere (data, warm start, evaluation) nothing would be saved, so they end the process at once. Ctrl-C does so everywhere, and so do
    a second signal, and `save_within_s` running out, which tells where the process hangs.

    At once is what `kill -9` does, and a run goes on from that exactly; only the names of shared memory are removed before. The kernel ends
    graders and workers with the process, and frees the run's lock. Nothing is closed and no exception is raised: between any two
    instructions, one leaves locks locked (that of `Popen.poll`, those of futures, those of libraries), and closing then waits for ever.
    A thread of its own listens, since a handler would have to wait until the main thread comes back from compiled code.

    Args:
        save_within_s: seconds that guarded work has from a signal to the exit.
        what_comes_next: a few words for whoever ends the process at once; called then, in the listening thread.
    """

    def __init__(self, save_within_s: float = 0.0, what_comes_next: Callable[[], str] | None = None):
        self._save_within_s, self._what_comes_next = save_within_s, what_comes_next
        self._lock = threading.Lock()  # of what follows, which the listening thread and the main thread share
        self._guarded = False
        self._first: int | None = None
        self._deadline_s: float | None = None
        self.requested: str | None = None  # name of the signal

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
            left_s = None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())
            if not poll.poll(None if left_s is None else 1000 * left_s):
                self._give_up()
            for number in os.read(self._read, 64):
                if number == _CLOSE:
                    return
                if number in (*SIGNALS, signal.SIGINT):
                    self._hear(number)

    def _hear(self, number: int) -> None:
        with self._lock:
            waits = self._first is None and self._guarded and number != signal.SIGINT
            if self._first is None:
                self._first = number
            if waits:
                self._deadline_s = time.monotonic() + self._save_within_s
                self.requested = signal.Signals(number).name
        if not waits:
            self._leave("interrupted" if number == signal.SIGINT else signal.Signals(number).name)

    def _give_up(self) -> NoReturn:
        """Time is up: whoever reports a hang has something to show."""
        try:
            os.write(2, f"{self.requested}: not ended {self._save_within_s:g} s later; the process leaves and was here:\n".encode())
            faulthandler.dump_traceback(2)
        finally:
            self._leave(str(self.requested))

    def _leave(self, reason: str) -> NoReturn:
        """Ends the process, whatever its other threads do."""
        try:
            segments.unlink_owned()
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            os.write(2, (f"{reason}: {self._what_comes_next()}\n" if self._what_comes_next else f"{reason}\n").encode())
        finally:
            os._exit(INTERRUPTED if self._first == signal.SIGINT else EXIT_STATUS)

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        self._previous_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {number: signal.signal(number, _heard) for number in (*SIGNALS, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_pipe)
        os.write(self._write, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)


def _heard(number: int, frame: FrameType | None) -> None:
    """Nothing: the listening thread acts. Python passes a signal on only where it has a handler."""
