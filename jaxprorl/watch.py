"""Between two steps: what the metrics of the last one decide about resets and alarms. Pure; training acts on it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.monitoring import alarms
from jaxprorl.monitoring.alarms import Alarm, AlarmState
from jaxprorl.resets import controller
from jaxprorl.resets.controller import BlindController, Controller, ControllerState
from jaxprorl.resets.triggers import Firing, all_signals, blind_signals


@dataclass(frozen=True)
class Rules:
    """What a config asks for; it does not change during a run."""

    controller: Controller
    alarms: Mapping[str, Alarm]

    @property
    def blind(self) -> bool:
        """True when no reset can depend on validation results."""
        return isinstance(self.controller, BlindController)


@dataclass(frozen=True)
class Watch:
    """What resets and alarms remember of the steps done."""

    control: ControllerState = field(default_factory=ControllerState)
    alarms: AlarmState = field(default_factory=AlarmState)


def make_rules(config: ConfigDict) -> Rules:
    """The rules of `config.resets` and `config.alarms`."""
    return Rules(controller.make_controller(config), alarms.make_alarms(config))


def control(
    rules: Controller, state: ControllerState, step: int, values: Mapping[str, float], command: str | None = None
) -> tuple[ControllerState, list[Firing]]:
    """Shows a controller what its kind may see of the metrics of step `step` - 1."""
    if isinstance(rules, BlindController):
        return rules.observe(state, blind_signals(step, values), command)
    return rules.observe(state, all_signals(step, values), command)


def observe(rules: Rules, watch: Watch, step: int, values: Mapping[str, float], command: str | None = None) -> tuple[Watch, list[Firing]]:
    """The decision about what comes right before step `step`, from the metrics of the step before it.

    Args:
        values: all metrics of step `step` - 1.
        command: the reason that a person gives for a reset; None = nobody asks for one.

    Returns:
        What is remembered now (`control.due(step)` is the reset), and the alarms to act on.
    """
    state, _ = control(rules.controller, watch.control, step, values, command)
    reset = state.due(step) is not None
    ringing, acted = alarms.observe(rules.alarms, watch.alarms, blind_signals(step, values), reset)
    return Watch(state, ringing), acted


def to_json(watch: Watch) -> dict[str, Any]:
    """JSON types only."""
    return dataclasses.asdict(watch)


def from_json(content: Mapping[str, Any]) -> Watch:
    """What `to_json` was given, also after it went through text."""
    return Watch(controller.from_json(content["control"]), alarms.from_json(content["alarms"]))
