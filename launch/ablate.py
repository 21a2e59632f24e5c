"""Runs an ablation: arms x seeds of matched runs, compared as its plan says.

python launch/ablate.py --config configs/ablations/reset.py                      # does or resets of reference and optimizer help?
python launch/ablate.py --config configs/ablations/reset.py:small                # the same in minutes; shows how it works, no more
python launch/ablate.py --config configs/ablations/sharding.py                   # strategies on the devices that there are
python launch/ablate.py --config configs/ablations/reset.py --config.seeds='(0, 1)' --config.name=two_seeds

Every field is in configs/ablations/base.py. Runs are made one after the other with launch/train.py; stopped in any way, the same command
goes on: finished runs stay, the others resume. Exit status: 0 done, 1 some runs failed (the report says which), 2 bad input or arms that
are not matched, 75 stopped by SIGTERM, 130 by Ctrl-C.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import storage, streams

if __name__ == "__main__":
    streams.protect(streams.READ_WITHIN_S)  # before any file is opened

from jaxprorl.ablations.plan import Plan, make_plan, write_plan
from jaxprorl.ablations.runs import Home, all_runs, begun, execute
from jaxprorl.config import load
from jaxprorl.errors import ConfigError, RunLockedError, UserError
from jaxprorl.preemption import INTERRUPTED, Preempted
from jaxprorl.run_lock import RunLock
from jaxprorl.schema import ABLATION


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and the arguments that make the config."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ablate.py --config FILE [--config.FIELD=VALUE ...] ...",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="the ablation, e.g. configs/ablations/reset.py; FILE:WORD calls get_config(WORD)")
    parser.add_argument("--plan", action="store_true", help="only write the plan and say what it can find; no run is started")
    parser.add_argument("--report", action="store_true", help="only compare the runs that are there; no run is started")
    parser.add_argument("--changed", metavar="WHY", default="", help="go on though the plan differs from that of the runs there are")
    options, rest = parser.parse_known_args(argv)
    return options, [*([f"--config={options.config}"] if options.config else []), *rest]


def describe(plan: Plan) -> str:
    """What is planned, and what it can find."""
    runs, kind = len(all_runs(plan)), plan.budget["kind"].replace("_", " ")
    said = f"{plan.name}: {len(plan.arms)} arms x {len(plan.seeds)} seeds = {runs} runs of {plan.budget['size']:,} {kind}"
    said += f"; plan {plan.digest[:12]}"
    if plan.minimum_detectable is None:
        return said
    return (
        f"{said}\n{plan.metric}: a difference of {plan.minimum_detectable:.3g} is found with {plan.power:.0%} chance, if paired "
        f"differences have a standard deviation of {plan.paired_sd:g}"
    )


def ablate(options: argparse.Namespace, arguments: list[str], stack: ExitStack) -> int:
    """Plans, runs, compares; returns the exit status."""
    settings = load(arguments, ABLATION).to_dict()
    plan = make_plan(settings)
    home = Home(Path(settings["ablations_dir"]) / plan.name)
    if reason := storage.unwritable(home.path):
        raise ConfigError(f"ablations_dir = {settings['ablations_dir']!r}: {reason}; allow writing there, or choose another one")
    try:
        with storage.writing(home.path, 0, "then give the same command again"):
            home.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(RunLock(home.path))
    except RunLockedError as error:
        raise RunLockedError(f"{str(error).split(';')[0]}; wait for it, stop it, or choose another --config.name") from None
    changes = write_plan(home.plan, plan, begun(home), options.changed)
    print(describe(plan), flush=True)
    if options.plan:
        return 0
    from jaxprorl.ablations import results
    from jaxprorl.ablations.report import render, text

    results.forget_results(home)
    if not options.report:
        execute(plan, home, lambda line: print(line, flush=True))
    result = results.conclude(plan, home, changes)
    results.write_results(home, result, render(result))
    print(f"{text(result)}\nreport: {home.path / 'report.html'}")
    return 1 if result.failures else 0


def main(argv: list[str]) -> int:
    """Exit status: see above."""
    options, arguments = parse(argv)
    try:
        with ExitStack() as stack:
            return ablate(options, arguments, stack)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Preempted:
        print("stopped: what the run under way had to save is saved; the same command goes on", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
