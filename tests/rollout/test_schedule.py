from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from factories import PROPERTY, make_prompt
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.rollout.cache import Layout
from jaxprorl.rollout.schedule import Schedule


def layout(shards: int = 1, slots: int = 8, samples: int = 4) -> Layout:
    bank_entries = -(-slots // samples)
    return Layout(shards, slots, samples, min(4, -(-slots // bank_entries)), bank_entries, (8,), (16, 16))


def run(sizes: Layout, prompts: int, length: Callable[[int, int], int], chunk: int) -> tuple[list[tuple[int, int]], float]:
    """Plays devices that make one token per running slot and step. Returns the samples as they end, and the slot use.

    A shard stops when none of its samples runs; all wait for the slowest one.
    """
    schedule = Schedule(sizes, [make_prompt(i, [1] * (1 + i % 8)) for i in range(prompts)], length)
    ended, used, spent = [], 0, 0
    held: dict[tuple[int, int], int] = {}  # (shard, entry) -> prompt in the cache
    filled: Counter[tuple[int, int]] = Counter()  # (shard, prompt) -> prefills
    while schedule.unfinished:
        prefills, started = schedule.admit()
        for prefill in prefills:
            assert all(
                running.entry != prefill.entry or slot // sizes.slots != prefill.shard or running.prompt is prefill.prompt
                for slot, running in schedule.running.items()
            ), "an entry is overwritten while a sample still reads it"
            held[prefill.shard, prefill.entry] = prefill.prompt.prompt_id
            filled[prefill.shard, prefill.prompt.prompt_id] += 1
        assert len(started) == len(set(started))
        assert schedule.running and max(schedule.running) < sizes.shards * sizes.slots
        for slot, running in schedule.running.items():
            assert held[slot // sizes.slots, running.entry] == running.prompt.prompt_id
            assert 0 <= running.entry < sizes.entries
        reach = schedule.reach(chunk)
        slowest = 0
        for shard in range(sizes.shards):
            mine = [running for slot, running in schedule.running.items() if slot // sizes.slots == shard]
            left = [running.limit - running.made for running in mine]
            steps = min(chunk, max(left, default=0))
            slowest = max(slowest, steps)
            used += sum(min(steps, rest) for rest in left)
            assert reach[shard, -1] == max((min(r.made + chunk, r.limit) for r in mine), default=0)
            for bank in range(sizes.banks):
                inside = [len(r.prompt.token_ids) for r in mine if r.entry // sizes.bank_entries == bank]
                assert reach[shard, bank] == max(inside, default=0)
        spent += slowest * sizes.slots * sizes.shards
        for slot, running in list(schedule.running.items()):
            running.made = min(running.limit, running.made + chunk)
            if running.made == running.limit:
                schedule.end(slot)
                ended.append((running.prompt.prompt_id, running.sample))
    assert max(filled.values()) == 1 or sizes.entries < prompts, "a prompt is prefilled twice though there was room to keep it"
    return ended, used / spent


@given(
    shards=st.integers(1, 3),
    slots=st.integers(1, 9),
    samples=st.integers(1, 6),
    prompts=st.integers(1, 12),
    chunk=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
@PROPERTY
def test_every_sample_runs_exactly_once_and_reads_its_own_prompt(
    shards: int, slots: int, samples: int, prompts: int, chunk: int, seed: int
) -> None:
    lengths = np.random.RandomState(seed).randint(1, 30, (prompts, samples))
    ended, use = run(layout(shards, slots, samples), prompts, lambda prompt, sample: int(lengths[prompt, sample]), chunk)
    assert sorted(ended) == [(prompt, sample) for prompt in range(prompts) for sample in range(samples)]
    assert 0 < use <= 1


def test_whole_groups_of_equal_length_leave_no_slot_idle() -> None:
    ended, use = run(layout(shards=2, slots=8, samples=4), 12, lambda *_: 16, chunk=4)
    assert use == 1.0 and len(ended) == 48


def test_a_free_slot_takes_the_next_sample_of_the_same_prompt_first() -> None:
    schedule = Schedule(layout(slots=3, samples=4), [make_prompt(0), make_prompt(1)], lambda *_: 5)
    prefills, started = schedule.admit()
    assert [prefill.prompt.prompt_id for prefill in prefills] == [0] and started == [0, 1, 2]
    assert schedule.admit() == ([], [])
    schedule.end(1)
    prefills, started = schedule.admit()
    assert (prefills, started) == ([], [1])
    assert (schedule.running[1].prompt.prompt_id, schedule.running[1].sample) == (0, 3)
    schedule.end(0)
    prefills, started = schedule.admit()
    assert [(prefill.prompt.prompt_id, prefill.entry) for prefill in prefills] == [(1, 1)] and started == [0]


def test_prompts_go_to_the_shard_with_the_most_room() -> None:
    schedule = Schedule(layout(shards=2, slots=8, samples=4), [make_prompt(i) for i in range(3)], lambda *_: 5)
    prefills, _ = schedule.admit()
    assert [prefill.shard for prefill in prefills] == [0, 1, 0]


def places(schedule: Schedule) -> dict[int, list[int]]:
    """Samples that run, by slot order, of each shard of four slots."""
    return {shard: [running.sample for slot, running in sorted(schedule.running.items()) if slot // 4 == shard] for shard in range(2)}


def test_shards_without_a_prompt_take_the_samples_that_wait_elsewhere() -> None:
    schedule = Schedule(layout(shards=2, slots=4, samples=8), [make_prompt(7)], lambda *_: 5)
    prefills, started = schedule.admit()
    assert [(prefill.prompt.prompt_id, prefill.shard, prefill.entry) for prefill in prefills] == [(7, 0, 0), (7, 1, 0)]
    assert len(started) == 8 and places(schedule) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    for slot in range(8):
        schedule.end(slot)
    assert not schedule.unfinished


def test_samples_that_have_a_slot_stay_with_their_prompt() -> None:
    schedule = Schedule(layout(shards=2, slots=4, samples=4), [make_prompt(7)], lambda *_: 5)
    prefills, _ = schedule.admit()
    assert [prefill.shard for prefill in prefills] == [0] and places(schedule) == {0: [0, 1, 2, 3], 1: []}


def test_the_last_samples_go_where_slots_are_free_and_their_prompt_is_prefilled_there_once() -> None:
    schedule = Schedule(layout(shards=2, slots=4, samples=7), [make_prompt(0), make_prompt(1)], lambda *_: 5)
    assert [(prefill.prompt.prompt_id, prefill.shard) for prefill in schedule.admit()[0]] == [(0, 0), (1, 1)]
    for slot in (0, 1, 2, 0, 1):  # three samples of prompt 0 wait: after these nothing does in shard 0
        schedule.end(slot)
        prefills, started = schedule.admit()
        if schedule.running[slot].prompt.prompt_id == 0:
            assert (prefills, started) == ([], [slot])
        elif slot == 0:
            assert [(prefill.prompt.prompt_id, prefill.shard, prefill.entry) for prefill in prefills] == [(1, 0, 1)]
        else:
            assert (prefills, started) == ([], [slot])  # prompt 1 is there already
    assert [schedule.running[slot].prompt.prompt_id for slot in range(4)] == [1, 1, 0, 0]
    assert [schedule.running[slot].sample for slot in (0, 1)] == [6, 5]
    rest = []
    while schedule.unfinished:
        running = schedule.end(min(schedule.running))
        rest.append((running.prompt.prompt_id, running.sample))
        schedule.admit()
    assert sorted(rest) == [(0, 3), (0, 6), *((1, n) for n in range(7))]


def test_a_prompt_whose_samples_wait_elsewhere_stays_in_the_cache_between_two_of_them() -> None:
    schedule = Schedule(layout(shards=2, slots=1, samples=16), [make_prompt(7)], lambda *_: 5)
    filled = []
    while schedule.unfinished:
        prefills, _ = schedule.admit()
        filled += [prefill.shard for prefill in prefills]
        for slot in list(schedule.running):
            schedule.end(slot)
    assert filled == [0, 1]


def test_a_prompt_that_is_only_kept_makes_room_for_another_ones_samples() -> None:
    schedule = Schedule(Layout(3, 1, 3, 1, 1, (8,), (16,)), [make_prompt(i) for i in range(3)], lambda *_: 5)  # one slot, one entry each
    schedule.admit()

    def next_in_shard_1() -> list[tuple[int, int, int]]:
        schedule.end(1)
        return [(prefill.prompt.prompt_id, prefill.shard, prefill.entry) for prefill in schedule.admit()[0]]

    assert [next_in_shard_1() for _ in range(3)] == [[], [], [(0, 1, 0)]]  # prompt 1 is done; a sample of prompt 0 comes from shard 0
    assert next_in_shard_1() == [(2, 1, 0)]  # another one waits there still, but more of prompt 2 do in shard 2
    while schedule.unfinished:
        schedule.end(max(schedule.running))
        schedule.admit()


def test_a_prompt_may_stand_in_line_twice() -> None:
    schedule = Schedule(layout(shards=2, slots=4, samples=3), [make_prompt(0)] * 5, lambda *_: 5)
    ended = []
    while schedule.unfinished:
        schedule.admit()
        for slot in sorted(schedule.running)[1::2] or list(schedule.running):
            ended.append(schedule.end(slot).sample)
    assert sorted(ended) == sorted([0, 1, 2] * 5)


def test_no_sample_moves_while_prompts_are_in_line() -> None:
    schedule = Schedule(layout(shards=2, slots=2, samples=4), [make_prompt(i) for i in range(3)], lambda *_: 5)
    schedule.admit()
    schedule.end(0)
    schedule.end(1)
    schedule.admit()  # the last two of prompt 0
    schedule.end(0)
    assert [(prefill.prompt.prompt_id, prefill.shard) for prefill in schedule.admit()[0]] == [(2, 0)]


def test_fewer_prompts_than_shards_take_as_long_as_their_samples_need() -> None:
    for shards, samples, slots in ((4, 16, 4), (3, 6, 2), (8, 8, 1)):
        ended, use = run(layout(shards, slots, samples), 1, lambda *_: 16, chunk=4)
        assert use == 1.0 and len(ended) == samples


def skewed_lengths(prompts: int, samples: int, median: int, seed: int) -> np.ndarray:
    """Lognormal lengths, cut at ten times the median."""
    lengths = np.exp(0.9 * np.random.RandomState(seed).standard_normal((prompts, samples)))
    return np.clip(np.round(median * lengths), 1, 10 * median).astype(int)


@pytest.mark.parametrize(
    ("samples", "shards", "per_slot", "least"), [(8, 1, 64, 0.85), (8, 2, 64, 0.85), (16, 1, 64, 0.85), (1, 1, 64, 0.85), (16, 1, 8, 0.55)]
)
def test_skewed_lengths_leave_few_slots_idle(samples: int, shards: int, per_slot: int, least: float) -> None:
    # At the end of a step nothing is left to start, and slots wait for the longest: the fewer samples a slot has, the more that costs.
    # Eight per slot are those of prorl_v1.
    lengths = skewed_lengths(64 * per_slot // samples * shards, samples, 100, seed=0)
    assert lengths.max() == 1000 and 90 <= np.median(lengths) <= 110
    ended, use = run(layout(shards, 64, samples), len(lengths), lambda p, s: int(lengths[p, s]), chunk=16)
    assert len(ended) == lengths.size
    print(f"slot use, {samples} samples, {shards} shards, {per_slot} per slot: {use:.3f}")
    assert use >= least
