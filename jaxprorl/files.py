"""Files and folders that appear whole or not at all, in places that other processes may use at the same time.

What is being written has a name of its own: that of the target, the host, the process and a random number, and `.writing` at the end.
Its writer holds a kernel lock on it, which ends with the process however that ends. So two writers of one target do not meet before
the rename, and what a killed writer left can be told from what a living one works at.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

HOST = re.sub(r"[^\w.-]", "_", socket.gethostname())[:32] or "host"
_SCRATCH = re.compile(r".*-\d+-[0-9a-f]{8}\.writing", re.DOTALL)
_OF_THIS_HOST = re.compile(rf".*\.{re.escape(HOST)}-\d+-[0-9a-f]{{8}}\.writing", re.DOTALL)
_CLAIM = ".being-filled"  # the folder that says that a process is moving its files into the folder around it
_NAME_LETTERS = 40  # of the target's name in a scratch name: file systems allow 255 bytes in all


class TakenError(OSError):
    """The target of a new folder holds something, or came to hold something while its content was written."""


def try_lock(descriptor: int) -> bool | None:
    """Takes the kernel's lock on an open file or folder: True = held from now on, False = another process holds it.

    None: the file system has no such locks, so nothing is known of other processes.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def write_atomically(path: Path, content: str | bytes, overwrite: bool = True) -> None:
    """Writes a file whole or not at all, and to the disk before its name. Text is written as UTF-8.

    Raises:
        FileExistsError: there is one, and `overwrite` is False.
    """
    with new_file(path, overwrite) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path: Path, overwrite: bool = True) -> Iterator[BinaryIO]:
    """A file to write into, which gets its name when the block ends well. As `write_atomically` otherwise."""
    scratch, descriptor = _new_scratch(path, path.parent, is_folder=False)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            if overwrite:
                scratch.replace(path)
            else:
                os.link(scratch, path)  # fails where a rename would overwrite
    finally:
        scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(target: Path, *, replace: bool = False, last: str = "") -> Iterator[Path]:
    """A scratch folder, which becomes `target` when the block ends well; otherwise it is deleted.

    It lies beside the target and is renamed. A target that is there already, empty, stays (it may be a mount point): the scratch
    folder lies inside, and its content is moved up.

    Args:
        replace: whatever the target holds is deleted first. Only for a place that this process alone writes.
        last: name of the file without which the folder is of no use; it is moved up after all others.

    Raises:
        TakenError: the target holds something at the beginning or at the end of the block. Nothing of it is touched.
    """
    target = target.resolve()  # behind a link, where the space is
    if not replace:
        _refuse_taken(target, contents(target))
    inside = not replace and target.is_dir()
    place = target if inside else target.parent
    place.mkdir(parents=True, exist_ok=True)
    sweep(place)
    scratch, descriptor = _new_scratch(target, place, is_folder=True)
    try:
        yield scratch
        if inside:
            _move_up(scratch, target, last)
        else:
            if replace:
                shutil.rmtree(target, ignore_errors=True)
            _rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(descriptor)


def contents(folder: Path) -> list[str]:
    """Names of what a folder holds, sorted, without what processes are writing; its own name if it is no folder; none if it is missing."""
    if not os.path.isdir(folder):  # Path's raises for a name that is too long
        return [folder.name] if os.path.lexists(folder) else []
    # A new disk's root holds lost+found.
    ignored = {"lost+found"} if os.path.ismount(folder) else set()
    return sorted(name for name in os.listdir(folder) if name not in ignored and not _SCRATCH.fullmatch(name))


def scratch_in(folder: Path) -> list[Path]:
    """Everything in a folder that is being written, or was when its writer was killed."""
    return sorted(path for path in folder.iterdir() if _SCRATCH.fullmatch(path.name)) if folder.is_dir() else []


def sweep(folder: Path) -> list[str]:
    """Deletes what killed processes of this host left half written in a folder; returns the names.

    What a living process works at stays. So does everything of other hosts, whose locks may not be seen here, and all where the file
    system has no locks.
    """
    removed: list[str] = []
    with contextlib.suppress(OSError):  # a folder that may not be listed is not in the way
        for path in scratch_in(folder):
            if _OF_THIS_HOST.fullmatch(path.name) and _remove_dead(path):
                removed.append(path.name)
    return removed


def _remove_dead(path: Path) -> bool:
    with contextlib.suppress(OSError):  # gone by now; another user's; a folder on a file system that locks files only
        descriptor = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NOFOLLOW)
        try:
            if try_lock(descriptor) and _is_at(path, descriptor):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                return True
        finally:
            os.close(descriptor)
    return False


def _new_scratch(target: Path, place: Path, is_folder: bool) -> tuple[Path, int]:
    """A new file or folder in `place`, and its descriptor, locked."""
    while True:
        path = place / f"{target.name[:_NAME_LETTERS]}.{HOST}-{os.getpid()}-{secrets.token_hex(4)}.writing"
        if is_folder:
            path.mkdir()
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:  # another process swept it away
                continue
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if try_lock(descriptor) is not False and _is_at(path, descriptor):
            return path, descriptor
        os.close(descriptor)  # swept away before it was locked


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _rename(scratch: Path, target: Path) -> None:
    """Gives a scratch folder its name, which nobody else may have by now: the kernel replaces an empty folder and refuses another."""
    try:
        scratch.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            _refuse_taken(target, contents(target) or os.listdir(target))
        raise


def _move_up(scratch: Path, target: Path, last: str) -> None:
    """Moves what a scratch folder holds into the folder around it, if that is still empty. One process at a time does so."""
    claim = target / _CLAIM
    try:
        claim.mkdir()
    except FileExistsError:
        raise TakenError(f"another process fills it at this moment, or was killed while it did ({claim} is there)") from None
    moved: list[str] = []
    try:
        _refuse_taken(target, [name for name in contents(target) if name != _CLAIM])
        for name in sorted(os.listdir(scratch), key=lambda name: (name == last, name)):
            (scratch / name).rename(target / name)
            moved.append(name)
    except BaseException:
        for name in moved:
            (target / name).rename(scratch / name)
        raise
    finally:
        claim.rmdir()


def _refuse_taken(target: Path, names: list[str]) -> None:
    if not names:
        return
    if not target.is_dir():
        raise TakenError(f"{target} is there already and no folder")
    shown = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    raise TakenError(f"it holds {shown}, which somebody else put there; nothing of it was touched")
