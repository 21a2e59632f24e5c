"""When to reset: any of some triggers, a cool-down, a maximum. Pure: `observe(state, signals) -> (state, firings)`.

Right before step s a controller has seen the metrics of steps up to s - 1 and none of step s, whose rollout is under way: the lag is one
step, whatever the machine's speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.monitoring import alarms
from jaxprorl.resets.triggers import (
    AtSteps,
    BlindSignals,
    BlindTrigger,
    EverySteps,
    Firing,
    Level,
    Memory,
    Onset,
    Signals,
    Stagnation,
    observe_all,
    reason_of,
)

GAUGES = ("kl.k1", "kl.k3_median", "entropy", "grad_norm")  # told of the step before and of the step after a reset


@dataclass(frozen=True)
class Decision:
    """A reset that comes right before `firing.step`.

    Attributes:
        also: names of other triggers that fired with it.
        before: GAUGES of the step before.
    """

    firing: Firing
    also: tuple[str, ...]
    before: Mapping[str, float]


@dataclass(frozen=True)
class ControllerState:
    """What a controller remembers; JSON types only.

    Attributes:
        memories: of each trigger, by its name.
        resets: decided so far.
        last_reset: step that the last one came before; None = there was none.
        decision: of the newest step boundary.
    """

    memories: Mapping[str, Memory] = field(default_factory=dict)
    resets: int = 0
    last_reset: int | None = None
    decision: Decision | None = None

    def due(self, step: int) -> Decision | None:
        """The reset that comes right before step `step`, if any."""
        return self.decision if self.decision and self.decision.firing.step == step else None


@dataclass(frozen=True)
class Gate:
    """What holds firings back; a person's command passes it.

    Attributes:
        cooldown_steps: between one reset and the next, at least; 0 = any.
        max_resets: of the run; 0 = no limit.
    """

    cooldown_steps: int = 0
    max_resets: int = 0

    def holds(self, state: ControllerState, step: int) -> bool:
        """True when no trigger may reset before step `step`."""
        cooling = state.last_reset is not None and step - state.last_reset < self.cooldown_steps
        return cooling or 0 < self.max_resets <= state.resets


@dataclass(frozen=True)
class BlindController:
    """Resets when any of its triggers fires. Nothing that it is made of, or given, can hold a validation result.

    Attributes:
        reference: its resets are of the reference too, and so void what was measured against it.
    """

    triggers: Mapping[str, BlindTrigger]
    gate: Gate
    reference: bool = True

    def observe(self, state: ControllerState, signals: BlindSignals, command: str | None = None) -> tuple[ControllerState, list[Firing]]:
        """Looks at one step's signals, and at the reason of a person's command. Returns the state, and all firings, held back or not."""
        if type(signals) is not BlindSignals:
            raise TypeError(f"a blind controller sees BlindSignals, not {type(signals).__name__}")
        memories, firings = observe_all(self.triggers, state.memories, signals)
        return settle(self, state, memories, _command(signals.step, command) + firings, signals)


@dataclass(frozen=True)
class SightedController:
    """A blind controller and, beside it, a trigger on validation results."""

    blind: BlindController
    validation: Stagnation

    def observe(self, state: ControllerState, signals: Signals, command: str | None = None) -> tuple[ControllerState, list[Firing]]:
        """As BlindController.observe."""
        blind, step = signals.blind, signals.blind.step
        memories, firings = observe_all(self.blind.triggers, state.memories, blind)
        memories["validation"], found = self.validation.observe(state.memories.get("validation", ()), signals.validation)
        if found is not None:
            firings.append(Firing(step, "validation", self.validation.reads, reason_of("validation", found), found))
        return settle(self, state, memories, _command(step, command) + firings, blind)


Controller = BlindController | SightedController


def settle(
    controller: Controller, state: ControllerState, memories: Mapping[str, Memory], firings: Sequence[Firing], signals: BlindSignals
) -> tuple[ControllerState, list[Firing]]:
    """The first firing that is not held back becomes a reset: counted, and remembered statistics that it makes void are cleared."""
    blind = controller.blind if isinstance(controller, SightedController) else controller
    held = blind.gate.holds(state, signals.step)
    chosen = next((firing for firing in firings if firing.reads == "person" or not held), None)
    if chosen is None:
        return replace(state, memories=dict(memories), decision=None), list(firings)
    void = voided(controller, blind.reference)
    kept = {name: () if name in void else memory for name, memory in memories.items()}
    also = tuple(firing.trigger for firing in firings if firing is not chosen)
    decision = Decision(chosen, also, gauges(signals.training))
    return ControllerState(kept, state.resets + 1, signals.step, decision), list(firings)


def begin_stage(
    controller: Controller,
    state: ControllerState,
    step: int,
    changed: bool,
    reset: Firing | None,
    before: Mapping[str, float],
    reference: bool,
) -> ControllerState:
    """The state for a stage whose first step is `step`.

    Args:
        controller: of the stage.
        changed: it changes fields: nothing that was remembered of earlier steps need hold any more.
        reset: of the stage itself. It counts like any other. One that was decided on for this boundary already becomes a part of it.
        before: `gauges` of the step before.
        reference: what is reset here has the reference in it.
    """
    memories = {} if changed else dict(state.memories)
    if reset is None:
        return replace(state, memories=memories)
    for name in voided(controller, reference):
        memories.pop(name, None)
    joined = state.due(step)
    also = (joined.firing.trigger, *joined.also) if joined else ()
    return ControllerState(memories, state.resets + (joined is None), step, Decision(reset, also, before))


def voided(controller: Controller, reference: bool) -> set[str]:
    """Triggers whose memory a reset makes void: of validation any, of KL one that has the reference in it."""
    return {name for name, trigger in triggers_of(controller).items() if trigger.cleared and (reference or trigger.reads == "validation")}


def resets_reference(controller: Controller) -> bool:
    """True when the resets that it decides on are of the reference too."""
    return controller.blind.reference if isinstance(controller, SightedController) else controller.reference


def gauges(values: Mapping[str, float]) -> dict[str, float]:
    """GAUGES among a step's metrics."""
    return {name: values[name] for name in GAUGES if name in values}


