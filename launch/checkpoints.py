"""Looks at the checkpoints of runs.

python launch/checkpoints.py list RUN              what is there: step, size, validation solve rate, whether a reset follows
python launch/checkpoints.py show RUN [--step N]   bookkeeping, identity and files of one (default: the newest)
python launch/checkpoints.py verify RUN            reads every byte; exits 1 if any checkpoint is damaged
python launch/checkpoints.py diff RUN_A RUN_B      the newest of each; or
python launch/checkpoints.py diff RUN STEP_A STEP_B    two of one run; exits 1 on any difference, the worst leaf last
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import streams

if __name__ == "__main__":
    streams.protect()  # before any file is opened
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # looking at files takes no accelerator from a run

from jaxprorl import commit
from jaxprorl.errors import CheckpointError, UserError
from jaxprorl.evaluation.statistics import rate_text
from jaxprorl.units import size_text


def checkpoints_of(run: str) -> Path:
    """The checkpoint folder of a run.

    Raises:
        CheckpointError: no run, or none committed yet.
    """
    folder = Path(run) / "checkpoints"
    if not commit.committed_steps(folder):
        raise CheckpointError(f"{run}: no run there, or no checkpoint committed yet")
    return folder


def show_list(run: str) -> int:
    """One line per checkpoint."""
    folder, bad = checkpoints_of(run), 0
    for step in commit.committed_steps(folder):
        try:
            record = commit.read_record(folder, step)
        except CheckpointError as error:
            bad += 1
            print(f"step {step:6d}  {error}")
            continue
        validation = {"solve_rate": record.validation_solve_rate, "ungraded": record.validation_ungraded}
        rate = "" if record.validation_solve_rate is None and not record.validation_ungraded else f"  validation {rate_text(validation)}"
        print(f"step {step:6d}  {size_text(record.bytes):>10}{rate}{'  before a reset' if record.reset_boundary else ''}")
    return 1 if bad else 0


def show(run: str, step: int | None) -> int:
    """Everything about one checkpoint."""
    from jaxprorl.checkpoint import read_host

    folder = checkpoints_of(run)
    step = commit.committed_steps(folder)[-1] if step is None else step
    record, host = commit.read_record(folder, step), read_host(folder, step)
    content = {"step": step, "schema": record.schema, "bytes": record.bytes, **dataclasses.asdict(host)}
    print(json.dumps(content | {"files": {name: entry["bytes"] for name, entry in record.files.items()}}, indent=2))
    return 0


def verify(run: str) -> int:
    """Every byte of every checkpoint against its digest."""
    folder, bad = checkpoints_of(run), 0
    for step in commit.committed_steps(folder):
        problem = commit.damage(folder, step)
        bad += problem is not None
        print(f"step {step:6d}  {problem or 'sound'}")
    return 1 if bad else 0


def diff(arguments: list[str]) -> int:
    """Two checkpoints, leaf by leaf."""
    from jaxprorl.checkpoint_diff import compare

    if len(arguments) == 3 and all(argument.isdigit() for argument in arguments[1:]):
        folder_a = folder_b = checkpoints_of(arguments[0])
        step_a, step_b = int(arguments[1]), int(arguments[2])
    elif len(arguments) == 2:
        folder_a, folder_b = (checkpoints_of(run) for run in arguments)
        step_a, step_b = (commit.committed_steps(folder)[-1] for folder in (folder_a, folder_b))
    else:
        raise CheckpointError(f"diff {' '.join(arguments)}: give RUN_A RUN_B, or RUN STEP_A STEP_B")
    differences = compare(folder_a, step_a, folder_b, step_b)
    outcome = f"{len(differences)} differences, the worst one last" if differences else "equal, bit for bit"
    print(f"{folder_a} step {step_a} against {folder_b} step {step_b}: {outcome}")
    for difference in differences:
        print(f"{difference.name}: {difference.text}")
    return 1 if differences else 0


def main() -> int:
    """Exit status: 0 fine, 1 damaged or different, 2 bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "show", "verify"):
        command = commands.add_parser(name)
        command.add_argument("run")
        if name == "show":
            command.add_argument("--step", type=int)
    commands.add_parser("diff").add_argument("what", nargs="+", help="RUN_A RUN_B, or RUN STEP_A STEP_B")
    arguments = parser.parse_args()
    try:
        if arguments.command == "diff":
            return diff(arguments.what)
        if arguments.command == "show":
            return show(arguments.run, arguments.step)
        return show_list(arguments.run) if arguments.command == "list" else verify(arguments.run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
