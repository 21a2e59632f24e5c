"""launch/train.py, killing itself with SIGKILL at a chosen point: python tests/kill_at.py POINT[:N] -- ARGUMENTS OF launch/train.py

The process dies at the N-th time (default 1) that it comes to the point. The product knows nothing of this: the functions around the
points are replaced here before it starts.
"""

# ruff: noqa: E402 -- the checkout is put on the path first, as in launch/

import dataclasses
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "launch"))

import train as command
from jax._src import lru_cache

from jaxprorl import start, train
from jaxprorl.checkpoint import Checkpoints
from jaxprorl.resets import commands
from jaxprorl.rewards import pool
from jaxprorl.rollout.jax_engine import JaxEngine
from jaxprorl.warmstart import fit


class Kill:
    """Counts how often the point is reached, and ends the process there at the N-th time."""

    def __init__(self, number: int):
        self._left = number
        self.in_loop = False  # where only the main loop's calls count

    def due(self) -> bool:
        """Counts; true at the N-th time."""
        self._left -= 1
        return self._left == 0

    def now(self) -> None:
        """The end, as the kernel's OOM killer or a power switch would make it."""
        os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self) -> None:
        if self.due():
            self.now()


def wrap(owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> None:
    """Has `before` and `after` called with the arguments of every call of `owner.name`."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after:
            after(*args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def wrap_compiled(training: Any, name: str, kill: Kill) -> None:
    """Kills after an executable of the loop was dispatched, in whichever stage."""

    def wrapped(original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        kill()
        return result

    for number, setting in training.settings.items():
        compiled = dataclasses.replace(setting.compiled, **{name: partial(wrapped, getattr(setting.compiled, name))})
        training.settings[number] = dataclasses.replace(setting, compiled=compiled)
    training.setting = training.settings[training.run.stage]


def watch_loop(kill: Kill, prepare: Callable[[Any], None] = lambda training: None) -> None:
    """Sets `kill.in_loop` while the main loop runs, and hands its Training to `prepare` before."""

    def enter(training: Any, preemption: Any) -> None:
        prepare(training)
        kill.in_loop = True

    def leave(training: Any, preemption: Any) -> None:
        kill.in_loop = False

    wrap(train, "loop", enter, leave)


def generation(kill: Kill) -> None:
    """Between two decode chunks of a rollout."""
    watch_loop(kill)
    wrap(JaxEngine, "_advance", before=lambda *_: kill() if kill.in_loop else None)


def grading(kill: Kill) -> None:
    """In GraderPool.collect, while graders work."""
    watch_loop(kill)
    wrap(pool, "wait", before=lambda *_, **__: kill() if kill.in_loop else None)


def update(kill: Kill) -> None:
    """With the update dispatched, its inputs donated, nothing read yet."""
    watch_loop(kill, lambda training: wrap_compiled(training, "train_step", kill))


def swap(kill: Kill) -> None:
    """Right after the engine took new weights, before anything is recorded."""
    watch_loop(kill, lambda training: wrap(training.setting.engine, "set_weights", after=lambda *_: kill()))


def reset(kill: Kill) -> None:
    """With the reset dispatched, before its event is written."""
    watch_loop(kill, lambda training: wrap_compiled(training, "reset", kill))


def saving(kill: Kill) -> None:
    """While Orbax writes: as soon as the checkpoint's first file is there."""

    def until_files(self: Checkpoints, state: Any, host: Any, *_: Any) -> None:
        if kill.due():
            while not any(path.is_file() for path in self.folder.glob(f"step_{host.run.step}*/**/*")):
                time.sleep(0.0002)
            kill.now()

    wrap(Checkpoints, "save", after=until_files)


def retention(kill: Kill) -> None:
    """In commit.remove: the record is gone, the files are not."""

    def between(path: Any, *_: Any, **__: Any) -> None:
        if re.fullmatch(r"step_\d+", Path(path).name) and Path(path).is_dir():
            kill()

    wrap(shutil, "rmtree", before=between)


def warm_start(kill: Kill) -> None:
    """After a phase of supervised updates, before its check."""
    wrap(fit._Trainer, "run", after=lambda *_: kill())


def compilation(kill: Kill) -> None:
    """A moment after JaxEngine.compile began, in the middle of tracing, compiling or reading the cache; at its end at the latest."""
    dying = threading.Event()

    def soon(*_: Any) -> None:
        if kill.due():
            dying.set()
            threading.Timer(0.2, kill.now).start()

    wrap(JaxEngine, "compile", before=soon, after=lambda *_: kill.now() if dying.is_set() else None)


def torn_entry(kill: Kill) -> None:
    """In the middle of writing an entry of the compilation cache."""

    def half(self: Any, key: str, value: bytes) -> None:
        path = Path(str(self.path)) / f"{key}-cache"
        if not path.exists() and kill.due():
            path.write_bytes(value[: len(value) // 2])
            kill.now()

    wrap(lru_cache.LRUCache, "put", before=half)


def evaluation(when: str) -> Callable[[Kill], None]:
    """After sampling and grading the held-out split, before the result is written anywhere."""

    def install(kill: Kill) -> None:
        current: list[str] = []
        for module in (start, train):
            wrap(module, "evaluate_held_out", before=lambda _, moment: current.append(moment))
        wrap(start, "evaluate", after=lambda *_: kill() if current[-1] == when else None)

    return install


def validation(kill: Kill) -> None:
    """After the periodic validation, before its event."""
    wrap(train, "evaluate", after=lambda *_: kill())


def renaming(is_it: Callable[[Path, Path], bool], after: bool = False) -> Callable[[Kill], None]:
    """Right before (or after) a finished temporary file or folder is renamed into place; `is_it(source, target)` says which."""

    def install(kill: Kill) -> None:
        def at(source: Path, target: Any) -> None:
            if is_it(source, Path(target)):
                kill()

        for name in ("rename", "replace"):
            wrap(Path, name, **{"after" if after else "before": at})

    return install


POINTS: dict[str, Callable[[Kill], None]] = {
    "torn_entry": torn_entry,
    "compilation": compilation,
    "warm_start": warm_start,
    "warm_start_model": renaming(lambda source, target: target.parent.name == "warmstart"),
    "evaluation_before": evaluation("before"),
    "evaluation_before_file": renaming(lambda source, target: target.name == "evaluation_before.json"),
    "generation": generation,
    "grading": grading,
    "update": update,
    "swap": swap,
    "samples": renaming(lambda source, target: target.suffix == ".parquet"),
    "reset": reset,
    "validation": validation,
    "saving": saving,
    "record": renaming(lambda source, target: target.name.endswith(".commit.json")),
    "just_after_saving": renaming(lambda source, target: target.name.endswith(".commit.json"), after=True),
    "retention": retention,
    "evaluation_after": evaluation("after"),
    "model": renaming(lambda source, target: target.name == "model"),
    "summary": renaming(lambda source, target: target.name == "summary.json"),
    "report": renaming(lambda source, target: target.name == "summary.json", after=True),
}


def taking(after: bool) -> Callable[[Kill], None]:
    """Right before (or after) a person's command, already written down as taken, is removed."""

    def install(kill: Kill) -> None:
        wrap(Path, "unlink", **{"after" if after else "before": lambda path, **_: kill() if path.name == commands.WAITING else None})

    return install


# Reached only by a run that is given a command.
POINTS.update(command_taken=taking(after=False), command_removed=taking(after=True))


def stage(kill: Kill) -> None:
    """Right after a stage began: its event is written, its reset and its first step are not there."""
    wrap(train, "begin_stage", after=lambda *_: kill())


# Reached only by a run that has stages.
POINTS.update(stage=stage)


def main(argv: list[str]) -> int:
    """Exit status of launch/train.py, if it lives to have one."""
    point, separator, *arguments = argv
    if separator != "--":
        raise SystemExit(__doc__)
    name, _, number = point.partition(":")
    POINTS[name](Kill(int(number or 1)))
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
