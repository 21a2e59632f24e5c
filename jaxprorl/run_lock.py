"""One process per run folder: a second one is refused, the lock of a dead one is taken over."""

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxprorl.errors import RunLockedError

LOCK_NAME = ".lock"


class RunLock:
    """Holds a run's folder. A context manager.

    The kernel lock on the file goes with its process, however that ends; the owner written inside is for people, and shows
    whether the last owner left in order.

    Args:
        folder: of the run; must exist.

    Attributes:
        stale_owner: who died without releasing the lock, None if nobody did.

    Raises:
        RunLockedError: another living process holds the folder; names its process id, host and command.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._owner()
            os.close(self._file)
            who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            raise RunLockedError(f"{folder} is in use by {who}; wait for it, stop it, or choose another --config.run_name") from None
        self.stale_owner = self._owner()
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)

    @property
    def takeover(self) -> str:
        """What to tell of the owner who died; empty if nobody did."""
        if not self.stale_owner:
            return ""
        owner = f"process {self.stale_owner['pid']} on {self.stale_owner['host']}"
        return f"{self._folder}: {owner} was killed or interrupted here; its lock is taken over"

    def _owner(self) -> dict[str, Any] | None:
        try:
            owner = json.loads(os.pread(self._file, 4096, 0))
        except ValueError:  # empty (released), or torn by a crash
            return None
        return owner if isinstance(owner, dict) and {"pid", "host"} <= owner.keys() else None

    def release(self) -> None:
        """Lets the folder go; the file stays, empty (removing it would race with whoever opens it now)."""
        with contextlib.suppress(OSError):  # a disk that is gone must not hide why the run ends; the kernel's lock goes with the file
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
