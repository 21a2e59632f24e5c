"""Trains: python launch/train.py --config=configs/quickstart.py [--config.FIELD=VALUE ...]

Every field is in configs/base.py. A run that was stopped goes on from its last checkpoint when the same command is given again.
SIGTERM, SIGUSR1 and SIGHUP finish the step, save and leave with status 75; Ctrl-C leaves with 130.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def stop_now(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C while libraries are imported, or after the run: nothing is open, and one of them might swallow an exception."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop_now)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import streams

if __name__ == "__main__":
    streams.protect(streams.READ_WITHIN_S)  # before any file is opened

from jaxprorl import config as config_module
from jaxprorl.errors import UserError
from jaxprorl.preemption import EXIT_STATUS


def main(argv: list[str]) -> int:
    """Exit status: 0 done, 2 bad input (one line on stderr), 75 paused by an alarm. `train` leaves with 75 on a signal, 130 on Ctrl-C."""
    try:
        config = config_module.load(argv)
        config_module.validate(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from jaxprorl.monitoring.alarms import Paused
    from jaxprorl.monitoring.progress import before_after_text
    from jaxprorl.train import train

    try:
        result = train(config, own_process=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Paused:
        return EXIT_STATUS
    summary = result.summary
    greedy = summary["greedy"]
    print(before_after_text(summary["before"], summary["after"], greedy["before"], greedy["after"], sys.stdout.encoding))
    report = Path(config.runs_dir) / config.run_name / "report.html"
    print(f"{summary['steps']} steps are done; report: {report if report.is_file() else 'none, it could not be written'}")
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except SystemExit as left:
        if left.code != EXIT_STATUS:
            raise
        status = EXIT_STATUS
    if status == EXIT_STATUS:  # all is saved and closed; a library's thread that does not end has to keep nobody waiting
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STATUS)
    sys.exit(status)
