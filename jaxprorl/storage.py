"""Files that a command cannot do without. When one cannot be written, one line says which, what it needs, what is free, and what to do."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxprorl.errors import StorageError
from jaxprorl.units import size_text

GO_ON = "then give the same command again: it goes on from the last checkpoint, or starts over where there is none"
REMEDIES = {  # of what a place suffers from that was right until then
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room within the quota, or raise it",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "allow writing there",
    errno.EPERM: "allow writing there",
    errno.EIO: "see to the disk",
    errno.ESTALE: "see to the network file system",
}


def free_bytes(path: Path) -> int | None:
    """Free on the disk that holds `path`, or will hold it; None where the system does not tell."""
    try:
        return shutil.disk_usage(_existing(path)).free
    except OSError:
        return None


def problem(path: Path, needed_bytes: int, reason: OSError | str, then: str = GO_ON) -> str:
    """The line that an error shows. `reason`: what the system said."""
    free = free_bytes(path)
    said = reason if isinstance(reason, str) else reason.strerror or str(reason) or type(reason).__name__
    remedy = REMEDIES.get(reason.errno or 0, "see to it") if isinstance(reason, OSError) else "see to it"
    needed, free_said = size_text(needed_bytes), "unknown" if free is None else size_text(free)
    return f"{path} cannot be written ({' '.join(said.split())}): {needed} needed, {free_said} free there; {remedy}, {then}"


@contextmanager
def writing(path: Path, needed_bytes: int, then: str = GO_ON) -> Iterator[None]:
    """Around the writing of a file that a command cannot do without.

    Args:
        path: what is written.
        needed_bytes: how much of it.
        then: what to do once the place can be written.

    Raises:
        StorageError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(problem(path, needed_bytes, error, then)) from error


def unwritable(folder: Path) -> str:
    """Why nothing can be written in a folder, which need not exist yet; "" if something can be, as far as permissions tell."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(folder)  # raises for a name that is too long
        existing = _existing(folder)
        if not existing.is_dir():
            return f"{existing} is no folder"
        if os.access(existing, os.W_OK | os.X_OK):
            return ""
        read_only = bool(os.statvfs(existing).f_flag & os.ST_RDONLY)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a NUL character
        return str(error)
    return f"{existing} is {'on a read-only file system' if read_only else 'not writable for this user'}"


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path.resolve()
