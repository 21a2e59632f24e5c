"""Prints when reset triggers would have fired in a run that is over.

python launch/replay.py --run runs/quickstart
python launch/replay.py --run runs/quickstart --triggers '{"every_steps": 0, "kl_spike": {"on": true, "z": 8.0}}'

`--triggers` changes fields of `resets`; without it the run's own triggers are looked at. The answer holds up to the first reset that the
run does not share, and it says where that is: what the policy would have done after it is in no log.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import streams

if __name__ == "__main__":
    streams.protect()  # before any file is opened

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxprorl.errors import ConfigError, UserError
from jaxprorl.resets.replay import Replay, replay


def parse_triggers(text: str) -> dict[str, object]:
    """The JSON object of --triggers.

    Raises:
        ConfigError: it is none.
    """
    try:
        changes = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--triggers {text}: not JSON ({error})") from None
    if not isinstance(changes, dict):
        raise ConfigError(f"--triggers {text}: not a JSON object of fields of resets")
    return changes


def show(result: Replay, console: Console) -> None:
    """A table of what fired, and how far it holds."""
    if result.fired:
        table = Table("before step", "trigger", "outcome", "reads", "why", box=None, padding=(0, 2))
        for fired in result.fired:
            firing = fired.firing
            table.add_row(*(Text(cell) for cell in (str(firing.step), firing.trigger, fired.outcome, firing.reads, firing.reason)))
        console.print(table)
    else:
        print("nothing fires")
    if result.differs_at is None:
        print(f"valid for the whole run: steps 1 to {result.last}, its resets are the same")
    else:
        print(f"valid up to step {result.differs_at} and not beyond: {result.difference}")


def main() -> int:
    """Exit status: 0 done, 2 bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(description="When reset triggers would have fired in a run that is over.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, e.g. runs/quickstart")
    parser.add_argument("--triggers", default="{}", help="JSON: changes of the run's `resets` fields")
    args = parser.parse_args()
    try:
        result = replay(args.run, parse_triggers(args.triggers))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
