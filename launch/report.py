"""Rebuilds what is derived from a run's logs: `report.html` and the TensorBoard files.

python launch/report.py --run runs/quickstart
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl.evaluation.report import write_report
from jaxprorl.monitoring import tensorboard


def main() -> int:
    """Parses the command line, rebuilds, prints where the results are; 2 when there is no such run."""
    parser = argparse.ArgumentParser(description="Rebuild report.html and the TensorBoard files of a run from its logs.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, e.g. runs/quickstart")
    run: Path = parser.parse_args().run
    if not (run / "config.json").is_file():
        print(f"error: --run {run}: no run folder (it has no config.json)", file=sys.stderr)
        return 2
    lines = tensorboard.derive(run / "metrics.jsonl", run / "events.jsonl", run / "tensorboard")
    print(f"{write_report(run)}\n{run / 'tensorboard'} ({lines} steps)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
