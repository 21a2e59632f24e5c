from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from factories import make_group, make_prompt, make_score, tiny_config
from ml_collections import ConfigDict

from jaxprorl.data.mixture import prompt_index
from jaxprorl.rollout.collect import Rollout, RolloutBatch
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.groups import graded
from jaxprorl.types import Completion, Group, Prompt, Score


class FakeEngine:
    """Answers every prompt at once, in an order of its own; remembers what it was asked."""

    def __init__(self, order_seed: int | None = None, version: int = 0):
        self.version = version
        self.order = None if order_seed is None else np.random.RandomState(order_seed)
        self.calls: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.generated = 5  # by others, before

    def set_weights(self, params: Any, version: int) -> None:
        raise AssertionError("a rollout swaps no weights")

    def statistics(self) -> dict[str, float]:
        counted, self.generated = self.generated, 0
        return {"generated": counted}

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Completion]:
        self.generated += len(prompts)
        self.calls.append([prompt.prompt_id for prompt in prompts])
        self.samplings.append(sampling)
        keys = [(prompt.prompt_id, sample) for prompt in prompts for sample in range(sampling.samples)]
        if self.order:
            self.order.shuffle(keys)
        return self.stream(keys)

    def stream(self, keys: list[tuple[int, int]]) -> Iterator[Completion]:
        for prompt_id, sample in keys:
            ids = np.array([prompt_id, sample], np.int32)
            yield Completion(prompt_id, sample, ids, np.zeros(2, np.float32), "stop", ((self.version, 0, 2),))


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
    config: ConfigDict,
    solvable: set[int],
    size: int = 20,
    position: int = 0,
    engine: FakeEngine | None = None,
    failing: set[tuple[int, int]] = frozenset(),  # type: ignore[assignment]
    surplus: Sequence[Group] = (),
    version: int = 0,
) -> RolloutBatch:
    prompts, graders = tuple(make_prompt(i) for i in range(size)), FakeGraders(solvable, failing)
    return Rollout(config, engine or FakeEngine(), graders, prompts, position, 7, surplus, version).finish()  # type: ignore[arg-type]


def ids(groups: Sequence[Any]) -> list[int]:
    return [group.prompt.prompt_id for group in groups]


def test_a_full_batch_needs_no_refill() -> None:
    config, engine = tiny_config(), FakeEngine()
    batch = roll_out(config, set(range(20)), position=3, engine=engine)
    assert ids(batch.groups) == ids(batch.trained) == order(config, 4, 20, first=3)
    assert (batch.refills, batch.first_position, batch.positions) == ([], 3, 4)
    assert engine.samplings == [Sampling(4, config.rollout.temperature, config.seed, 7)]
    assert batch.engine == {"generated": 4}  # what others asked for before does not count
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
    assert batch.has_signal == [False, True, False, False, True, True, True, True]
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


def test_a_stage_draws_in_its_own_order_from_its_own_start() -> None:
    config = tiny_config()
    prompts, graders = tuple(make_prompt(i) for i in range(20)), FakeGraders(set(range(20)), frozenset())  # type: ignore[arg-type]
    batch = Rollout(config, FakeEngine(), graders, prompts, 3, 7, stage=2).finish()  # type: ignore[arg-type]
    assert ids(batch.groups) == [prompt_index(config.seed, position, 20, 2) for position in range(3, 7)]


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
    assert batch.has_signal == [False, True, True, True]
    assert [score.outcome for score in batch.groups[0].scores] == ["grader_error", "scored", "scored", "scored"]
    reward_PN, mask_PN = graded(batch.groups)
    np.testing.assert_array_equal(mask_PN[:2], [[0, 1, 1, 1], [1, 1, 1, 0]])
    np.testing.assert_array_equal(reward_PN[2:], [[1, 0, 0, 0]] * 2)


def test_a_spread_within_the_tolerance_is_dropped() -> None:
    config = tiny_config(batch__max_drawn_factor=1.0, filtering__tolerance=1.0)
    assert roll_out(config, set(range(20))).trained == []


