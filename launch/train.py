"""Trains: python launch/train.py --config=configs/quickstart.py [--config.FIELD=VALUE ...]

Every field is in configs/base.py. A run that was stopped goes on from its last checkpoint when the same command is given again.
SIGTERM and SIGUSR1 finish the step, save and leave with status 75; Ctrl-C leaves with 130.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def stop_now(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C while libraries are imported, or after the run: nothing is open, and as an exception one of them might swallow it."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop_now)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ml_collections import ConfigDict

from jaxprorl import config as config_module
from jaxprorl.commit import committed_steps
from jaxprorl.errors import UserError
from jaxprorl.preemption import EXIT_STATUS, INTERRUPTED
from jaxprorl.run_folder import RunFolder


def what_comes_next(config: ConfigDict) -> str:
    """What the same command will do after an interruption."""
    steps = committed_steps(RunFolder(Path(config.runs_dir) / config.run_name).checkpoints)
    if not steps:
        return "there is no checkpoint yet, the same command starts over"
    return f"the same command goes on from the last checkpoint, of step {steps[-1]}"


def main(argv: list[str]) -> int:
    """Exit status: 0 done, 2 bad input (one line on stderr), 75 preempted and saved, 130 interrupted."""
    try:
        config = config_module.load(argv)
        config_module.validate(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from jaxprorl.monitoring.progress import before_after_text
    from jaxprorl.train import train

    try:
        summary = train(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {what_comes_next(config)}", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as preempted:
        if preempted.code != EXIT_STATUS:
            raise
        return EXIT_STATUS
    greedy = summary["greedy"]
    print(before_after_text(summary["before"], summary["after"], greedy["before"], greedy["after"]))
    print(f"{summary['steps']} steps are done; report: {Path(config.runs_dir) / config.run_name / 'report.html'}")
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status in (EXIT_STATUS, INTERRUPTED):  # all is closed; threads of libraries, interrupted anywhere, might not end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
