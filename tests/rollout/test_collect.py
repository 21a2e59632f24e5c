from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from factories import make_prompt, make_score, tiny_config
from ml_collections import ConfigDict

from jaxprorl.data.mixture import prompt_index
from jaxprorl.rollout.collect import Rollout, RolloutBatch, rewards
from jaxprorl.rollout.engine import Sampling
from jaxprorl.types import Completion, Prompt, Score


class FakeEngine:
    """Answers every prompt at once, in an order of its own; remembers what it was asked."""

    def __init__(self, order_seed: int | None = None):
        self.order = None if order_seed is None else np.random.RandomState(order_seed)
        self.calls: list[list[int]] = []
        self.samplings: list[Sampling] = []

    def set_weights(self, params: Any, version: int) -> None:
        raise AssertionError("a rollout swaps no weights")

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Completion]:
        self.calls.append([prompt.prompt_id for prompt in prompts])
        self.samplings.append(sampling)
        keys = [(prompt.prompt_id, sample) for prompt in prompts for sample in range(sampling.samples)]
        if self.order:
            self.order.shuffle(keys)
        return self.stream(keys)

    @staticmethod
    def stream(keys: list[tuple[int, int]]) -> Iterator[Completion]:
        for prompt_id, sample in keys:
            ids = np.array([prompt_id, sample], np.int32)
            yield Completion(prompt_id, sample, ids, np.zeros(2, np.float32), "stop", ((0, 0, 2),))


class FakeGraders:
    """Scores by a table: the first sample of a prompt in `solvable` gets 1; samples in `failing` cannot be graded."""

    def __init__(self, solvable: set[int], failing: set[tuple[int, int]] = frozenset()):  # type: ignore[assignment]
        self.solvable, self.failing = solvable, failing
        self.waiting: dict[tuple[int, int], Score] = {}

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        for completion in completions:
            key = completion.prompt_id, completion.sample
            assert prompt.prompt_id == completion.prompt_id and key not in self.waiting
            value = float(completion.prompt_id in self.solvable and completion.sample == 0)
            self.waiting[key] = make_score(value, "grader_error" if key in self.failing else "scored")

    def collect(self) -> dict[tuple[int, int], Score]:
        scores = dict(reversed(self.waiting.items()))
        self.waiting = {}
        return scores


def order(config: ConfigDict, count: int, size: int, first: int = 0) -> list[int]:
    """Prompt ids by position."""
    return [prompt_index(config.seed, position, size) for position in range(first, first + count)]


def roll_out(
    config: ConfigDict, solvable: set[int], size: int = 20, position: int = 0, engine: FakeEngine | None = None, **kwargs: Any
) -> RolloutBatch:
    prompts = tuple(make_prompt(i) for i in range(size))
    return Rollout(config, engine or FakeEngine(), FakeGraders(solvable, **kwargs), prompts, position, step=7).finish()  # type: ignore[arg-type]


def ids(groups: Sequence[Any]) -> list[int]:
    return [group.prompt.prompt_id for group in groups]


def test_a_full_batch_needs_no_refill() -> None:
    config, engine = tiny_config(), FakeEngine()
    batch = roll_out(config, set(range(20)), position=3, engine=engine)
    assert ids(batch.groups) == ids(batch.trained) == order(config, 4, 20, first=3)
    assert (batch.refills, batch.first_position, batch.positions) == ([], 3, 4)
    assert engine.samplings == [Sampling(4, config.rollout.temperature, config.seed, 7)]
    for group in batch.groups:
        assert [c.sample for c in group.completions] == [0, 1, 2, 3]
        assert [c.prompt_id for c in group.completions] == [group.prompt.prompt_id] * 4
        assert [s.value for s in group.scores] == [1, 0, 0, 0]


