"""The runs of an ablation: ordinary runs of launch/train.py in folders of their own, one after the other, each resumable."""

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

from jaxprorl.ablations.plan import Plan
from jaxprorl.errors import ConfigError, RunLockedError
from jaxprorl.preemption import EXIT_STATUS, Preempted
from jaxprorl.run_lock import RunLock

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
    if not plan.configs[run.arm]["model"]["path"]:
        own.append(f"model.path={home.start(run.seed)}")
    return [*plan.fields, *plan.arms[run.arm], *own]


def make_start(plan: Plan, home: Home, seed: int) -> None:
    """The start model of a seed, made (or found in the cache) under the fields that arms share, and copied beside the runs.

    Raises:
        ConfigError: it cannot be made; says why.
    """
    if plan.configs[next(iter(plan.arms))]["model"]["path"] or home.start(seed).is_dir():
        return
    log = home.path / "logs" / f"start-seed_{seed}.log"
    changes = [*plan.fields, f"seed={seed}", "monitoring.progress=False"]
    status, printed = run_process("warmstart.py", plan.experiment, changes, log)
    if status:
        raise ConfigError(f"seed {seed}: no start model could be made: {last_error(status, printed)} (all of it: {log})")
    folder = printed.strip().splitlines()[-1].removesuffix(" (from the cache)")
    temporary = home.start(seed).with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(folder, temporary)
    temporary.rename(home.start(seed))


def execute(plan: Plan, home: Home, tell: Callable[[str], None]) -> None:
    """Starts, or goes on with, every run that is not done. A run that fails does not stop the others.

    Raises:
        ConfigError: a start model cannot be made.
        Preempted: SIGTERM came; the run under way was told and has saved.
        KeyboardInterrupt: Ctrl-C; the run under way had it too.
    """
    runs = all_runs(plan)
    for number, run in enumerate(runs, start=1):
        make_start(plan, home, run.seed)
        changes = changes_of(plan, home, run)
        before = read_outcome(home, run)
        if before and before.done and before.command == changes and (home.runs / run.name / "summary.json").is_file():
            tell(f"{number}/{len(runs)} {run.name}: done")
            continue
        wait_for_orphan(home.runs / run.name, tell)
        tell(f"{number}/{len(runs)} {run.name}: runs ({home.log(run)})")
        started_s = time.perf_counter()
        status, printed = run_process("train.py", plan.experiment, changes, home.log(run))
        line = "" if status == 0 else last_error(status, printed)
        write_outcome(home, run, Outcome(status == 0, status, line, changes, round(time.perf_counter() - started_s, 1)))
        tell(f"{number}/{len(runs)} {run.name}: {f'FAILED: {line}' if line else 'done'}")


def run_process(script: str, experiment: str, changes: Sequence[str], log: Path) -> tuple[int, str]:
    """Exit status of a script of launch/ and what it printed, which is added to `log` too. Raises Preempted and KeyboardInterrupt."""
    command = [sys.executable, str(LAUNCH / script), f"--config={experiment}", *(f"--config.{change}" for change in changes)]
    log.parent.mkdir(parents=True, exist_ok=True)
    stopping: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(number)
        process.send_signal(number)

    with log.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            status = process.wait()
        except BaseException:
            process.wait()  # Ctrl-C reaches it as well
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if stopping:
        raise Preempted
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
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    temporary.rename(path)
