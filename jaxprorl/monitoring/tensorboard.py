"""TensorBoard scalars, derived from `metrics.jsonl` and `events.jsonl` and never the other way: delete the folder and derive again."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorboardX import SummaryWriter

from jaxprorl.monitoring import jsonl

# Kinds worth reading as text.
_MARKED = ("run_start", "resume", "warm_start", "evaluation", "stage", "stage_end", "reset", "alarm", "interrupted", "run_end")


class TensorBoardMirror:
    """Writes the lines of the two logs as they are made.

    Tags are metric names with slashes for dots (`reward.mean` -> `reward/mean`); a reset is also the scalar `events/reset`.

    Args:
        out_dir: folder of the event files.
        purge_step: on resume, the first step that will be written again: TensorBoard then hides what older files hold from there on.
    """

    def __init__(self, out_dir: str | os.PathLike[str], purge_step: int | None = None) -> None:
        self._writer = SummaryWriter(str(out_dir), purge_step=purge_step)

    def add_metrics(self, row: Mapping[str, Any], walltime: float | None = None) -> None:
        """Mirrors one line of metrics.jsonl. `walltime`: seconds since the epoch, now when None."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name.replace(".", "/"), value, row["step"], walltime=walltime)

    def add_event(self, row: Mapping[str, Any], walltime: float | None = None) -> None:
        """Mirrors one line of events.jsonl; kinds that come every step are left out."""
        if row["kind"] == "reset":
            self._writer.add_scalar("events/reset", 1.0, row["step"], walltime=walltime)
        if row["kind"] in _MARKED:
            fields = {name: value for name, value in row.items() if name not in ("step", "kind")}
            self._writer.add_text(f"events/{row['kind']}", jsonl.encode(fields), row["step"], walltime=walltime)

    def flush(self) -> None:
        """Hands what was added so far to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
