"""Tells a run to reset, or to begin its next stage, at its next step boundary.

python launch/reset.py --run runs/quickstart [--reason "KL has stalled"]
python launch/reset.py --run runs/prorl_tiny --next-stage [--reason "validation is flat"]

The run takes the command within a step, or when it is started again. It is an event of the run; the run repeats it at the same step if
it has to go back to an earlier checkpoint.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import streams

if __name__ == "__main__":
    streams.protect()  # before any file is opened

from jaxprorl.errors import UserError
from jaxprorl.resets.commands import Command, request


def main() -> int:
    """Exit status: 0 the command is there, 2 bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(description="Reset a run, or begin its next stage, at its next step boundary.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, e.g. runs/quickstart")
    parser.add_argument("--reason", default="no reason given", help="goes into the run's events")
    parser.add_argument("--next-stage", action="store_true", help="end the stage under way (the run, if it is the last) instead of a reset")
    args = parser.parse_args()
    try:
        path = request(args.run, Command("next_stage" if args.next_stage else "reset", args.reason))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path}: the run {'ends its stage' if args.next_stage else 'resets'} at its next step boundary")
    return 0


if __name__ == "__main__":
    sys.exit(main())
