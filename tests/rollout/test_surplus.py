import dataclasses
import json

import numpy as np
from factories import make_group, make_prompt, random_groups, tiny_config
from ml_collections import ConfigDict

from jaxprorl.rollout.surplus import carried_over, decode, encode, staleness, usable
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


def test_staleness_counts_from_the_oldest_token() -> None:
    group = make_group(make_prompt(0), [[1, 2], [3]], [1.0, 0.0])
    spans = [((7, 0, 1), (8, 1, 2)), ((8, 0, 1),)]
    made = [dataclasses.replace(c, version_spans=s) for c, s in zip(group.completions, spans, strict=True)]
    assert staleness(dataclasses.replace(group, completions=tuple(made)), 9) == 2


def test_what_a_changed_run_cannot_train_on_is_left_out() -> None:
    old, gone, small, long, fits = (
        make_group(make_prompt(i), [[1] * length] * samples, [1.0] + [0.0] * (samples - 1))
        for i, (length, samples) in enumerate([(2, 4), (2, 4), (2, 3), (13, 4), (12, 4)])
    )
    fresh = [dataclasses.replace(c, version_spans=((1, 0, 2),)) for c in old.completions]
    groups = [dataclasses.replace(old, completions=tuple(fresh)), gone, small, long, fits]
    found = decode(encode(groups), [group.prompt for group in groups if group is not gone])
    assert [group.prompt.prompt_id for group in found] == [0, 2, 3, 4]
    # Four samples of at most 12 tokens; all but the first are of version 0.
    assert [group.prompt.prompt_id for group in usable(found, tiny_config(rollout__max_staleness=3), 3)] == [0, 4]
    assert [group.prompt.prompt_id for group in usable(found, tiny_config(rollout__max_staleness=2), 3)] == [0]
    assert usable(found, tiny_config(), 3) == []


def test_a_stage_takes_over_what_fits_its_samples_its_limit_its_mix_and_its_temperature() -> None:
    fits, small, long, elsewhere = (
        make_group(make_prompt(i), [[1] * length] * samples, [1.0] + [0.0] * (samples - 1))
        for i, (length, samples) in enumerate([(12, 4), (2, 3), (13, 4), (2, 4)])
    )
    groups, prompts = [elsewhere, fits, small, long], [fits.prompt, small.prompt, long.prompt]
    before = tiny_config(rollout__max_staleness=2)

    def kept(after: ConfigDict, version: int = 2) -> list[int]:
        return [group.prompt.prompt_id for group in carried_over(groups, before, after, prompts, version)]

    assert kept(before) == [0]
    assert kept(tiny_config(rollout__max_staleness=2, rollout__max_response_tokens=13)) == [0, 2]
    assert kept(tiny_config(rollout__max_staleness=2, rollout__samples_per_prompt=3)) == [1]
    assert kept(tiny_config(rollout__max_staleness=2, rollout__temperature=1.0)) == []
    assert kept(before, version=3) == [] == kept(tiny_config())
