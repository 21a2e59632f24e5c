"""What triggers would have done in a run that is over, from its logs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.config import check_triggers
from jaxprorl.errors import ConfigError, DataError
from jaxprorl.monitoring import jsonl
from jaxprorl.recipe import stage_configs
from jaxprorl.resets.controller import ControllerState, begin_stage, gauges, make_controller
from jaxprorl.resets.stages import RESET
from jaxprorl.resets.triggers import Firing
from jaxprorl.run_folder import RunFolder
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
        differs_at: the first boundary at which there is a reset here and none in the run, or the other way round. From there on the run
            tells nothing of what would have happened. None: no difference.
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
        DataError: its metrics are incomplete.
    """
    folder = RunFolder(run)
    controllers = [make_controller(config) for config in changed_configs(folder, changes or {})]
    rows = jsonl.read(folder.metrics) if folder.metrics.is_file() else []
    if not rows or [row["step"] for row in rows] != list(range(len(rows))):
        raise DataError(f"{folder.metrics}: does not hold every step from 0 on; nothing can be replayed")
    recorded, begun = (
        {event["step"]: event for event in jsonl.read(folder.events) if event["kind"] == kind} for kind in ("reset", "stage")
    )
    commands = {step: event["reason"].removeprefix("command: ") for step, event in recorded.items() if event["trigger"] == "manual"}
    rules, state, fired = controllers[0], ControllerState(), []
    for step, row in enumerate(rows, start=1):
        values = {name: value for name, value in row.items() if name != "step"}
        state, firings = control(rules, state, step, values, commands.get(step))
        if step in begun:
            rules = controllers[begun[step]["number"] - 1]
            own = _own_reset(recorded.get(step))
            state = begin_stage(rules, state, step, bool(begun[step]["changes"]), own, gauges(values))
            firings = [*([own] if own else []), *firings]
        decision = state.due(step)
        for firing in firings:
            other = "held back" if decision is None else f"with {decision.firing.trigger}"
            fired.append(Fired(firing, "reset" if decision and firing == decision.firing else other))
        if step < len(rows) and (decision is not None) != (step in recorded):
            was = f"a reset by {recorded[step]['trigger']}" if step in recorded else "no reset"
            now = f"a reset by {decision.firing.trigger}" if decision else "no reset"
            return Replay(fired, step, step, f"before step {step} the run has {was}, with these triggers there is {now}")
    return Replay(fired, len(rows))


def _own_reset(event: Mapping[str, Any] | None) -> Firing | None:
    """The reset that a stage began with, if it did."""
    if event is None or event["trigger"] != RESET:
        return None
    return Firing(event["step"], RESET, event["signals"], event["reason"], event["statistics"])


def changed_configs(folder: RunFolder, changes: Mapping[str, Any]) -> tuple[ConfigDict, ...]:
    """The config of each stage of a run, or of a run without stages, with changes of `resets`.

    Raises:
        ConfigError: no such run, an unknown field, a value that cannot work.
    """
    if not folder.config.is_file():
        raise ConfigError(f"--run {folder.path}: no run there (it has no config.json)")
    if refused := [name for name in NO_TRIGGERS if name in changes]:
        raise ConfigError(
            f"--triggers: resets.{refused[0]} is no trigger: with another value a reset does something else, or comes from somebody else, "
            "and no log tells what would follow"
        )
    configs = stage_configs(ConfigDict(json.loads(folder.config.read_text(encoding="utf-8"))).lock())
    try:
        for config in configs:
            config.resets.update(changes)
            check_triggers(config)
    except (KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"--triggers: {str(error.args[0]).partition('. Other fields')[0]}; the fields are those of resets in configs/base.py"
        ) from None
    return configs
