"""The runs of an ablation: ordinary runs of launch/train.py in folders of their own, one after the other, each resumable."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from jaxprorl.ablations.plan import Plan, resolve
from jaxprorl.config import differences
from jaxprorl.errors import ConfigError, RunLockedError
from jaxprorl.files import new_folder, write_atomically
from jaxprorl.preemption import EXIT_STATUS, Preempted, listened
from jaxprorl.run_folder import move_aside
from jaxprorl.run_lock import RunLock
from jaxprorl.warmstart.fields import start_fields

MADE_UNDER = "made_under.json"  # in a start model's folder: the fields that it was made under, and their digest
BAD_INPUT = 2  # exit status of launch/train.py
LAUNCH = Path(__file__).resolve().parents[2] / "launch"


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.arm}-seed_{self.seed}"


@dataclass(frozen=True)
class Home:
    """Paths of an ablation (docs/ablations.md, "What is left behind")."""

    path: Path

    @property
    def plan(self) -> Path:
        """What was fixed before the first run."""
        return self.path / "plan.json"

    @property
    def runs(self) -> Path:
        """The folders of the runs."""
        return self.path / "runs"

    def start(self, seed: int) -> Path:
        """The start model that arms of a seed share, where the experiment makes one."""
        return self.path / "start" / f"seed_{seed}"

    def log(self, run: Run) -> Path:
        """What its processes printed."""
        return self.path / "logs" / f"{run.name}.log"

    def outcome(self, run: Run) -> Path:
        """How its last process ended."""
        return self.path / "outcomes" / f"{run.name}.json"


@dataclass(frozen=True)
class Outcome:
    """How the last process of a run ended; `line` is the last error line of one that failed. `time_s` is its wall-clock time."""

    done: bool
    status: int
    line: str
    command: list[str]
    time_s: float


def all_runs(plan: Plan) -> list[Run]:
    """Every run in the order in which they are made: a seed's arms together, so that pairs come early and share the hour."""
    return [Run(arm, seed) for seed in plan.seeds for arm in plan.arms]


def changes_of(plan: Plan, home: Home, run: Run) -> list[str]:
    """What makes the experiment this run, as on the command line."""
    budget = "steps" if plan.budget["kind"] == "steps" else f"budget.{plan.budget['kind']}"
    own = [f"runs_dir={home.runs}", f"run_name={run.name}", f"seed={run.seed}", f"{budget}={plan.budget['size']}"]
    if makes_start(plan):
        own.append(f"model.path={home.start(run.seed)}")
    return [*plan.fields, *plan.arms[run.arm], *own]


def begun(home: Home) -> bool:
    """Whether anything was made under the plan that lies there: a start model, or the beginning of a run."""
    started = (home.path / "start", home.path / "outcomes", *home.runs.glob("*/config.json"))
    return any(path.exists() for path in started)


def makes_start(plan: Plan) -> bool:
    """Whether the experiment makes its start model; otherwise it names a folder, which all seeds share."""
    return not plan.configs[next(iter(plan.arms))]["model"]["path"]


def planned_start(plan: Plan, seed: int) -> dict[str, Any]:
    """What a seed's start model is to be made under, as in MADE_UNDER: {"digest", "fields"}."""
    fields = start_fields(resolve(plan.experiment, [*plan.fields, f"seed={seed}"], f"seed {seed}"))
    return {"digest": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest(), "fields": fields}


def stale_start(plan: Plan, home: Home, seed: int) -> str:
    """In what the start model that lies there was made otherwise than planned; "" if in nothing."""
    planned = planned_start(plan, seed)
    try:
        made = json.loads((home.start(seed) / MADE_UNDER).read_text())
    except (OSError, ValueError):
        return f"{home.start(seed)} does not tell under which fields it was made ({MADE_UNDER})"
    if made["digest"] == planned["digest"]:
        return ""
    changed = [f"{field} was {old!r}, now {new!r}" for field, old, new in differences(made["fields"], planned["fields"])]
    return f"{home.start(seed)} was made under other fields ({'; '.join(changed)})"


def make_start(plan: Plan, home: Home, seed: int) -> None:
    """The start model of a seed, made (or found in the cache) under the fields that arms share, and copied beside the runs.

    One that was made under other fields is moved aside, unless runs began from it.

    Raises:
        ConfigError: it cannot be made, or is another one than runs began from; says why.
    """
    if not makes_start(plan):
        return
    if home.start(seed).is_dir():
        stale = stale_start(plan, home, seed)
        if not stale:
            return
        of_seed = [run.name for run in all_runs(plan) if run.seed == seed and (home.runs / run.name / "config.json").is_file()]
        if of_seed:
            raise ConfigError(f"{stale}, and {', '.join(of_seed)} began from it: move it and them away, or choose another --config.name")
        move_aside(home.start(seed))
    log = home.path / "logs" / f"start-seed_{seed}.log"
    changes = [*plan.fields, f"seed={seed}", "monitoring.progress=False"]
    status, printed = run_process("warmstart.py", plan.experiment, changes, log)
    if status:
        raise ConfigError(f"seed {seed}: no start model could be made: {last_error(status, printed)} (all of it: {log})")
    folder = next(reversed(printed.strip().splitlines()), "").removesuffix(" (from the cache)")
    if not folder or not Path(folder).is_dir():
        raise ConfigError(f"seed {seed}: no start model could be made: launch/warmstart.py printed no folder (all of it: {log})")
    with new_folder(home.start(seed)) as scratch:
        shutil.copytree(folder, scratch, dirs_exist_ok=True)
        (scratch / MADE_UNDER).write_text(json.dumps(planned_start(plan, seed), indent=2) + "\n")


