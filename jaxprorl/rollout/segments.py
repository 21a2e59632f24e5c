"""Shared-memory segments of a run: reserved in full, named after the run, owned by one process, gone when it is.

A segment is a file in /dev/shm (or in the run's folder where /dev/shm is too small) that both sides map by hand.
`multiprocessing.shared_memory` will not do: on Python 3.11 its resource tracker unlinks what a process merely attached to.

Name: `jaxprorl-RUN-ROLE-NUMBER-PID-SERIAL`, RUN = digest of the run's folder. The owner holds a kernel lock on the file as long
as it lives, so `reap` can tell what a dead process left from what a living one uses, also across process id namespaces
and reuse of process ids. Linux only. Standard library only: trainer and worker share this module.
"""

import fcntl
import hashlib
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxprorl.errors import SharedMemoryError
from jaxprorl.units import size_text

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "jaxprorl"

_serial = itertools.count()
_owned: set[Path] = set()  # names that this process has made and not removed
_naming = threading.Lock()  # for making one and noting it here


@dataclass
class Segment:
    """A mapped segment. A context manager; leaving it unmaps, and removes the name if this process made it.

    Attributes:
        path: what the other process passes to `attach`.
        buffer: its bytes.
    """

    path: Path
    buffer: memoryview
    _map: mmap.mmap = field(repr=False)
    _owned_file: int | None = field(repr=False)  # holds the lock; None where another process is the owner

    def unlink(self) -> None:
        """Removes the name; mappings stay. From the moment the other side has attached, an owner may: then no kill leaves anything."""
        if self._owned_file is not None:
            self.path.unlink(missing_ok=True)
            _owned.discard(self.path)
            os.close(self._owned_file)
            self._owned_file = None

    def close(self) -> None:
        """Unmaps and, if owned, unlinks. Arrays that still look into the segment stay valid; the memory goes with the last of them."""
        self.unlink()
        with suppress(BufferError):
            self.buffer.release()
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still use on the file system of `folder`; 0 if there is no such folder."""
    try:
        status = os.statvfs(folder)
    except FileNotFoundError:
        return 0
    return status.f_bavail * status.f_frsize


def choose_folder(run_folder: Path, total_bytes: int, free_bytes: Callable[[Path], int] = free_bytes) -> tuple[Path, str]:
    """Where all segments of a run go: /dev/shm, or the run's own folder if that is too small.

    Returns:
        The folder, and a note for the log: empty for /dev/shm, else why not and what it costs.

    Raises:
        SharedMemoryError: neither has `total_bytes` free.
    """
    shared, fallback = free_bytes(SHARED_MEMORY), run_folder / "tmp"
    if shared >= total_bytes:
        return SHARED_MEMORY, ""
    fallback.mkdir(parents=True, exist_ok=True)
    disk = free_bytes(fallback)
    lack = f"{size_text(total_bytes)} of shared memory are needed, {SHARED_MEMORY} has {size_text(shared)} free"
    if disk < total_bytes:
        raise SharedMemoryError(
            f"{lack} and {fallback} {size_text(disk)}. Enlarge {SHARED_MEMORY} (containers: --shm-size, or a memory-backed volume) or "
            "shrink the rings"
        )
    return fallback, f"{lack}; files in {fallback} take its place, which is slower and writes to disk. Containers: --shm-size enlarges it"


def create(folder: Path, run_folder: Path, role: str, number: int, size_bytes: int) -> Segment:
    """A new segment of zeros, owned by this process, with every page reserved: a later write cannot fail (SIGBUS) for want of memory.

    Args:
        folder: from `choose_folder`.
        role: what it is for, `number`: which of those; both are part of the name.

    Raises:
        SharedMemoryError: the memory cannot be reserved.
    """
    path, file = _new_file(folder, f"{run_prefix(run_folder)}-{role}-{number}-{os.getpid()}")
    try:
        os.posix_fallocate(file, 0, size_bytes)
        mapped = mmap.mmap(file, size_bytes)
    except BaseException as error:  # also KeyboardInterrupt: reserving gigabytes takes seconds, and the file would outlive this process
        path.unlink()
        _owned.discard(path)
        os.close(file)
        if not isinstance(error, OSError):
            raise
        raise SharedMemoryError(
            f"{path}: {size_text(size_bytes)} cannot be reserved ({error.strerror}); {size_text(free_bytes(folder))} are free in {folder}"
        ) from error
    return Segment(path, memoryview(mapped), mapped, file)


def attach(path: Path) -> Segment:
    """Maps a segment that another process owns.

    Raises:
        SharedMemoryError: it is not there (any more).
    """
    try:
        file = os.open(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(file, 0)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:  # ValueError: empty file
        raise SharedMemoryError(f"{path} cannot be mapped ({error}); its owner is gone, or has not made it yet") from error
    return Segment(path, memoryview(mapped), mapped, None)


def reap(run_folder: Path) -> list[Path]:
    """Removes the segments that dead processes of this run left behind; those of living ones stay. Returns what was removed."""
    removed = []
    for folder in (SHARED_MEMORY, run_folder / "tmp"):
        for path in sorted(folder.glob(f"{run_prefix(run_folder)}-*")):
            with suppress(FileNotFoundError, PermissionError, BlockingIOError):  # gone by now; another user's; its owner lives
                file = os.open(path, os.O_RDWR)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed.append(path)
                finally:
                    os.close(file)
    return removed


def _new_file(folder: Path, stem: str) -> tuple[Path, int]:
    """An empty file that nobody else has, locked."""
    while True:
        path = folder / f"{stem}-{next(_serial)}"
        try:
            with _naming:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                _owned.add(path)
        except FileExistsError:  # left by a dead process with this id, or one of another id namespace
            continue
        try:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_nlink:
                    return path, file
        except BaseException:  # also KeyboardInterrupt: the file would outlive this process
            path.unlink(missing_ok=True)
            _owned.discard(path)
            os.close(file)
            raise
        _owned.discard(path)
        os.close(file)  # someone reaped it before it was locked


def unlink_owned() -> None:
    """Removes the names that this process has made and lets it make no more: for one that ends now, without closing them."""
    _naming.acquire(timeout=1.0)
    for path in tuple(_owned):
        with suppress(OSError):
            path.unlink()


def run_prefix(run_folder: Path) -> str:
    """How the names of all segments of a run begin."""
    return f"{PREFIX}-{hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:12]}"
