"""Signals while `train` is called from Python: the process, its signal handlers and its variables are the caller's.

Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP are only noted. The loop saves at its next step boundary; all other work leaves at its next
`safe_point`. What is open is then closed in order, and an exception tells the caller. Nothing is raised between any two instructions: that
would leave locks of libraries locked (`preemption` tells more, which ends a process that is a script's own).
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

from jaxprorl.preemption import REPEATED_WITHIN_S, SIGNALS, Preempted

_ACTION_BYTES = 512  # more than a `struct sigaction` takes anywhere


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came. What there was to save is saved, everything is closed, and the same call goes on from there."""


class Interrupts:
    """Notes the signals while it is entered; a context manager.

    In another thread than the main one Python lets nobody listen, so none are noted there. Signals that the caller ignores stay ignored.
    A handler of the caller's own is called once its signal was obeyed and everything is closed.

    Args:
        what_comes_next: a few words on what the same call does after an interruption.

    Attributes:
        requested: name of the signal that guarded work should end for; None before it.

    Raises:
        Interrupted: on leaving, after Ctrl-C, unless another error is on its way.
        Preempted: likewise, after SIGTERM, SIGUSR1 or SIGHUP.
    """

    def __init__(self, what_comes_next: Callable[[], str]):
        self._what_comes_next = what_comes_next
        self._guarded = self._again = self._told = False
        self._heard: signal.Signals | None = None
        self._heard_s = 0.0
        self._previous: dict[int, Any] = {}  # handlers, as Python knows them
        self._actions: dict[int, Any] = {}  # and as the kernel does: those of C code too, as of `faulthandler`

    @property
    def requested(self) -> str | None:
        """Name of the signal that guarded work should end for."""
        return self._heard.name if self._heard else None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Work that saves and ends by itself once `requested` is set: only a second signal makes it leave at a safe point."""
        self._guarded = True
        try:
            yield
        finally:
            self._guarded = False
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Raises if a signal came that the present work is to be left for."""
        if self._heard is None:
            return
        if self._guarded and not self._again:
            if not self._told:
                self._told = True
                with suppress(OSError, ValueError):  # nobody has to read it
                    again = "again" if self._heard == signal.SIGINT else "a second signal"
                    print(f"{self._heard.name}: the step is finished and saved first; {again} leaves without that", file=sys.stderr)
            return
        raise Interrupted if self._heard == signal.SIGINT else Preempted

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler; Python calls it in the main thread, wherever that is."""
        now_s = time.monotonic()
        if self._heard is None:
            self._heard, self._heard_s = signal.Signals(number), now_s
        elif number == signal.SIGINT or now_s >= self._heard_s + REPEATED_WITHIN_S:
            self._again = True

    def __enter__(self) -> Self:
        global _current
        if threading.current_thread() is threading.main_thread():
            _current = self
            for number in (*SIGNALS, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._actions[number] = action = ctypes.create_string_buffer(_ACTION_BYTES)
                    ctypes.CDLL(None).sigaction(int(number), None, action)
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.put_back()
        if self._heard is None:
            return
        handler = self._previous[self._heard]
        if callable(handler) and handler is not signal.default_int_handler:
            handler(int(self._heard), None)
        if self._heard == signal.SIGINT and (error is None or isinstance(error, Interrupted)):
            raise Interrupted(f"interrupted: {self._what_comes_next()}") from None  # known only now that the last save has ended
        if error is None:
            raise Preempted

    def put_back(self) -> None:
        """Gives the caller's handlers back."""
        global _current
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            ctypes.CDLL(None).sigaction(int(number), self._actions[number], None)
        if _current is self:
            _current = None


_current: Interrupts | None = None  # the one that listens, in the main thread


def safe_point() -> None:
    """A moment at which work outside the loop may be left: no lock is held, and whatever is open is closed on the way out.

    Raises:
        Interrupted, Preempted: the caller's process got such a signal. A script's own process has ended by itself.
    """
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.leave_if_asked()


def _forget() -> None:
    """In a forked child, whose signals are its own."""
    if _current is not None:
        _current.put_back()


os.register_at_fork(after_in_child=_forget)
