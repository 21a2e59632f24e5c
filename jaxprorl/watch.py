"""Between two steps: what the metrics of the last one decide about resets and alarms. Pure; training acts on it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.monitoring import alarms
from jaxprorl.monitoring.alarms import Alarm, AlarmState
from jaxprorl.recipe import stage_configs, stages
from jaxprorl.resets import controller
from jaxprorl.resets import stages as ends
from jaxprorl.resets.controller import BlindController, Controller, ControllerState, gauges
from jaxprorl.resets.stages import BlindEnd, End, StageState
from jaxprorl.resets.triggers import Firing, all_signals, blind_signals


@dataclass(frozen=True)
class Rules:
    """What a config asks for; it does not change during a stage.

    Attributes:
        end: of the stage; None = there are no stages.
        blind: no reset of the whole run can depend on validation results.
    """

    controller: Controller
    alarms: Mapping[str, Alarm]
    end: End | None
    blind: bool


@dataclass(frozen=True)
class Watch:
    """What resets, alarms and the stage remember of the steps done."""

    control: ControllerState = field(default_factory=ControllerState)
    alarms: AlarmState = field(default_factory=AlarmState)
    stage: StageState = field(default_factory=StageState)


def make_rules(config: ConfigDict) -> tuple[Rules, ...]:
    """The rules of each stage: of its `resets`, its `alarms` and its end. Without stages there is one set of them."""
    configs = stage_configs(config)
    made = ends.make_ends(stages(config), config.resets.blind)
    controllers = [controller.make_controller(stage_config) for stage_config in configs]
    blind = all(isinstance(rules, BlindController) for rules in controllers) and all(isinstance(end, BlindEnd) for end in made)
    return tuple(
        Rules(rules, alarms.make_alarms(stage_config), end, blind)
        for rules, stage_config, end in zip(controllers, configs, made or (None,), strict=True)
    )


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
    reset = state.due(step) is not None and controller.resets_reference(rules.controller)
    ringing, acted = alarms.observe(
        rules.alarms, watch.alarms, blind_signals(step, values), reset, values.get("time.completion_tokens_per_s")
    )
    stage = dataclasses.replace(watch.stage, before=gauges(values)) if watch.stage.ending else watch.stage
    return Watch(state, ringing, stage), acted


def observe_stage(rules: Rules, watch: Watch, began: int, step: int, values: Mapping[str, float], command: str | None = None) -> Watch:
    """What is known of the stage's end right before step `step`; a stage that is blind is not shown the validation.

    Args:
        began: the stage's first step.
        values: the validation after step `step` - 1; empty = there was none.
        command: the reason that a person gives for ending the stage.
    """
    if rules.end is None:
        return watch
    validation = None if isinstance(rules.end, BlindEnd) else all_signals(step, values).validation
    return dataclasses.replace(watch, stage=ends.observe(rules.end, watch.stage, began, step, validation, command))


def begin_stage(rules: Rules, watch: Watch, changed: bool, reset: Firing | None, reference: bool = False) -> Watch:
    """What is remembered at the start of a stage: what its changes make void is forgotten, alarms that ring go on ringing.

    Args:
        rules: of the stage.
        watch: with the end of the stage before.
        changed: the stage changes fields.
        reset: its own; None = it has none.
        reference: that is one of the reference.
    """
    assert watch.stage.ending is not None
    step = watch.stage.ending.step
    reference |= watch.control.due(step) is not None and controller.resets_reference(rules.controller)
    state = controller.begin_stage(rules.controller, watch.control, step, changed, reset, watch.stage.before, reference)
    forgotten = {name for name, alarm in rules.alarms.items() if changed or (reference and alarm.trigger.cleared)}
    memories = {name: memory for name, memory in watch.alarms.memories.items() if name not in forgotten}
    return Watch(state, dataclasses.replace(watch.alarms, memories=memories))


def to_json(watch: Watch) -> dict[str, Any]:
    """JSON types only."""
    return dataclasses.asdict(watch)


def from_json(content: Mapping[str, Any]) -> Watch:
    """What `to_json` was given, also after it went through text."""
    return Watch(controller.from_json(content["control"]), alarms.from_json(content["alarms"]), ends.from_json(content["stage"]))
