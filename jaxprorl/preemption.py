"""SIGTERM and SIGUSR1, as clusters send them before they take a machine away: finish the step, save, leave."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the work is saved, start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """The run stops on request, saved. An exit with EXIT_STATUS."""

    def __init__(self) -> None:
        super().__init__(EXIT_STATUS)


class Preemption:
    """Catches the signals while it is entered; only the main thread may enter it.

    Inside `guarded` work (the loop) the first signal only sets `requested`, and the loop leaves at its next step boundary.
    Elsewhere (data, warm start, evaluation) nothing would be saved, so the first signal ends the process at once.
    A second signal ends it at once everywhere, and so does `save_within_s` running out.

    Args:
        save_within_s: seconds from the first signal to the exit, at most.
    """

    def __init__(self, save_within_s: float):
        self._save_within_s = save_within_s
        self._guarded = False
        self._timer: threading.Timer | None = None
        self._previous: dict[int, Any] = {}
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
            raise Preempted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_STATUS)
        self.requested = signal.Signals(number).name
        self._timer = threading.Timer(self._save_within_s, os._exit, [EXIT_STATUS])
        self._timer.daemon = True
        self._timer.start()
        if not self._guarded:
            raise Preempted

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer:
            self._timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
