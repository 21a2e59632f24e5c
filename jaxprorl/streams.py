"""The standard streams of a command: they are open, and a stream that cannot be written ends no work.

Launch scripts import this module first and call `protect` before they open any file. So it imports nothing of ours.
"""

import contextlib
import io
import os
import select
import sys
from typing import Any

NAMES = {1: "standard output", 2: "standard error"}
MAX_PIECE_BYTES = select.PIPE_BUF  # a pipe that is ready takes so much without blocking
READ_WITHIN_S = 30.0  # for `protect(READ_WITHIN_S)`: commands that have better things to do than to wait for a reader

lost: dict[str, str] = {}  # name of a stream that is written no more -> why


def protect(read_within_s: float | None = None) -> None:
    """Opens descriptors 0 to 2 where they are closed, and makes standard output and standard error streams that never raise.

    A stream that fails (a pipe whose reader left, a terminal that went away, a full disk) is noted in `lost`; what is written to it
    from then on goes to /dev/null. A character that the encoding lacks is written as an escape, as `repr` would have it.

    Args:
        read_within_s: a stream of which nobody reads for so many seconds counts as lost; None = it is waited for.
    """
    open_closed()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and not isinstance(stream, _Stream)):  # else it is somebody's own
            setattr(sys, name, _protected(stream, number, read_within_s))
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 -- open as long as the process


def say(line: str) -> None:
    """Prints a line for a person, on whatever standard output is; where it cannot be shown, it is lost."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a character that the encoding lacks, or a closed stream
        print(line, flush=True)


def open_closed() -> None:
    """Opens descriptors 0 to 2 on /dev/null where they are closed, and touches no other.

    A file opened later would otherwise get the number of a standard stream, and messages would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if opened == number:
                os.set_inheritable(opened, True)  # child processes need it as much
            else:  # another thread has opened something meanwhile
                os.close(opened)


class _Stream(io.TextIOWrapper):
    """Tells a protected stream from others."""


class _Descriptor(io.FileIO):
    """A descriptor that takes whatever is written; see `protect`."""

    def __init__(self, number: int, read_within_s: float | None):
        super().__init__(number, "wb", closefd=False)
        self._read_within_s = read_within_s

    def write(self, data: Any, /) -> int:
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            try:
                self._wait_for_room()
                done += super().write(view[done : done + MAX_PIECE_BYTES]) or 0  # None: another process took the room
            except OSError as error:
                self._lose(error)
                return len(view)
        return done

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        if not poll.poll(None if self._read_within_s is None else 1000 * self._read_within_s):
            raise TimeoutError(f"nobody has read it for {self._read_within_s:g} s")

    def _lose(self, error: OSError) -> None:
        lost.setdefault(NAMES.get(self.fileno(), f"descriptor {self.fileno()}"), error.strerror or str(error))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def _protected(stream: io.TextIOWrapper | None, number: int, read_within_s: float | None) -> _Stream:
    """A stream as `stream` is, but on a descriptor that never raises. None: Python found the descriptor closed."""
    raw = _Descriptor(number, read_within_s)
    if stream is None:
        return _Stream(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    stream.flush()
    # As Python does for -u: text goes to the descriptor at once, without a buffer between.
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    flushes: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    return _Stream(buffer, encoding=stream.encoding, errors="backslashreplace", **flushes)
