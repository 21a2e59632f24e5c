import dataclasses
import json
from typing import Any

import numpy as np
from factories import make_group, make_prompt, random_groups, tiny_config

from jaxprorl.rollout.surplus import decode, encode, staleness, usable
from jaxprorl.types import Group


def same(a: Group, b: Group) -> bool:
    """Equal in every field, arrays bit for bit."""
    for left, right in zip(a.completions, b.completions, strict=True):
        for name in ("token_ids", "logprobs"):
            x, y = getattr(left, name), getattr(right, name)
            if x.dtype != y.dtype or x.tobytes() != y.tobytes():
                return False
        if any(
            getattr(left, f.name) != getattr(right, f.name) for f in dataclasses.fields(left) if f.name not in ("token_ids", "logprobs")
        ):
            return False
    return a.scores == b.scores and a.prompt is b.prompt


def test_groups_survive_json_bit_for_bit() -> None:
    groups = random_groups(3)
    odd = np.array([-0.1, np.float32(1e-45), -np.inf, np.nan], np.float32)
    completion = dataclasses.replace(
        groups[0].completions[0],
        token_ids=np.array([0, 1, 2**31 - 1, 5], np.int32),
        logprobs=odd,
        finish_reason="length",
        version_spans=((3, 0, 1), (4, 1, 4)),
    )
    groups[0] = dataclasses.replace(groups[0], completions=(completion, *groups[0].completions[1:]))
    groups[1] = make_group(make_prompt(1), [[1], [2]], [None, 0.1 + 0.2])
    prompts = [group.prompt for group in groups] + [make_prompt(99)]
    again = decode(json.loads(json.dumps(encode(groups))), prompts)
    assert all(same(a, b) for a, b in zip(again, groups, strict=True))
    assert not same(again[0], groups[2])


def test_scores_of_before_solved_was_stored_are_solved_from_a_reward_of_1() -> None:
    groups = [make_group(make_prompt(1), [[1], [2], [3], [4]], [1.0, 0.5, None, 1.0 - 1e-12])]
    stored = json.loads(json.dumps(encode(groups)))
    for score in stored[0]["scores"]:
        del score["solved"]
    (group,) = decode(stored, [groups[0].prompt])
    assert [score.solved for score in group.scores] == [True, False, False, True]


def test_staleness_counts_from_the_oldest_token() -> None:
    group = make_group(make_prompt(0), [[1, 2], [3]], [1.0, 0.0])
    spans = [((7, 0, 1), (8, 1, 2)), ((8, 0, 1),)]
    made = [dataclasses.replace(c, version_spans=s) for c, s in zip(group.completions, spans, strict=True)]
    assert staleness(dataclasses.replace(group, completions=tuple(made)), 9) == 2


def test_groups_whose_prompt_is_gone_are_not_decoded() -> None:
    groups = random_groups(3)
    found = decode(encode(groups), [groups[2].prompt, groups[0].prompt])
    assert [group.prompt.prompt_id for group in found] == [0, 2]


def kept(groups: list[Group], version: int = 2, temperature: float | None = 1.2, elsewhere: int = -1, **changes: Any) -> list[int]:
    """Ids of the groups that steps at temperature 1.2, four samples and 12 tokens may train on, but for `changes`."""
    prompts = [group.prompt for group in groups if group.prompt.prompt_id != elsewhere]
    config = tiny_config(**{"rollout__max_staleness": 2} | changes)
    return [group.prompt.prompt_id for group in usable(groups, config, prompts, version, temperature)]


def row_of(number: int, length: int, samples: int = 4, oldest: int = 0) -> Group:
    group = make_group(make_prompt(number), [[1] * length] * samples, [1.0] + [0.0] * (samples - 1))
    completions = tuple(dataclasses.replace(c, version_spans=((oldest, 0, length),)) for c in group.completions)
    return dataclasses.replace(group, completions=completions)


def test_groups_are_taken_over_that_fit_samples_limit_mix_and_age() -> None:
    groups = [row_of(0, 12), row_of(1, 2, samples=3), row_of(2, 13), row_of(3, 2, oldest=1), row_of(4, 2)]
    assert kept(groups, elsewhere=4) == [0, 3]
    assert kept(groups, elsewhere=4, rollout__max_response_tokens=13) == [0, 2, 3]
    assert kept(groups, elsewhere=4, rollout__samples_per_prompt=3) == [1]
    assert kept(groups, version=3) == [3]
    assert kept(groups, rollout__max_staleness=0) == []


def test_groups_sampled_at_another_temperature_or_at_one_that_nobody_knows_are_left_out() -> None:
    groups = [row_of(0, 12), row_of(1, 2)]
    assert kept(groups) == [0, 1]
    assert kept(groups, rollout__temperature=0.6) == kept(groups, temperature=0.6) == kept(groups, temperature=None) == []
    assert kept(groups, temperature=0.6, rollout__temperature=0.6) == [0, 1]


def test_answers_that_a_lower_limit_cut_are_left_out() -> None:
    group = row_of(0, 12)
    cut = dataclasses.replace(group.completions[0], finish_reason="length")
    groups = [dataclasses.replace(group, completions=(cut, *group.completions[1:])), row_of(1, 12)]
    assert kept(groups) == [0, 1]
    assert kept(groups, rollout__max_response_tokens=13) == [1]


def test_groups_without_a_signal_by_the_filter_of_now_are_left_out() -> None:
    same = make_group(make_prompt(0), [[1]] * 4, [1.0] * 4)
    assert kept([same, row_of(1, 2)]) == [1]
    assert kept([same, row_of(1, 2)], filtering__rule="off") == [0, 1]
