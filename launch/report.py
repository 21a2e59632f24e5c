"""Rebuilds what is derived from a run's logs: `report.html` and the TensorBoard files.

python launch/report.py --run runs/quickstart

Of a run under way only the report: the process that trains has its TensorBoard file open and goes on writing it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl.errors import RunLockedError
from jaxprorl.evaluation.report import write_report
from jaxprorl.monitoring import tensorboard
from jaxprorl.run_lock import RunLock


def main() -> int:
    """Parses the command line, rebuilds, prints where the results are; 2 when there is no such run."""
    parser = argparse.ArgumentParser(description="Rebuild report.html and the TensorBoard files of a run from its logs.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, e.g. runs/quickstart")
    run: Path = parser.parse_args().run
    if not (run / "config.json").is_file():
        print(f"error: --run {run}: no run folder (it has no config.json)", file=sys.stderr)
        return 2
    try:
        with RunLock(run) as lock:  # held while files are replaced: a run that starts meanwhile is told to wait
            if lock.takeover:
                print(lock.takeover)
            lines = tensorboard.derive(run / "metrics.jsonl", run / "events.jsonl", run / "tensorboard")
        told = f"{lines} steps"
    except RunLockedError as error:
        told = f"left as it is: {str(error).split(';')[0]}, which writes it"
    print(f"{write_report(run)}\n{run / 'tensorboard'} ({told})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
