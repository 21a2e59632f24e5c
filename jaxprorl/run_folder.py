"""The folder of a run: its files, and whether a command starts it, goes on with it or must not touch it."""

import errno
import itertools
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprorl import storage, streams
from jaxprorl.commit import committed_steps
from jaxprorl.config import differences, to_json
from jaxprorl.errors import ConfigError, DataError, StorageError
from jaxprorl.files import sweep, write_atomically
from jaxprorl.monitoring import jsonl
from jaxprorl.recipe import longest, stage_configs
from jaxprorl.run_lock import RunLock
from jaxprorl.schema import with_new_fields
from jaxprorl.sizes import with_cpu_devices

# Fields that may change between the first start and a resume: they do not change what a step computes.
FREE_FIELDS = (
    "steps", "budget.", "on_existing", "cache_dir", "runs_dir", "profile_steps", "monitoring.", "checkpoint.", "grading.workers",
    "rollout.vllm.python", "rollout.vllm.devices", "rollout.vllm.ring_mb", "rollout.vllm.max_restarts", "rollout.vllm.deadlines.",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """Paths of everything that a run leaves behind (docs: README, "What a run leaves behind")."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One line of numbers per step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One line per decision."""
        return self.path / "events.jsonl"

    @property
    def samples(self) -> Path:
        """One Parquet file per step."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Orbax checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Derived from metrics and events."""
        return self.path / "tensorboard"

    @property
    def profiles(self) -> Path:
        """One folder of jax.profiler traces per step of `profile_steps`."""
        return self.path / "profiles"

    @property
    def base_model(self) -> Path:
        """Tokenizer, template and config.json of the start model."""
        return self.path / "base_model"

    @property
    def model(self) -> Path:
        """The trained model, an ordinary Hugging Face folder."""
        return self.path / "model"

    @property
    def before(self) -> Path:
        """Held-out result of the start model."""
        return self.path / "evaluation_before.json"

    @property
    def summary(self) -> Path:
        """What a finished run reached."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The same for people, with curves."""
        return self.path / "report.html"


def read_config(run: Path) -> ConfigDict:
    """The config of a run, locked, with the defaults of fields that are newer than the run.

    Raises:
        ConfigError: no run there.
        DataError: its config.json is torn, or lacks what every run's has.
    """
    file = RunFolder(run).config
    if not os.path.isfile(file):
        raise ConfigError(f"--run {run}: no run there (it has no config.json)")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error})") from None
    missing = [
        name
        for name, kind in (("resets", dict), ("stages", list))
        if not isinstance(content, dict) or not isinstance(content.get(name), kind)
    ]
    if not missing and "manual" not in content["resets"]:
        missing = ["resets.manual"]
    if missing:
        raise DataError(f"{file}: not the config of a run of this version of jaxprorl, it has no {' and no '.join(missing)}")
    return with_new_fields(ConfigDict(content)).lock()


def accepted(config: ConfigDict) -> set[str]:
    """What `config.checkpoint.accept` lets differ."""
    return {name.strip() for name in config.checkpoint.accept.split(",")} - {""}


def open_run(config: ConfigDict, stack: ExitStack) -> RunFolder:
    """The run's folder, locked until `stack` closes, with `config.json` written.

    Raises:
        ConfigError: the folder holds a run of another config (names the first fields that differ), or can hold none.
        RunLockedError: another process works in it.
        StorageError: the disk is full or the like; the same command goes on once there is room.
    """
    try:
        return _open_run(config, stack)
    except OSError as error:
        if error.errno in storage.REMEDIES:
            path = Path(config.runs_dir) / config.run_name
            raise StorageError(storage.problem(path, len(to_json(config)), error)) from error
        raise ConfigError(f"runs_dir = {config.runs_dir!r}: the run's folder cannot be written ({error}); choose another one") from error


def _open_run(config: ConfigDict, stack: ExitStack) -> RunFolder:
    folder = RunFolder(Path(config.runs_dir) / config.run_name)
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context(RunLock(folder.path))
    if config.on_existing == "replace" and folder.config.exists():
        move_aside(folder.path)
        folder.path.mkdir(exist_ok=True)  # another process may have come first; then it holds the lock
        lock = stack.enter_context(RunLock(folder.path))
    sweep(folder.path)
    if lock.takeover:
        streams.say(lock.takeover)
    check_config(config, folder)
    _write_config(folder.config, to_json(config))
    return folder