# --- rules by domain -------------------------------------------------------------------------------------------------------------------


def test_a_domain_may_have_a_rule_of_its_own() -> None:
    config = tiny_config(filtering__tolerance=1.0, batch__max_drawn_factor=1.0)
    assert roll_out(config, set(range(20))).trained == []  # "spread": 1 - 0 is within the tolerance
    config.filtering.rules.domain = "accuracy"
    assert len(roll_out(config, set(range(20))).trained) == 4


# --- surplus ---------------------------------------------------------------------------------------------------------------------------


def test_on_policy_groups_without_room_are_discarded() -> None:
    batch = roll_out(tiny_config(batch__refill_prompts=4), set(range(20)) - {order(tiny_config(), 1, 20)[0]})
    assert batch.kept.count(True) == 4 and batch.has_signal.count(True) == 7
    assert batch.surplus == batch.expired == []


def test_within_the_staleness_bound_they_are_trained_on_first_and_save_drawing() -> None:
    config = tiny_config(batch__refill_prompts=4, rollout__max_staleness=1)
    drawn = order(config, 8, 20)
    first = roll_out(config, set(range(20)) - {drawn[0]}, engine=FakeEngine(version=5), version=5)
    assert ids(first.trained) == drawn[1:5] and ids(first.surplus) == drawn[5:8]
    engine = FakeEngine(version=6)
    second = roll_out(config, set(range(20)), position=first.positions, surplus=first.surplus, version=6, engine=engine)
    assert [len(call) for call in engine.calls] == [1]  # three of four are there
    assert ids(second.trained) == order(config, 9, 20)[5:9]
    assert second.carried == first.surplus and second.surplus == []


def test_carried_groups_leave_room_for_the_rest_and_do_not_count_towards_the_cap() -> None:
    # Two of four places are taken. Of two drawn prompts one has a signal; the refill of two brings two more, one too many.
    config = tiny_config(rollout__max_staleness=1, batch__max_drawn_factor=1.0)
    carried = [make_group(make_prompt(i), [[i]] * 4, [1, 0, 0, 0]) for i in (30, 31)]
    drawn = order(config, 4, 20)
    batch = roll_out(config, set(drawn[1:]), surplus=carried, version=1, engine=FakeEngine(version=1))
    assert (ids(batch.groups), batch.refills) == (drawn, [2])
    assert ids(batch.trained) == [30, 31, drawn[1], drawn[2]]
    assert ids(batch.surplus) == [drawn[3]]


def test_surplus_that_became_too_old_expires() -> None:
    config = tiny_config(rollout__max_staleness=2, batch__prompts=2)
    made = [make_group(make_prompt(i), [[i]] * 4, [1, 0, 0, 0]) for i in range(30, 36)]  # all of version 0
    third = roll_out(config, set(), surplus=made, version=1)
    assert ids(third.carried) == [30, 31] and ids(third.surplus) == [32, 33, 34, 35]  # at version 2 they are 2 old
    assert third.groups == []
    fourth = roll_out(config, set(), surplus=third.surplus, version=2)
    assert ids(fourth.carried) == [32, 33]
    assert fourth.surplus == [] and ids(fourth.expired) == [34, 35]


def test_a_prompt_that_waits_as_surplus_is_not_drawn_again() -> None:
    config = tiny_config(rollout__max_staleness=1)
    waiting = [make_group(make_prompt(order(config, 1, 20)[0]), [[1]] * 4, [1, 0, 0, 0])]
    batch = roll_out(config, set(range(20)), surplus=waiting, version=1)
    assert ids(batch.groups) == order(config, 4, 20)[1:]
    assert batch.positions == 4


def test_sampling_starts_before_anyone_waits() -> None:
    engine = FakeEngine()
    Rollout(tiny_config(), engine, FakeGraders(set()), tuple(make_prompt(i) for i in range(9)), 0, step=0)  # type: ignore[arg-type]
    assert len(engine.calls) == 1
