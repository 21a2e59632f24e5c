"""A person's command to reset, as a file in the run's folder.

`launch/reset.py` puts the command there; the loop takes it at a step boundary. What was taken is in `commands.jsonl` with the step before
which it took effect, on the disk before the reset is done and never cut back: a run that goes on from an earlier checkpoint resets there
again.
"""

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from jaxprorl.errors import ConfigError
from jaxprorl.monitoring import jsonl

WAITING = "reset_command.json"
TAKEN = "commands.jsonl"


def request_reset(run: Path, reason: str) -> Path:
    """Leaves the command for the run; returns the file. It is there whole or not at all.

    Raises:
        ConfigError: no run there, it takes no commands, or one is waiting already.
    """
    config = run / "config.json"
    if not config.is_file():
        raise ConfigError(f"--run {run}: no run there (it has no config.json)")
    if not json.loads(config.read_text(encoding="utf-8"))["resets"]["manual"]:
        raise ConfigError(f"--run {run}: it takes no commands (resets.manual = False)")
    path, temporary = run / WAITING, run / f".{WAITING}.{uuid.uuid4().hex}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"id": uuid.uuid4().hex, "reason": reason}, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)  # fails where a rename would overwrite
    except FileExistsError:
        raise ConfigError(f"--run {run}: a command is waiting already; the run takes it at its next step ({path})") from None
    finally:
        temporary.unlink()
    return path


def take_command(run: Path, step: int, warn: Callable[[str], None]) -> str | None:
    """The reason of the command that takes effect right before `step`: taken there before, or waiting now. None: there is none.

    Args:
        warn: told of a file that is no command, which is removed.
    """
    log, path = run / TAKEN, run / WAITING
    taken = jsonl.read(log) if log.is_file() else []
    for row in taken:
        if row["step"] == step:  # what is waiting now waits for the next step
            return str(row["reason"])
    if not path.is_file():
        return None
    try:
        command = json.loads(path.read_text(encoding="utf-8"))
        identifier, reason = str(command["id"]), str(command["reason"])
    except (ValueError, KeyError, TypeError):
        warn(f"WARNING: {path} is not a command of launch/reset.py; it is removed")
        path.unlink()
        return None
    fresh = all(row["id"] != identifier for row in taken)
    if fresh:
        with jsonl.JsonLog(log) as file:
            file.append_row({"step": step, "id": identifier, "reason": reason})
            file.sync()
        jsonl.sync_directory(run)
    path.unlink()  # a kill before this leaves a command that is in the log already
    return reason if fresh else None
