"""Signals that end a run: SIGTERM and SIGUSR1, which clusters send before they take a machine away (save first), and Ctrl-C (leave now)."""

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from jaxprorl.rollout import segments

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the work is saved, start the same command again
INTERRUPTED = 130  # after Ctrl-C, as shells have it
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_holds = 0  # `interrupts_held` that the main thread is in
_held: type[BaseException] | None = None  # what is raised when it leaves the last of them


class Preempted(SystemExit):
    """The run stops on request, saved. An exit with EXIT_STATUS."""

    def __init__(self) -> None:
        super().__init__(EXIT_STATUS)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Short work that the signals of `Preemption` do not cut short: what they raise is raised at its end. Also a decorator.

    An exception between any two instructions leaves locks locked, e.g. that of `Popen.poll`, or those of the futures that
    `concurrent.futures.wait` looks at. Whoever then waits for them, as the closing of what they belong to does, waits for ever.
    """
    global _holds, _held
    if threading.current_thread() is not threading.main_thread():  # signals are handled in the main thread alone
        yield
        return
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        if _held and not _holds:
            error, _held = _held, None
            raise error


class UninterruptedStack(contextlib.ExitStack):
    """An ExitStack that is closed with interrupts held."""

    @interrupts_held()
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        return super().__exit__(kind, error, trace)


class Preemption:
    """Catches the signals while it is entered; only the main thread may enter it.

    Inside `guarded` work (the loop) SIGTERM and SIGUSR1 only set `requested`, and the loop leaves at its next step boundary.
    Elsewhere (data, warm start, evaluation) nothing would be saved, so they raise Preempted at once. Ctrl-C raises KeyboardInterrupt at
    once everywhere. At once means: as soon as no interrupts are held.
    A second signal ends the process without closing anything, and so does `save_within_s` running out, which tells where it hangs.

    Args:
        save_within_s: seconds from the first signal to the exit, at most.
    """

    def __init__(self, save_within_s: float):
        self._save_within_s = save_within_s
        self._guarded = False
        self._timer: threading.Timer | None = None
        self._previous: dict[int, Any] = {}
        self._error: type[BaseException] = Preempted
        self.requested: str | None = None  # name of the signal

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Work that saves and ends by itself once `requested` is set; leaving it then leaves the process."""
        self._guarded = True
        try:
            yield
        finally:
            self._guarded = False
        if self.requested:
            raise self._error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        global _held
        if self.requested:
            self._leave()
        self.requested = signal.Signals(number).name
        if number == signal.SIGINT:
            self._error = KeyboardInterrupt
        self._timer = threading.Timer(self._save_within_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        if self._guarded and number != signal.SIGINT:
            return
        if not _holds:
            raise self._error
        _held = self._error

    def _give_up(self) -> None:
        """Time is up: whoever reports a hang has something to show."""
        try:
            os.write(2, f"{self.requested}: not ended {self._save_within_s:g} s later; the process leaves and was here:\n".encode())
            faulthandler.dump_traceback(2)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Ends the process, whatever its threads do. The kernel ends graders and workers with it, and frees the run's lock."""
        segments.unlink_owned()
        os._exit(INTERRUPTED if self._error is KeyboardInterrupt else EXIT_STATUS)

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in (*SIGNALS, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer:
            self._timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
