"""When a stage of a recipe ends. Pure, and without JAX.

Right before step s, and before its rollout begins, a stage has seen its number of steps, a person's command and, unless it is blind, the
validations up to step s - 1. The ends of a blind recipe cannot be given a validation result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.recipe import Stage, larger
from jaxprorl.resets.controller import Decision
from jaxprorl.resets.triggers import Firing, Memory, Stagnation, Validation, reason_of

RESET = "stage"  # the trigger of a reset at the start of a stage


def what_resets(decision: Decision, config: ConfigDict, stage: Stage | None) -> tuple[bool, str]:
    """Reference or not, and what of the optimizer: as `config.resets` says; as `stage` says if the reset is its own; both: all of it."""
    asked = bool(config.resets.reference), str(config.resets.optimizer)
    if stage is None or decision.firing.trigger != RESET:
        return asked
    own = stage.reset_reference, stage.reset_optimizer
    return larger(own, asked) if decision.also else own


@dataclass(frozen=True)
class StageState:
    """What is remembered of the stage under way; JSON types only.

    Attributes:
        memory: of its plateau.
        ending: its end, once that has come, right before `ending.step`.
        before: metrics of the step before that, for the event of a reset.
    """

    memory: Memory = ()
    ending: Firing | None = None
    before: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BlindEnd:
    """A stage ends after `steps` steps, or when a person says so."""

    steps: int

    def observe(self, began: int, step: int, command: str | None) -> Firing | None:
        """The end right before step `step` of a stage whose first step was `began`; `command`: the reason that a person gives."""
        if command is not None:
            return Firing(step, "manual", "person", f"command: {command}", {"steps": step - began})
        if step - began >= self.steps:
            return Firing(step, "steps", "step", f"after {self.steps} steps", {"steps": step - began})
        return None


@dataclass(frozen=True)
class SightedEnd:
    """The same, or when validation is flat or falls."""

    blind: BlindEnd
    plateau: Stagnation


End = BlindEnd | SightedEnd


def make_ends(stages: tuple[Stage, ...], blind: bool) -> tuple[End, ...]:
    """The end of each stage.

    Raises:
        ValueError: one of a blind recipe would read validation results.
    """
    return tuple(_make_end(stage, blind) for stage in stages)


def _make_end(stage: Stage, blind: bool) -> End:
    end = BlindEnd(stage.steps)
    if stage.end != "plateau":
        return end
    if blind:
        raise ValueError(f"stage {stage.name!r}: a blind recipe has no plateaus")
    return SightedEnd(end, Stagnation(stage.patience, stage.min_change, stage.confidence, drop_only=False))


def observe(
    end: End, state: StageState, began: int, step: int, validation: Validation | None = None, command: str | None = None
) -> StageState:
    """What is known of a stage's end right before step `step`. A command comes before a plateau, and that before the number of steps.

    Raises:
        TypeError: a blind end is given a validation result.
    """
    if isinstance(end, BlindEnd):
        if validation is not None:
            raise TypeError("a blind end sees no validation results")
        return StageState(state.memory, end.observe(began, step, command))
    memory, found = end.plateau.observe(state.memory, validation)
    ending = end.blind.observe(began, step, command)
    if found is not None and (ending is None or ending.reads == "step"):
        ending = Firing(step, "plateau", "validation", reason_of("plateau", found), found)
    return StageState(memory, ending)


def from_json(content: Mapping[str, Any]) -> StageState:
    """The state whose `dataclasses.asdict` went through JSON."""
    ending = content["ending"]
    return StageState(tuple(content["memory"]), ending and Firing(**ending), content["before"])