def triggers_of(controller: Controller) -> dict[str, BlindTrigger | Stagnation]:
    """All triggers by name."""
    if isinstance(controller, SightedController):
        return {**controller.blind.triggers, "validation": controller.validation}
    return dict(controller.triggers)


def _command(step: int, reason: str | None) -> list[Firing]:
    return [] if reason is None else [Firing(step, "manual", "person", f"command: {reason}", {})]


def make_controller(config: ConfigDict) -> Controller:
    """The controller of `config.resets`, and of the alarms whose action is a reset. With `resets.blind` it cannot be another than blind."""
    r = config.resets
    kl, entropy, length, repetition, stops = r.kl_spike, r.entropy_collapse, r.length, r.repetition, r.stop_collapse
    triggers: dict[str, BlindTrigger] = {}
    if r.at_steps:
        triggers["at_steps"] = AtSteps(tuple(r.at_steps))
    if r.every_steps:
        triggers["every_steps"] = EverySteps(r.every_steps)
    if kl.on:
        triggers["kl_spike"] = Onset(
            Level(kl.metric, kl.window, above=kl.above or None, z_above=kl.z or None, all_of=kl.both, cleared=True)
        )
    if entropy.on:
        fall = 1 - entropy.fall if entropy.fall else None
        triggers["entropy_collapse"] = Onset(Level("entropy", entropy.window, below=entropy.floor or None, fall=fall))
    if length.on:
        triggers["length"] = Onset(Level("response_tokens.mean", length.window, rise=length.factor))
    if repetition.on:
        triggers["repetition"] = Onset(Level("repetition.ngram_share", above=repetition.above))
    if stops.on:
        triggers["stop_collapse"] = Onset(Level("response.stop_share", below=stops.below))
    triggers |= {f"alarm.{name}": Onset(alarm.trigger) for name, alarm in alarms.make_alarms(config).items() if alarm.action == "reset"}
    blind = BlindController(triggers, Gate(r.cooldown_steps, r.max_resets), bool(r.reference))
    if r.blind or not r.validation.on:
        return blind
    v = r.validation
    return SightedController(blind, Stagnation(v.patience, v.min_change, v.confidence, v.drop_only))


def from_json(content: Mapping[str, Any]) -> ControllerState:
    """The state whose `dataclasses.asdict` went through JSON."""
    decision = content["decision"]
    return ControllerState(
        {name: tuple(memory) for name, memory in content["memories"].items()},
        content["resets"],
        content["last_reset"],
        decision and Decision(Firing(**decision["firing"]), tuple(decision["also"]), decision["before"]),
    )
