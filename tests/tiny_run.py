"""The smallest run that has everything: warm start, rollouts, updates, resets, validations, checkpoints; and how tests start it.

Used as an experiment file (`--config=tests/tiny_run.py`) and as a reward module (`tiny_run:brevity`), always through launch/train.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from ml_collections import ConfigDict

from configs import base

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6
RESETS_EVERY = 2
VALIDATION_EVERY = 3
CHECKPOINT_EVERY = 2


def get_config(recipe: str = "") -> ConfigDict:
    """base.py, shrunk until a run with compiled executables at hand takes about ten seconds; "stages": with three of them."""
    c = tiny()
    if recipe == "stages":
        c.run_name = "staged"
        c.steps = 20
        c.stages = STAGES
        c.rollout.max_staleness = 1  # groups without room wait, and meet the ends of stages
        c.resets.every_steps = 0
        c.resets.blind = False
        c.validation.every_steps = 1
        c.checkpoint.every_steps = 100
        c.checkpoint.keep = 9
    return c


# A mix, then more samples until the plateau (which these bounds find as soon as two validations are there), then longer answers until told.
STAGES = (
    base.stage("one task", 1, {"data.mix": ("chain_sum",), "optimizer.learning_rate": 2e-3}),
    base.stage(
        "both", 5, {"data.mix": (), "rollout.samples_per_prompt": 8}, reset_reference=True, reset_optimizer="all", end="plateau",
        patience=1, min_change=1.0,
    ),
    base.stage(
        "longer", 5, {"rollout.samples_per_prompt": 4, "rollout.max_response_tokens": 60, "batch.updates": 1},
        reset_reference=True, end="manual",
    ),
)  # fmt: skip


def tiny() -> ConfigDict:
    """The tiny run itself."""
    c = base.get_config()
    c.run_name = "tiny"
    c.steps = STEPS
    c.model.hidden_size = 32
    c.model.intermediate_size = 64
    c.model.num_hidden_layers = 1
    c.model.num_attention_heads = 1
    c.data.tasks.chain_sum = ConfigDict({"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1})
    c.data.tasks.number_filtering = ConfigDict(
        {"min_numbers": 2, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 1, "max_value": 9}
    )
    c.data.train_per_task = 60
    c.data.validation_per_task = 10
    c.data.held_out_per_task = 16
    c.warmstart.warmup_updates = 5
    c.warmstart.skill_updates = 50
    c.warmstart.max_skill_updates = 50
    c.warmstart.gate_every_updates = 50
    c.warmstart.gate_items_per_task = 8
    c.warmstart.careless_updates = 50
    c.rollout.samples_per_prompt = 4
    c.rollout.slots = 32
    c.batch.prompts = 8
    c.batch.refill_prompts = 8
    c.batch.updates = 2
    c.batch.micro_batch_rows = 8
    c.mesh.cpu_devices = 2
    c.optimizer.learning_rate = 1e-3
    c.resets.every_steps = RESETS_EVERY
    c.reward = "tiny_run:brevity"
    c.validation.every_steps = VALIDATION_EVERY
    c.validation.items_per_task = 5
    c.checkpoint.every_steps = CHECKPOINT_EVERY
    return c


def brevity(completion_text: str, prompt: Any) -> float:
    """A reward that an untrained model earns too: shorter is better."""
    return max(0.0, 1.0 - len(completion_text) / 100)


def user_environment() -> dict[str, str]:
    """The environment of a user's command: on the CPU, and this file importable as a reward."""
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "COLUMNS": "120"}


def new_home(factory: pytest.TempPathFactory) -> Path:
    """A user's folder whose cache all homes of this test session share."""
    cache = factory.getbasetemp() / "tiny_run_cache"
    cache.mkdir(exist_ok=True)
    folder = factory.mktemp("home")
    (folder / ".cache").symlink_to(cache)
    return folder


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str
    seconds: float


class Command:
    """launch/train.py in a process group of its own, so that everything it leaves behind can be found."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        program: Sequence[str] = (str(ROOT / "launch/train.py"),),
        terminal: int | None = None,
        recipe: str = "",
    ):
        """`terminal`: file descriptor that output goes to; None = it is captured. `recipe`: of `get_config`."""
        environment = user_environment()
        output = subprocess.PIPE if terminal is None else terminal
        self.started_s = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, *program, f"--config={__file__}:{recipe}", *(f"--config.{override}" for override in overrides)],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, start_new_session=True,
        )  # fmt: skip

    def wait(self, timeout_s: float = 240) -> Ended:
        """Its end; leaves no process behind, whatever happens."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout_s)
        except BaseException:
            self.kill_group()
            raise
        return Ended(self.process.returncode, stdout or "", stderr or "", time.perf_counter() - self.started_s)

    def until(self, true: Callable[[], bool], timeout_s: float = 240) -> None:
        """Returns as soon as `true()`; an error if the command ends first."""
        end_s = time.monotonic() + timeout_s
        while not true():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.kill_group()
                stdout, stderr = self.process.communicate()
                raise AssertionError(f"ended ({self.process.returncode}) or too slow before the moment came:\n{stdout}\n{stderr}")
            time.sleep(0.005)

    def left_behind(self, grace_s: float = 5.0) -> list[psutil.Process]:
        """Living processes of its session, once they had some seconds to go."""
        end_s = time.monotonic() + grace_s
        while True:
            living = [process for process in psutil.process_iter() if self._is_ours(process)]
            if not living or time.monotonic() > end_s:
                return living
            time.sleep(0.05)

    def kill_group(self) -> None:
        """Kills what is left of its session."""
        for process in psutil.process_iter():
            if self._is_ours(process):
                process.kill()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ProcessLookupError):
            return False


def train(folder: Path, *overrides: str, **kwargs: Any) -> Ended:
    """Runs launch/train.py in `folder` to its end; fails unless it ends well."""
    ended = Command(folder, *overrides, **kwargs).wait()
    assert ended.status == 0, f"exit status {ended.status}\n{ended.stdout}\n{ended.stderr}"
    return ended


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; none if there is no file yet."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def timeless_metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [{name: value for name, value in row.items() if not name.startswith("time.")} for row in lines(run / "metrics.jsonl")]


def timeless_events(run: Path, *ignored: str) -> list[dict[str, Any]]:
    """events.jsonl without the clock, without the `ignored` kinds, and without what depends on the cache."""
    rows = [row for row in lines(run / "events.jsonl") if row["kind"] not in ignored]
    return [{name: value for name, value in row.items() if not name.startswith("time_") and name != "cached"} for row in rows]


def files(folder: Path) -> dict[str, bytes]:
    """Name to content of the files directly in a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