@pytest.mark.parametrize("order_seed", [1, 2, 3])
def test_the_batch_is_the_first_kept_groups_in_prompt_order_whatever_ended_first(order_seed: int) -> None:
    # Of the drawn prompts the 1st, 3rd and 4th have no spread. Two refills of two: the 5th to 8th prompt, all with spread. Kept are the
    # 2nd, 5th, 6th and 7th; the 8th is surplus.
    config = tiny_config()
    drawn = order(config, 8, 20)
    batch = roll_out(config, set(drawn) - {drawn[0], drawn[2], drawn[3]}, engine=FakeEngine(order_seed))
    assert ids(batch.groups) == drawn
    assert batch.has_spread == [False, True, False, False, True, True, True, True]
    assert batch.kept == [False, True, False, False, True, True, True, False]
    assert ids(batch.trained) == [drawn[1], drawn[4], drawn[5], drawn[6]]
    assert batch.refills == [2, 2]
    assert batch.positions == 8


def test_refilling_stops_at_the_cap_and_the_batch_is_what_there_is() -> None:
    config = tiny_config(batch__max_drawn_factor=1.75, batch__refill_prompts=2)  # 7 prompts at most: 4, then 2, then 1
    batch = roll_out(config, {order(config, 1, 20)[0]})
    assert len(batch.groups) == batch.positions == 7
    assert batch.refills == [2, 1]
    assert ids(batch.trained) == order(config, 1, 20)
    nothing = roll_out(config, set())
    assert nothing.trained == [] and len(nothing.groups) == 7


def test_a_factor_of_1_never_refills() -> None:
    batch = roll_out(tiny_config(batch__max_drawn_factor=1.0), set())
    assert (len(batch.groups), batch.refills) == (4, [])


def test_a_prompt_that_is_in_the_step_already_is_passed_over() -> None:
    # Six prompts, drawing from position 4: the last two of one epoch, then the next epoch, in which these two come again.
    config = tiny_config(batch__max_drawn_factor=3.0)
    engine = FakeEngine()
    batch = roll_out(config, set(), size=6, position=4, engine=engine)
    assert sorted(ids(batch.groups)) == list(range(6))  # each once, and no more although the cap is 12
    stream = order(config, batch.positions, 6, first=4)
    assert ids(batch.groups) == list(dict.fromkeys(stream))
    assert len(stream) == len(set(stream)) + sum(stream.count(i) - 1 for i in set(stream)) > 6
    assert stream[-1] not in stream[:-1]  # the last position used is the one that completed the batch
    assert [len(call) for call in engine.calls] == [4, 2]


def test_fewer_prompts_than_a_batch_wants_are_each_drawn_once() -> None:
    batch = roll_out(tiny_config(), {0, 1, 2}, size=3)
    assert sorted(ids(batch.groups)) == [0, 1, 2]
    assert batch.kept == [True] * 3
    assert (batch.refills, batch.positions) == ([], 3)


def test_steps_that_follow_each_other_use_every_position_once() -> None:
    config, position, seen = tiny_config(), 0, []
    for _ in range(5):
        batch = roll_out(config, set(), size=20, position=position)
        assert batch.first_position == position
        position += batch.positions
        seen += ids(batch.groups)
    assert seen[:20] == order(config, 20, 20)


def test_a_grader_error_gives_no_spread_and_stays_in_the_record() -> None:
    config = tiny_config(batch__max_drawn_factor=1.0)
    drawn = order(config, 4, 20)
    batch = roll_out(config, set(drawn), failing={(drawn[0], 0), (drawn[1], 3)})  # the first loses its only right answer
    assert batch.has_spread == [False, True, True, True]
    assert [score.outcome for score in batch.groups[0].scores] == ["grader_error", "scored", "scored", "scored"]
    reward_PN, mask_PN = rewards(batch.groups)
    np.testing.assert_array_equal(mask_PN[:2], [[0, 1, 1, 1], [1, 1, 1, 0]])
    np.testing.assert_array_equal(reward_PN[2:], [[1, 0, 0, 0]] * 2)


def test_a_spread_within_the_tolerance_is_dropped() -> None:
    config = tiny_config(batch__max_drawn_factor=1.0, algorithm__zero_spread_tolerance=1.0)
    assert roll_out(config, set(range(20))).trained == []


def test_sampling_starts_before_anyone_waits() -> None:
    engine = FakeEngine()
    Rollout(tiny_config(), engine, FakeGraders(set()), tuple(make_prompt(i) for i in range(9)), 0, step=0)  # type: ignore[arg-type]
    assert len(engine.calls) == 1
