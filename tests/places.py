"""Places that cannot be written, or are full, for root too: real file systems where this machine lets tests mount them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NO_MOUNT = "nothing can be mounted here"


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own in `folder`. Skips the test where none can be mounted."""
    folder.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Nothing in `folder` can be written: by permissions, or, for root, by a mount. Skips the test where neither can be had."""
    if os.geteuid():
        kept = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")] if path.is_dir() and not path.is_symlink()}
        for path in kept:
            path.chmod(0o555)
        try:
            yield folder
        finally:
            for path, mode in kept.items():
                path.chmod(mode)
        return
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,ro,bind", str(folder))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"{NO_MOUNT}: {error}")
    if done.returncode:
        pytest.skip(f"{NO_MOUNT}: {done.stderr.strip()}")
