"""What the loop counts, warns of and stops for, without a run around it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from factories import random_groups, tiny_config
from ml_collections import ConfigDict

from jaxprorl.errors import NonFiniteError
from jaxprorl.rollout.collect import RolloutBatch
from jaxprorl.state import RunState
from jaxprorl.train import Step, advance, check_batch, check_updates


class FakeRecorder:
    """Remembers events and notes."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.progress = SimpleNamespace(note=self.notes.append)

    def event(self, step: int, kind: str, **fields: Any) -> None:
        self.events.append((step, kind, fields))


def fake_training(config: ConfigDict) -> Any:
    return SimpleNamespace(config=config, recorder=FakeRecorder())


def batch_of(kept: int, positions: int = 7) -> RolloutBatch:
    groups = random_groups(5)
    has_signal = [i < kept for i in range(5)]
    return RolloutBatch(groups=groups, kept=has_signal, has_signal=has_signal, positions=positions, rollout_s=2.0)


def test_steps_at_the_cap_are_counted_in_a_row() -> None:
    config, run = tiny_config(), RunState()
    for kept, expected in ((3, 1), (0, 2), (4, 0), (2, 1)):
        run = advance(config, run, batch_of(kept))
        assert run.cap_steps == expected
    assert (run.step, run.policy_version, run.prompts_consumed, run.rollout_s) == (4, 4, 28, 8.0)
    assert run.completion_tokens == 4 * sum(len(c.token_ids) for group in random_groups(5) for c in group.completions)


def test_a_batch_that_is_not_full_is_warned_of_and_logged() -> None:
    training = fake_training(tiny_config())
    check_batch(training, 6, batch_of(4))
    assert training.recorder.events == training.recorder.notes == []
    check_batch(training, 6, batch_of(3))
    assert training.recorder.events == [(6, "cap_reached", {"drawn": 5, "kept": 3, "wanted": 4})]
    (note,) = training.recorder.notes
    assert note.startswith("WARNING: step 6: 5 prompts drawn (batch.max_drawn_factor) and only 3 of 4 groups")


def test_skipped_updates_are_warned_of_and_stop_the_run_at_the_limit() -> None:
    training = fake_training(tiny_config(optimizer__max_skipped_updates=3))

    def after(skipped: list[int], in_a_row: int) -> None:
        metrics = {"updates.skipped": np.array(skipped)}
        done = Step(9, RolloutBatch(), np.zeros((4, 4)), {}, metrics, {}, 0.0)  # type: ignore[arg-type]
        check_updates(training, done, RunState(skipped_in_a_row=in_a_row))

    after([0, 0], 0)
    assert training.recorder.events == training.recorder.notes == []
    after([1, 1], 2)
    assert training.recorder.events == [(9, "skipped_updates", {"count": 2, "in_a_row": 2})]
    assert training.recorder.notes == ["WARNING: step 9: 2 updates skipped, their gradient or change is not finite"]
    with pytest.raises(NonFiniteError, match=r"step 9: 3 updates in a row .*optimizer\.max_skipped_updates = 3.*learning_rate"):
        after([1, 0], 3)
