"""Commit records: which checkpoints exist, what is in their files, and which of them are kept. No JAX here.

`checkpoints/step_12.commit.json` is written last, after every file of `checkpoints/step_12/` is in place, and removed first. So a
checkpoint exists if and only if its record does; whatever else lies in the folder is debris of a crash. The record holds a digest
of every file: a bit that flips later is found when the checkpoint is read, not when the model turns out strange.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxprorl.errors import CheckpointError
from jaxprorl.files import write_atomically
from jaxprorl.monitoring.jsonl import sync_directory

_RECORD = re.compile(r"step_(\d+)\.commit\.json")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Record:
    """One commit record.

    Attributes:
        step: RL steps done.
        schema: of the checkpoint's content.
        files: path below the checkpoint's folder -> {"sha256", "bytes"}.
        validation_solve_rate: of the validation that belongs to this step, None without one.
        reset_boundary: a reset comes right after this checkpoint.
        validation_ungraded: items of that validation which could not be graded, and are not in its rate.
    """

    step: int
    schema: int
    files: Mapping[str, Mapping[str, Any]]
    validation_solve_rate: float | None
    reset_boundary: bool
    validation_ungraded: int = 0  # records of before the count lack it

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def step_folder(folder: Path, step: int) -> Path:
    """Where the files of a checkpoint are."""
    return folder / f"step_{step}"


def record_path(folder: Path, step: int) -> Path:
    """Where its commit record is."""
    return folder / f"step_{step}.commit.json"


def committed_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints, ascending."""
    found = (_RECORD.fullmatch(path.name) for path in folder.iterdir()) if os.path.isdir(folder) else ()
    return sorted(int(match[1]) for match in found if match)


def write_record(
    folder: Path, step: int, schema: int, validation_solve_rate: float | None, reset_boundary: bool, validation_ungraded: int = 0
) -> Record:
    """Digests the checkpoint's files, makes them and their names durable, and commits them."""
    root = step_folder(folder, step)
    files = {name: _describe(root / name, sync=True) for name in _file_names(root)}
    for directory in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        sync_directory(directory)
    record = Record(step, schema, files, validation_solve_rate, reset_boundary, validation_ungraded)
    content = {"step": step, "schema": schema, "files": files}
    content |= {
        "validation_solve_rate": validation_solve_rate,
        "validation_ungraded": validation_ungraded,
        "reset_boundary": reset_boundary,
    }
    path = record_path(folder, step)
    write_atomically(path, json.dumps(content | {"self": _self_digest(content)}, indent=1, sort_keys=True))
    sync_directory(folder)
    return record


def read_record(folder: Path, step: int) -> Record:
    """The commit record of a step.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = record_path(folder, step)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        digest = content.pop("self")
        if digest != _self_digest(content):
            raise ValueError("its own digest does not match")
        return Record(**content)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no committed checkpoint of step {step}") from None
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def readable_records(folder: Path) -> list[Record]:
    """The records of all committed checkpoints, ascending, without those that are damaged."""
    found = []
    for step in committed_steps(folder):
        with contextlib.suppress(CheckpointError):
            found.append(read_record(folder, step))
    return found


def damage(folder: Path, step: int) -> str | None:
    """What is wrong with the files of a committed checkpoint; None if every bit is as it was written."""
    try:
        record = read_record(folder, step)
    except CheckpointError as error:
        return str(error)
    root = step_folder(folder, step)
    for name, expected in record.files.items():
        path = root / name
        if not path.is_file():
            return f"{path} is missing"
        try:
            actual = _describe(path, sync=False)
        except OSError as error:
            return f"{path} cannot be read: {error}"
        if actual["bytes"] != expected["bytes"]:
            return f"{path} has {actual['bytes']} bytes, {expected['bytes']} were written"
        if actual["sha256"] != expected["sha256"]:
            return f"{path} has changed since it was written (sha256 differs)"
    extra = sorted(set(_file_names(root)) - set(record.files))
    return f"{root / extra[0]} does not belong to the checkpoint" if extra else None


def to_keep(records: Iterable[Record], newest: int, every_steps: int, best: int, reset_boundaries: bool) -> set[int]:
    """Steps that stay.

    Args:
        newest: the last so many; at least 1.
        every_steps: and all whose step it divides; 0 = none.
        best: and so many with the highest validation solve rate (the later one of equals).
        reset_boundaries: and all right before a reset.
    """
    ordered = sorted(records, key=lambda record: record.step)
    rated = [(r.validation_solve_rate, r.step) for r in ordered if r.validation_solve_rate is not None]
    kept = {record.step for record in ordered[-newest:]}
    kept |= {record.step for record in ordered if every_steps and record.step % every_steps == 0}
    kept |= {step for _, step in sorted(rated)[-best:]} if best else set()
    return kept | {record.step for record in ordered if reset_boundaries and record.reset_boundary}


def remove(folder: Path, step: int) -> None:
    """Deletes a checkpoint, its record first."""
    record_path(folder, step).unlink(missing_ok=True)
    sync_directory(folder)
    shutil.rmtree(step_folder(folder, step), ignore_errors=True)


def remove_debris(folder: Path, committed: Collection[int]) -> list[str]:
    """Deletes what a crash left in the folder; returns the names."""
    wanted = {path.name for step in committed for path in (step_folder(folder, step), record_path(folder, step))}
    debris = sorted(path.name for path in folder.iterdir() if path.name not in wanted) if folder.is_dir() else []
    for name in debris:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return debris


def _file_names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()) if root.is_dir() else []


def _describe(path: Path, sync: bool) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}


def _self_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
