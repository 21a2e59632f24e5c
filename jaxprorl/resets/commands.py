"""A person's command to reset or to begin the next stage, as a file in the run's folder.

`launch/reset.py` puts the command there; the loop takes it at a step boundary. What was taken is in `commands.jsonl` with the step before
which it took effect, on the disk before it is obeyed and never cut back: a run that goes on from an earlier checkpoint obeys it there
again.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxprorl import storage
from jaxprorl.errors import ConfigError, DataError
from jaxprorl.files import write_atomically
from jaxprorl.monitoring import jsonl
from jaxprorl.run_folder import RunFolder, read_config

WAITING = "command.json"
TAKEN = "commands.jsonl"
KINDS = ("reset", "next_stage")


@dataclass(frozen=True)
class Command:
    """What a person asks for: one of `KINDS`, and why."""

    kind: str
    reason: str


def request(run: Path, command: Command) -> Path:
    """Leaves the command for the run; returns the file. It is there whole or not at all.

    Raises:
        ConfigError: no run there, it is over, it takes no commands (or has no stages), or one is waiting already.
        DataError: its config.json is torn, or of another version.
        StorageError: nothing can be written there.
    """
    config = read_config(run)
    if not config.resets.manual:
        raise ConfigError(f"--run {run}: it takes no commands (resets.manual = False)")
    if command.kind == "next_stage" and not config.stages:
        raise ConfigError(f"--run {run}: it has no stages (stages is empty)")
    if is_finished(run):
        raise ConfigError(
            f"--run {run}: the run is over (summary.json), nothing would take the command; start it with more steps first, and give the "
            "command once a step of those is done"
        )
    path = run / WAITING
    text = json.dumps({"id": uuid.uuid4().hex, "kind": command.kind, "reason": command.reason})
    with storage.writing(path, len(text), "then ask again"):
        try:
            write_atomically(path, text, overwrite=False)
        except FileExistsError:
            raise ConfigError(f"--run {run}: a command is waiting already; the run takes it at its next step ({path})") from None
    return path


def is_finished(run: Path) -> bool:
    """True for a run that has its summary, and no step after it: an extended run keeps the old one until it ends again."""
    summary, metrics = RunFolder(run).summary, RunFolder(run).metrics
    if not summary.is_file():
        return False
    try:
        steps = int(json.loads(summary.read_text(encoding="utf-8"))["steps"])
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{summary}: cannot be read as the summary of a run") from None
    return not metrics.is_file() or len(jsonl.read(metrics)) <= steps


def take_command(run: Path, step: int, warn: Callable[[str], None]) -> Command | None:
    """The command that takes effect right before `step`: taken there before, or waiting now. None: there is none.

    Args:
        warn: told of a file that is no command, which is removed.
    """
    log, path = run / TAKEN, run / WAITING
    taken = jsonl.read(log) if log.is_file() else []
    for row in taken:
        if row["step"] == step:  # what is waiting now waits for the next step
            return Command(str(row["kind"]), str(row["reason"]))
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        identifier, command = str(content["id"]), Command(KINDS[KINDS.index(content["kind"])], str(content["reason"]))
    except (ValueError, KeyError, TypeError):
        warn(f"WARNING: {path} is not a command of launch/reset.py; it is removed")
        path.unlink()
        return None
    fresh = all(row["id"] != identifier for row in taken)
    if fresh:
        with jsonl.JsonLog(log) as file:
            file.append_row({"step": step, "id": identifier, "kind": command.kind, "reason": command.reason})
            file.sync()
        jsonl.sync_directory(run)
    path.unlink()  # a kill before this leaves a command that is in the log already
    return command if fresh else None
