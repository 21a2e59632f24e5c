"""Locks that end with their process: one process per run folder, and turns for work that should be done once."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxprorl.errors import RunLockedError
from jaxprorl.files import try_lock
from jaxprorl.interrupts import safe_point

LOCK_NAME = ".lock"
_LOOK_AGAIN_S = 0.2


class HeldError(Exception):
    """Another living process holds the lock; the text says which one."""


class FileLock:
    """Holds a file locked. A context manager.

    The kernel lock on the file goes with its process, however that ends; the owner written inside is for people, and shows
    whether the last owner left in order.

    Args:
        path: of the file, which is made if needed and stays.

    Attributes:
        stale_owner: who died without releasing the lock, None if nobody did.

    Raises:
        HeldError: another living process holds it.
        OSError: the file cannot be opened for writing, or its file system has no locks.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            held = try_lock(self._file)
            if held is None:
                raise OSError(f"{path}: this file system has no locks")
            if not held:
                raise HeldError(_name(self._owner() or self._owner_soon()))
            self.stale_owner = self._owner()
            os.ftruncate(self._file, 0)
            with contextlib.suppress(OSError):  # on a full disk the lock counts all the same
                os.pwrite(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except BaseException:
            os.close(self._file)
            raise

    def _owner_soon(self) -> dict[str, Any] | None:
        """The owner, where it took the lock just now and is about to write its name."""
        time.sleep(_LOOK_AGAIN_S)
        return self._owner()

    def _owner(self) -> dict[str, Any] | None:
        try:
            owner = json.loads(os.pread(self._file, 4096, 0))
        except ValueError:  # empty (released), or torn by a crash
            return None
        return owner if isinstance(owner, dict) and {"pid", "host"} <= owner.keys() else None

    def release(self) -> None:
        """Lets the file go; it stays, empty (removing it would race with whoever opens it now)."""
        with contextlib.suppress(OSError):  # a disk that is gone must not hide why the run ends; the kernel's lock goes with the file
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class RunLock(FileLock):
    """Holds a run's folder: a second process is refused, the lock of a dead one is taken over.

    Args:
        folder: of the run; must exist.

    Raises:
        RunLockedError: another living process holds the folder; names its process id and host.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            super().__init__(folder / LOCK_NAME)
        except HeldError as held:
            raise RunLockedError(f"{folder} is in use by {held}; wait for it, stop it, or choose another --config.run_name") from None

    @property
    def takeover(self) -> str:
        """What to tell of the owner who died; empty if nobody did."""
        if not self.stale_owner:
            return ""
        return f"{self._folder}: {_name(self.stale_owner)} was killed or interrupted here; its lock is taken over"


@contextlib.contextmanager
def turn(path: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """At most one process at a time is inside this block with the same `path`; the others wait for as long as it takes.

    Where the file cannot be locked nobody waits: the work inside must do no harm if two processes do it.

    Args:
        tell: given the name of the process that is waited for, once for each.

    Raises:
        Interrupted, Preempted: of `safe_point`, while it waits.
    """
    told = None
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(FileLock(path))
                break
            except HeldError as held:
                if str(held) != told:
                    told = str(held)
                    tell(told)
                safe_point()
                time.sleep(_LOOK_AGAIN_S)
            except OSError:
                break
        yield


def _name(owner: dict[str, Any] | None) -> str:
    return f"process {owner['pid']} on {owner['host']}" if owner else "another process"