def _write_config(path: Path, text: str) -> None:
    """Leaves a file alone that holds this text: a full disk must not keep a finished run from showing its summary."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomically(path, text)


def check_config(config: ConfigDict, folder: RunFolder) -> None:
    """Refuses to go on with a run of another config.

    Raises:
        ConfigError: names the first fields that differ.
    """
    if has_begun(folder):
        stored = json.loads(to_json(read_config(folder.path)))
        changed = [
            f"{field} was {old!r}, now {new!r}"
            for field, old, new in differences(stored, json.loads(to_json(config)))
            if not field.startswith(FREE_FIELDS) and field not in accepted(config)
        ]
        if changed:
            raise ConfigError(
                f"{folder.path} holds a run of another config ({'; '.join(changed[:4])}{' …' if len(changed) > 4 else ''}). "
                "Choose another --config.run_name, or --config.on_existing=replace to move that run aside and start over, or "
                f"--config.checkpoint.accept={','.join(change.split()[0] for change in changed)} to go on all the same"
            )
        check_begun_stages(folder, stored["stages"], json.loads(to_json(config))["stages"])
        check_exam_limit(folder, ConfigDict(stored), config)


def as_begun(config: ConfigDict, folder: RunFolder, most: int | None = None) -> ConfigDict:
    """The config with `mesh.cpu_devices` chosen, if it is 0: as the run in the folder has it, on whatever machine; else by rule.

    A run whose mesh is otherwise another one decides nothing, nor does one where `checkpoint.accept` names the field. `most`: of
    `with_cpu_devices`.
    """
    anew = config.on_existing == "replace" or "mesh.cpu_devices" in accepted(config)
    if not config.mesh.cpu_devices and not anew and has_begun(folder):
        stored = read_config(folder.path).to_dict().get("mesh")
        if isinstance(stored, dict) and config.mesh.to_dict() | {"cpu_devices": stored.get("cpu_devices")} == stored:
            devices = stored["cpu_devices"]
            return with_cpu_devices(config, devices if type(devices) is int else 0)
    return with_cpu_devices(config, most=most)


def has_begun(folder: RunFolder) -> bool:
    """False for a start that failed before it did anything."""
    return os.path.isfile(folder.config) and os.path.exists(folder.events)  # Path's raise for a name that is too long


def what_comes_next(folder: RunFolder) -> str:
    """What the same command will do after an interruption."""
    steps = committed_steps(folder.checkpoints)
    if not steps:
        return "there is no checkpoint yet, the same command starts over"
    return f"the same command goes on from the last checkpoint, of step {steps[-1]}"


def check_begun_stages(folder: RunFolder, stored: list[Any], now: list[Any]) -> None:
    """Refuses another past or present stage, accepted or not: steps were done by it.

    Raises:
        ConfigError: names the stage.
    """
    begun = max((int(event["number"]) for event in jsonl.read(folder.events) if event.get("kind") == "stage"), default=0)
    for number in range(begun):
        if stored[number : number + 1] != now[number : number + 1]:
            raise ConfigError(
                f"stages.{number}: {folder.path} has begun stage {stored[number]['name']!r}, number {number + 1}; stages may be added, or "
                "changed before they begin. Put it back as it was, or choose another --config.run_name"
            )
    if not stored and now and now[0]["changes"]:
        raise ConfigError(f"stages.0: {folder.path} has begun without stages; the first one is under way and can change nothing")


def check_exam_limit(folder: RunFolder, stored: ConfigDict, config: ConfigDict) -> None:
    """Refuses stages that would let validation and evaluation answer at another length than so far.

    Raises:
        ConfigError: names the limits and what accepts them.
    """
    field = "rollout.max_response_tokens"
    was, now = (longest(stage_configs(each)).rollout.max_response_tokens for each in (stored, config))
    if was != now and field not in accepted(config):
        raise ConfigError(
            f"{field}: validation and evaluation go by the largest of all stages, which was {was} in {folder.path} and would be {now}: "
            f"results before and after could not be compared. Keep to {was}, or add {field} to checkpoint.accept to go on all the same"
        )


def move_aside(path: Path) -> Path:
    """Renames a folder to the first free `NAME.old-K`; nothing is deleted."""
    for number in itertools.count(1):
        target = path.with_name(f"{path.name}.old-{number}")
        if os.path.lexists(target):
            continue
        try:
            path.rename(target)
            return target
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process took the name just now
                raise
    raise AssertionError("numbers do not end")
