"""What triggers would have done in a run that is over, from its logs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.config import check_triggers
from jaxprorl.errors import ConfigError, DataError
from jaxprorl.monitoring import jsonl
from jaxprorl.recipe import stage_configs, stages
from jaxprorl.resets.controller import ControllerState, begin_stage, gauges, make_controller, resets_reference
from jaxprorl.resets.stages import RESET, what_resets
from jaxprorl.resets.triggers import Firing
from jaxprorl.run_folder import RunFolder, read_config
from jaxprorl.watch import control

# Fields of `resets` that are no triggers: what a reset does, or who may ask for one. They change what comes after it, which is in no log.
NO_TRIGGERS = ("reference", "optimizer", "warmup_updates", "manual")


@dataclass(frozen=True)
class Fired:
    """A trigger that fires, and what comes of it: "reset", "held back", or "with NAME", the one that resets."""

    firing: Firing
    outcome: str


@dataclass(frozen=True)
class Replay:
    """What happens at the step boundaries 1 to `last`.

    Attributes:
        last: the last boundary looked at: the end of the run, or `differs_at`.
        differs_at: the first boundary at which there is a reset here and none in the run, or the other way round, or one of something
            else. From there on the run tells nothing of what would have happened. None: no difference.
        difference: the same in words; empty.
    """

    fired: list[Fired]
    last: int
    differs_at: int | None = None
    difference: str = ""


def replay(run: Path, changes: Mapping[str, Any] | None = None) -> Replay:
    """Shows a run's metrics to its reset triggers, or to changed ones, step by step.

    A person's commands, the ends of stages and the resets that stages begin with are taken from the run. The boundary after its last step
    is looked at too, though no reset was done there.

    Args:
        changes: of `config.resets`, nested like it, in all stages; None = the run's own.

    Raises:
        ConfigError: no such run, an unknown field, a value that cannot work.
        DataError: its logs are incomplete, or its config.json is torn or of another version.
    """
    folder = RunFolder(run)
    configs = changed_configs(folder, changes or {})
    controllers, declared = [make_controller(config) for config in configs], stages(configs[0])
    rows = jsonl.read(folder.metrics) if folder.metrics.is_file() else []
    if not rows or [row["step"] for row in rows] != list(range(len(rows))):
        raise DataError(f"{folder.metrics}: does not hold every step from 0 on; nothing can be replayed")
    if not folder.events.is_file():
        raise DataError(f"{folder.events}: no such file, so nothing tells which resets the run had; nothing can be replayed")
    recorded, begun = (
        {event["step"]: event for event in jsonl.read(folder.events) if event["kind"] == kind} for kind in ("reset", "stage")
    )
    commands = {step: event["reason"].removeprefix("command: ") for step, event in recorded.items() if event["trigger"] == "manual"}
    commands |= {step: "with a stage" for step, event in recorded.items() if "manual" in event["also"]}
    number, rules, state, fired = 0, controllers[0], ControllerState(), []
    for step, row in enumerate(rows, start=1):
        values = {name: value for name, value in row.items() if name != "step"}
        state, firings = control(rules, state, step, values, commands.get(step))
        if step in begun:
            number = begun[step]["number"] - 1
            rules, own = controllers[number], _own_reset(recorded.get(step))
            reference = bool(own and declared[number].reset_reference) or (state.due(step) is not None and resets_reference(rules))
            state = begin_stage(rules, state, step, bool(begun[step]["changes"]), own, gauges(values), reference)
            firings = [*([own] if own else []), *firings]
        decision = state.due(step)
        for firing in firings:
            other = "held back" if decision is None else f"with {decision.firing.trigger}"
            fired.append(Fired(firing, "reset" if decision and firing == decision.firing else other))
        was = _told(recorded[step]["trigger"], recorded[step]["reference"], recorded[step]["optimizer"]) if step in recorded else None
        stage = declared[number] if declared else None
        now = _told(decision.firing.trigger, *what_resets(decision, configs[number], stage)) if decision else None
        if step < len(rows) and (was and was[1]) != (now and now[1]):
            return Replay(fired, step, step, f"before step {step} the run has {_words(was)}, with these triggers there is {_words(now)}")
    return Replay(fired, len(rows))


def _told(trigger: str, reference: bool, optimizer: str) -> tuple[str, str]:
    """What reset, and what was reset."""
    return trigger, f"reference {reference}, optimizer {optimizer!r}"


def _words(reset: tuple[str, str] | None) -> str:
    return f"a reset by {reset[0]} ({reset[1]})" if reset else "no reset"


def _own_reset(event: Mapping[str, Any] | None) -> Firing | None:
    """The reset that a stage began with, if it did."""
    if event is None or event["trigger"] != RESET:
        return None
    return Firing(event["step"], RESET, event["signals"], event["reason"], event["statistics"])


def changed_configs(folder: RunFolder, changes: Mapping[str, Any]) -> tuple[ConfigDict, ...]:
    """The config of each stage of a run, or of a run without stages, with changes of `resets`.

    Raises:
        ConfigError: no such run, an unknown field, a value that cannot work.
        DataError: its config.json is torn or of another version.
    """
    if refused := [name for name in NO_TRIGGERS if name in changes]:
        raise ConfigError(
            f"--triggers: resets.{refused[0]} is no trigger: with another value a reset does something else, or comes from somebody else, "
            "and no log tells what would follow"
        )
    configs = stage_configs(read_config(folder.path))
    try:
        for config in configs:
            check_triggers(config)
            make_controller(config)
    except (KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{folder.config}: written by another version of jaxprorl, its triggers cannot be made ({error})") from None
    try:
        for config in configs:
            config.resets.update(changes)
            check_triggers(config)
    except (KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"--triggers: {str(error.args[0]).partition('. Other fields')[0]}; the fields are those of resets in configs/base.py"
        ) from None
    return configs
