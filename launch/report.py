"""Rebuilds what is derived from a run's logs: `report.html` and the TensorBoard files.

python launch/report.py --run runs/quickstart [--output FOLDER]

A run that can only be read needs --output, where both then go.
Of a run under way only the report: the process that trains has its TensorBoard file open and goes on writing it.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import storage, streams

if __name__ == "__main__":
    streams.protect()  # before any file is opened

from jaxprorl.errors import RunLockedError, StorageError, UserError
from jaxprorl.evaluation.report import write_report
from jaxprorl.monitoring import tensorboard
from jaxprorl.run_lock import RunLock


def rebuild(run: Path, output: Path | None) -> str:
    """Rebuilds both; returns where they are.

    Raises:
        StorageError: they cannot be written.
    """
    to = run if output is None else output
    if reason := storage.unwritable(to):
        raise StorageError(f"{to}: {reason}; name another folder with --output")
    told, lines = "", 0
    with storage.writing(to, 0, "or name another folder with --output"), ExitStack() as stack:
        to.mkdir(parents=True, exist_ok=True)
        if output is None:
            try:
                lock = stack.enter_context(RunLock(run))  # held while files are replaced: a run that starts meanwhile is told to wait
                if lock.takeover:
                    print(lock.takeover)
            except RunLockedError as error:
                told = f"left as it is: {str(error).split(';')[0]}, which writes it"
        if not told:
            lines = tensorboard.derive(run / "metrics.jsonl", run / "events.jsonl", to / "tensorboard")
        return f"{write_report(run, to)}\n{to / 'tensorboard'} ({told or f'{lines} steps'})"


def main() -> int:
    """Parses the command line, rebuilds, prints where the results are; 2 when there is no such run, or they cannot be written."""
    parser = argparse.ArgumentParser(description="Rebuild report.html and the TensorBoard files of a run from its logs.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, e.g. runs/quickstart")
    parser.add_argument("--output", type=Path, help="where to write them (default: the run's folder)")
    arguments = parser.parse_args()
    run: Path = arguments.run
    if not os.path.isfile(run / "config.json"):
        print(f"error: --run {run}: no run folder (it has no config.json)", file=sys.stderr)
        return 2
    try:
        print(rebuild(run, arguments.output))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
