"""Alarms: the reset triggers' rules over the same blind signals, with other consequences.

An alarm rings from the step on in which its rule holds until it no longer does. Its beginning is an event; what follows is its action:
"log" nothing more; "reset" a reset, subject to cool-down and maximum; "pause" save and leave as on a preemption, once each time that
it begins to ring; "stop" save and end with an error, in every step in which it rings, so also after the same command is given again.
One alarm looks at the clock, `stalled_engine`: it cannot reset, so that nothing which training computes depends on its speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.errors import UserError
from jaxprorl.resets.triggers import BlindSignals, Firing, Level, Memory, Trend, observation, observe_all


class AlarmError(UserError, RuntimeError):
    """An alarm with the action "stop" rings. The run is saved."""


class Paused(Exception):  # noqa: N818 -- nothing went wrong
    """An alarm with the action "pause" rings. The run is saved; launch/train.py leaves with the status of a preemption."""


@dataclass(frozen=True)
class Alarm:
    """A rule and what follows: "log", "reset", "pause" or "stop"."""

    trigger: Level | Trend
    action: str

    @property
    def reads_clock(self) -> bool:
        """True when its metric is another one each time that the run is repeated."""
        return self.trigger.metric.startswith("time.")


@dataclass(frozen=True)
class AlarmState:
    """What alarms remember: their rules' memories, and which of them ring."""

    memories: Mapping[str, Memory] = field(default_factory=dict)
    ringing: tuple[str, ...] = ()


def make_alarms(config: ConfigDict) -> dict[str, Alarm]:
    """The alarms of `config.alarms` that are not off."""
    a = config.alarms
    kl, entropy, skipped, spread = a.kl_spike, a.entropy_collapse, a.skipped_updates, a.zero_spread
    repetition, unique, graders, mismatch, engine = a.repetition, a.unique_tokens, a.grader_errors, a.mismatch_trend, a.stalled_engine
    rules: dict[str, tuple[str, Level | Trend]] = {
        "kl_spike": (kl.action, Level(kl.metric, kl.window, above=kl.above or None, z_above=kl.z or None, cleared=True)),
        "entropy_collapse": (entropy.action, Level("entropy", below=entropy.floor)),
        "skipped_updates": (skipped.action, Level("updates.skipped", above=skipped.above)),
        "zero_spread": (spread.action, Level("groups.zero_spread_share", above=spread.above)),
        "repetition": (repetition.action, Level("repetition.ngram_share", above=repetition.above)),
        "unique_tokens": (unique.action, Level("repetition.unique_share", below=unique.below)),
        "grader_errors": (graders.action, Level("grader.error_share", above=graders.above)),
        "mismatch_trend": (mismatch.action, Trend("mismatch.mean", mismatch.window, mismatch.slope, mismatch.z)),
        "stalled_engine": (engine.action, Level("time.completion_tokens_per_s", engine.window, fall=engine.share)),
    }
    return {name: Alarm(rule, action) for name, (action, rule) in rules.items() if action != "off"}


def observe(
    alarms: Mapping[str, Alarm], state: AlarmState, signals: BlindSignals, reset: bool = False, speed: float | None = None
) -> tuple[AlarmState, list[Firing]]:
    """Looks at one step's signals.

    Args:
        speed: completion tokens per second of the same step; None = not measured.
        reset: a reset of the reference comes right after this step; baselines that it makes void are emptied.

    Returns:
        The state, and what has to be acted on: alarms that begin to ring, and those that stop a run as long as they ring.
    """
    seen = {name: alarm.trigger for name, alarm in alarms.items() if not alarm.reads_clock}
    memories, firings = observe_all(seen, state.memories, signals)
    for name, alarm in alarms.items():
        if alarm.reads_clock and isinstance(alarm.trigger, Level):
            memories[name], found = alarm.trigger.judge(tuple(state.memories.get(name, ())), speed)
            if found is not None:
                firings.append(Firing(signals.step, name, "clock", f"{name}: slower than {alarm.trigger.fall} of its median", found))
    acted = [firing for firing in firings if firing.trigger not in state.ringing or alarms[firing.trigger].action == "stop"]
    kept = {name: () if reset and alarms[name].trigger.cleared else memory for name, memory in memories.items()}
    values = dict(signals.training) | ({} if speed is None else {"time.completion_tokens_per_s": speed})
    unseen = [name for name in state.ringing if name in alarms and observation(values, alarms[name].trigger.metric) is None]
    return AlarmState(kept, (*unseen, *(firing.trigger for firing in firings))), acted


def from_json(content: Mapping[str, Any]) -> AlarmState:
    """The state whose `dataclasses.asdict` went through JSON."""
    return AlarmState({name: tuple(memory) for name, memory in content["memories"].items()}, tuple(content["ringing"]))