def execute(plan: Plan, home: Home, tell: Callable[[str], None]) -> None:
    """Starts, or goes on with, every run that is not done. A run that fails does not stop the others; nor does a start model.

    Raises:
        Preempted: SIGTERM came; the run under way was told and has saved, if it had anything to save.
        KeyboardInterrupt: Ctrl-C; the run under way was told and has ended.
    """
    runs = all_runs(plan)
    starts: dict[int, str] = {}  # seed -> why there is no start model, "" if there is one
    for number, run in enumerate(runs, start=1):
        changes = changes_of(plan, home, run)
        before = read_outcome(home, run)
        if before and before.done and before.command == changes and (home.runs / run.name / "summary.json").is_file():
            tell(f"{number}/{len(runs)} {run.name}: done")
            continue
        wait_for_orphan(home.runs / run.name, tell)
        if run.seed not in starts:
            starts[run.seed] = _try_start(plan, home, run.seed)
        if starts[run.seed]:
            write_outcome(home, run, Outcome(False, BAD_INPUT, starts[run.seed], changes, 0.0))
            tell(f"{number}/{len(runs)} {run.name}: FAILED: {starts[run.seed]}")
            continue
        tell(f"{number}/{len(runs)} {run.name}: runs ({home.log(run)})")
        started_s = time.perf_counter()
        status, printed = run_process("train.py", plan.experiment, changes, home.log(run))
        line = "" if status == 0 else last_error(status, printed)
        write_outcome(home, run, Outcome(status == 0, status, line, changes, round(time.perf_counter() - started_s, 1)))
        tell(f"{number}/{len(runs)} {run.name}: {f'FAILED: {line}' if line else 'done'}")


def _try_start(plan: Plan, home: Home, seed: int) -> str:
    """Makes it; returns why that failed, or ""."""
    try:
        make_start(plan, home, seed)
    except (ConfigError, OSError) as error:  # OSError: it could not be copied
        return str(error)
    return ""


def run_process(script: str, experiment: str, changes: Sequence[str], log: Path) -> tuple[int, str]:
    """Exit status of a script of launch/ and what it printed, which is added to `log` too. Raises Preempted and KeyboardInterrupt."""
    command = [sys.executable, str(LAUNCH / script), f"--config={experiment}", *(f"--config.{change}" for change in changes)]
    log.parent.mkdir(parents=True, exist_ok=True)
    process: subprocess.Popen[bytes] | None = None
    stopping: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(number)
        if process and len(stopping) > 2:
            process.kill()  # it does not listen
        elif process:
            process.send_signal(number)  # for Ctrl-C in a terminal it is the second one, which changes nothing

    before = {number: signal.signal(number, stop) for number in listened()}
    try:
        with log.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            if stopping:  # they came before there was a process to tell
                process.send_signal(stopping[0])
            status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopping:
        raise KeyboardInterrupt if signal.SIGINT in stopping else Preempted
    return status, log.read_bytes()[begin:].decode(errors="replace")


def last_error(status: int, printed: str) -> str:
    """The line by which a process that failed tells why."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1].removeprefix("error: ")
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if status == EXIT_STATUS:
        return f"saved and left with status {EXIT_STATUS}: an alarm paused it, or a signal came"
    return lines[-1] if lines else f"ended with status {status} and printed nothing"


def wait_for_orphan(folder: Path, tell: Callable[[str], None]) -> None:
    """Waits while a process works in a run's folder: one that outlived a killed harness."""
    told = False
    while folder.is_dir():
        try:
            with RunLock(folder):
                return
        except RunLockedError as error:
            if not told:
                tell(f"waiting: {error}")
            told = True
            time.sleep(1.0)


def read_outcome(home: Home, run: Run) -> Outcome | None:
    """How a run ended; None if it has not."""
    path = home.outcome(run)
    return Outcome(**json.loads(path.read_text())) if path.is_file() else None


def write_outcome(home: Home, run: Run, outcome: Outcome) -> None:
    """Writes it whole or not at all."""
    path = home.outcome(run)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(asdict(outcome), indent=2) + "\n")
