"""TensorBoard scalars, derived from `metrics.jsonl` and `events.jsonl` and never the other way: delete the folder and derive again."""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar, text

from jaxprorl.monitoring import jsonl

# Kinds worth reading as text.
_MARKED = ("run_start", "resume", "warm_start", "evaluation", "stage", "stage_end", "reset", "alarm", "interrupted", "run_end")
_VERSION = "brain.Event:2"


class TensorBoardMirror:
    """Writes the lines of the two logs as they are made.

    Tags are metric names with slashes for dots (`reward.mean` -> `reward/mean`); a reset is also the scalar `events/reset`.

    The messages are tensorboardX's. Its writer is not used: it writes in a thread of its own, and once that has met a full disk, whoever
    adds a value waits for ever. Here each line is written, unbuffered, by the call that adds it, which raises what the system says.

    Args:
        out_dir: folder of the event files.
        purge_step: on resume, the first step that will be written again: TensorBoard then hides what older files hold from there on.
    """

    def __init__(self, out_dir: str | os.PathLike[str], purge_step: int | None = None) -> None:
        folder = Path(out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb", buffering=0)
        try:
            start = [] if purge_step is None else [Event(step=purge_step, session_log=SessionLog(status=SessionLog.START))]
            self._write(Event(wall_time=time.time(), file_version=_VERSION, step=purge_step or 0), *start)
        except OSError:
            self._file.close()
            raise

    def add_metrics(self, row: Mapping[str, Any], walltime: float | None = None) -> None:
        """Mirrors one line of metrics.jsonl. `walltime`: seconds since the epoch, now when None."""
        self._add([scalar(name.replace(".", "/"), value) for name, value in row.items() if name != "step"], row["step"], walltime)

    def add_event(self, row: Mapping[str, Any], walltime: float | None = None) -> None:
        """Mirrors one line of events.jsonl; kinds that come every step are left out."""
        summaries = [scalar("events/reset", 1.0)] if row["kind"] == "reset" else []
        if row["kind"] in _MARKED:
            fields = {name: value for name, value in row.items() if name not in ("step", "kind")}
            summaries.append(text(f"events/{row['kind']}", jsonl.encode(fields)))
        self._add(summaries, row["step"], walltime)

    def close(self) -> None:
        """Closes the event file."""
        self._file.close()

    def _add(self, summaries: list[Summary], step: int, walltime: float | None) -> None:
        now = time.time() if walltime is None else walltime
        self._write(*(Event(wall_time=now, step=step, summary=summary) for summary in summaries))

    def _write(self, *events: Event) -> None:
        data = memoryview(b"".join(map(_record, events)))
        while data:
            data = data[self._file.write(data) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _record(event: Event) -> bytes:
    """An event in the TFRecord format: length (u64), its checksum (u32), the message, its checksum."""
    message = event.SerializeToString()
    length = struct.pack("<Q", len(message))
    return b"".join((length, struct.pack("<I", masked_crc32c(length)), message, struct.pack("<I", masked_crc32c(message))))


def derive(metrics_path: str | os.PathLike[str], events_path: str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> int:
    """Rebuilds `out_dir` from the logs (either may be absent) and returns the number of metric lines.

    Event files already there are deleted, nothing else is. TensorBoard's wall-clock axis then shows the summed `time.step_s`.
    """
    out_dir = Path(out_dir)
    for old in out_dir.glob("events.out.tfevents.*"):
        old.unlink()
    rows = jsonl.read(metrics_path) if Path(metrics_path).exists() else []
    events = jsonl.read(events_path) if Path(events_path).exists() else []
    seconds, seconds_at = 0.0, {}
    with TensorBoardMirror(out_dir) as mirror:
        for row in rows:
            seconds += row.get("time.step_s", 0.0)
            seconds_at[row["step"]] = seconds
            mirror.add_metrics(row, walltime=seconds)
        for event in events:
            mirror.add_event(event, walltime=seconds_at.get(event["step"], 0.0))
    return len(rows)
