"""A worker's life as a state machine: legal transitions, and how long each state may last. Pure.

    STARTING -ready-> EMPTY -swap-> DRAINING -drained-> LOADING -loaded-> PROBING -agreed-> SERVING -swap-> DRAINING ...

A swap may also come to a worker that is DRAINING or PROBING, one that was lost a moment ago: what it was being given is out of date.
A worker that is lost, in any state, starts again and goes the whole way. One whose probe disagrees is no loss: the swap has failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from jaxprorl.errors import EngineError


class Stage(StrEnum):
    """What a worker is doing."""

    STARTING = "starting"  # the process imports and builds its engine
    EMPTY = "empty"  # ready, without weights
    DRAINING = "draining"  # requests of the old weights end
    LOADING = "loading"  # weights are read, caches emptied
    PROBING = "probing"  # its log-probs are compared with the trainer's
    SERVING = "serving"


class Event(StrEnum):
    """What moves it on."""

    READY = "ready"
    SWAP = "swap"
    DRAINED = "drained"
    LOADED = "loaded"
    AGREED = "agreed"
    LOST = "lost"  # dead or stalled; a new process takes its place


TRANSITIONS = {
    (Stage.STARTING, Event.READY): Stage.EMPTY,
    (Stage.EMPTY, Event.SWAP): Stage.DRAINING,
    (Stage.SERVING, Event.SWAP): Stage.DRAINING,
    (Stage.DRAINING, Event.SWAP): Stage.DRAINING,
    (Stage.PROBING, Event.SWAP): Stage.DRAINING,
    (Stage.DRAINING, Event.DRAINED): Stage.LOADING,
    (Stage.LOADING, Event.LOADED): Stage.PROBING,
    (Stage.PROBING, Event.AGREED): Stage.SERVING,
} | {(stage, Event.LOST): Stage.STARTING for stage in Stage}


@dataclass(frozen=True)
class WorkerState:
    """A worker's stage, and since when (any steady clock, seconds).

    Attributes:
        version: weights that it has or is being given; -1 = none.
    """

    stage: Stage
    since_s: float
    version: int = -1


def advance(state: WorkerState, event: Event, now_s: float, version: int | None = None) -> WorkerState:
    """The state after an event. A SWAP names the `version`; a lost worker's weights are gone.

    Raises:
        EngineError: the event cannot come in this state.
    """
    stage = TRANSITIONS.get((state.stage, event))
    if stage is None or (event is Event.SWAP) != (version is not None):
        raise EngineError(f"a worker that is {state.stage} with version {state.version} was told {event!r} {version}, which cannot be")
    if event is Event.LOST:
        version = -1
    return replace(state, stage=stage, since_s=now_s, version=state.version if version is None else version)


def overdue(state: WorkerState, limits_s: Mapping[Stage, float], now_s: float) -> str:
    """What to say of a worker that has been in its stage for longer than that stage's limit; empty within it or without one."""
    limit_s = limits_s.get(state.stage, float("inf"))
    return f"still {state.stage} after {limit_s:g} s" if now_s - state.since_s > limit_s else ""
