"""Append-only JSON lines: the mechanics that `metrics.jsonl` and `events.jsonl` share.

A line is in the file whole or not at all as far as readers are concerned: what follows the last newline is a torn write and
is dropped. An offset (bytes, just after a newline) stored in a checkpoint is enough to go back to that moment.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxprorl import storage


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON types; anything else json does not know is an error."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def encode(value: Any) -> str:
    """Compact JSON; floats by repr, so that reading gives back the same bits.

    Raises:
        ValueError: NaN or infinity anywhere inside.
        TypeError: not a JSON type (NumPy scalars and arrays are).
    """
    return json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False, separators=(", ", ": "))


def _complete_bytes(path: Path) -> int:
    """Bytes up to and including the last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


class JsonLog:
    """A JSON-lines file open for appending. Each line reaches the operating system before `append_row` returns.

    So a killed process loses nothing; only `sync` also survives a power cut. A torn last line found at opening is cut off,
    because the next line would otherwise be glued to it.

    Raises:
        StorageError: from every method; the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with storage.writing(self.path, 0):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._offset = _complete_bytes(self.path)
            self._file.truncate(self._offset)

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Writes one line. A write that fails half-way (disk full) is taken back before the error is raised."""
        data = memoryview((encode(row) + "\n").encode())
        written = 0
        with storage.writing(self.path, len(data)):
            try:
                while written < len(data):
                    written += self._file.write(data[written:]) or 0
            except OSError:
                with contextlib.suppress(OSError):  # else the torn line is cut off at the next opening
                    self._file.truncate(self._offset)
                raise
        self._offset += written

    def offset(self) -> int:
        """Bytes in the file, all of them complete lines: what a checkpoint stores."""
        return self._offset

    def sync(self) -> None:
        """Forces the lines to the disk; call it before storing `offset()`."""
        with storage.writing(self.path, 0):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; appending afterwards is an error."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def truncate(path: str | os.PathLike[str], offset: int) -> None:
    """Cuts the file back to `offset` bytes, as stored by a checkpoint. A file that never existed is fine at offset 0.

    Raises:
        ValueError: the offset lies beyond the file or inside a line; the file is left as it was.
    """
    path = Path(path)
    size = path.stat().st_size if path.exists() else 0
    if not 0 <= offset <= size:
        raise ValueError(f"{path}: offset {offset} is outside the file ({size} bytes): the log and the checkpoint are not of the same run")
    if not path.exists():
        return
    with path.open("r+b") as file:
        if offset:
            file.seek(offset - 1)
            if file.read(1) != b"\n":
                raise ValueError(f"{path}: offset {offset} lies inside a line: the log and the checkpoint are not of the same run")
        file.truncate(offset)
        os.fsync(file.fileno())


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All complete lines, in order; a torn last line is dropped.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a complete line is not a JSON object (names file and line).
    """
    path = Path(path)
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if not line.startswith(b"{"):
            raise ValueError(f"{path}:{number}: not a JSON object")
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
    return rows


def sync_directory(path: Path) -> None:
    """Forces the names in a folder to the disk: a file made or removed there stays so after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
