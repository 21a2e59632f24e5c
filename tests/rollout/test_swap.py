"""The state machine of a worker: every pair of stage and event, and the clock."""

import itertools

import pytest

from jaxprorl.errors import EngineError
from jaxprorl.rollout.swap import Event, Stage, WorkerState, advance, overdue

LEGAL = {
    ("starting", "ready"): "empty",
    ("empty", "swap"): "draining",
    ("draining", "drained"): "loading",
    ("loading", "loaded"): "probing",
    ("probing", "agreed"): "serving",
    ("serving", "swap"): "draining",
    ("draining", "swap"): "draining",
    ("probing", "swap"): "draining",
    ("starting", "lost"): "starting",
    ("empty", "lost"): "starting",
    ("draining", "lost"): "starting",
    ("loading", "lost"): "starting",
    ("probing", "lost"): "starting",
    ("serving", "lost"): "starting",
}


@pytest.mark.parametrize(("stage", "event"), itertools.product(Stage, Event))
def test_every_event_in_every_stage(stage: Stage, event: Event) -> None:
    state = WorkerState(stage, since_s=1.0, version=4)
    version = 5 if event is Event.SWAP else None
    if (stage, event) not in LEGAL:
        with pytest.raises(EngineError, match=f"{stage} with version 4"):
            advance(state, event, 2.0, version)
        return
    after = advance(state, event, 2.0, version)
    assert (after.stage, after.since_s) == (LEGAL[stage, event], 2.0)
    assert after.version == {"swap": 5, "lost": -1}.get(event, 4)


def test_a_swap_names_its_version_and_nothing_else_does() -> None:
    with pytest.raises(EngineError):
        advance(WorkerState(Stage.SERVING, 0.0, 1), Event.SWAP, 1.0)
    with pytest.raises(EngineError):
        advance(WorkerState(Stage.LOADING, 0.0, 1), Event.LOADED, 1.0, version=2)


def test_a_stage_is_overdue_after_its_own_limit() -> None:
    limits_s = {Stage.LOADING: 10.0}
    loading = WorkerState(Stage.LOADING, since_s=100.0, version=3)
    assert overdue(loading, limits_s, 110.0) == ""
    assert overdue(loading, limits_s, 110.1) == "still loading after 10 s"
    assert overdue(WorkerState(Stage.SERVING, 100.0, 3), limits_s, 1e9) == "", "serving has no end"
