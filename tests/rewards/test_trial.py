import json
import re
import time
from pathlib import Path

import pytest
from factories import tiny_config

from jaxprorl.data.prompts import Item
from jaxprorl.errors import RewardError
from jaxprorl.inputs import read_inputs
from jaxprorl.rewards.trial import made_up, try_rewards

ITEM = Item("jsonl", "sums", ({"role": "user", "content": "6 * 7 ="},), "42", "mine.jsonl, line 3", {"bonus": 1})


def trial(reward: str, evaluation: str = "", **changes: object) -> None:
    try_rewards(tiny_config(reward=reward, evaluation__reward=evaluation, grading__timeout_s=1.0, **changes), ITEM, ITEM)


def test_sound_rewards_pass_whatever_numbers_they_return() -> None:
    trial("jaxprorl.rewards.text:exact_match", "sample_rewards:negative - 0.5 * sample_rewards:right_but_long")


def test_a_made_up_answer_is_right_or_empty() -> None:
    from jaxprorl.rewards.text import exact_match
    from jaxprorl.rewards.trial import _prompt

    assert [exact_match(text, _prompt(ITEM)) for text in made_up(ITEM)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("sample_rewards:always_raises", "first: KeyError: 'gold'"),
        ("sample_rewards:sums_only", "first: TypeError: reward returned NoneType"),
        ("sample_rewards:always_dies", "first: grader process died with exit code 5"),
        ("sample_rewards:length + sample_rewards:always_raises", "first: KeyError"),
        pytest.param("sample_rewards:always_hangs", "first: no result within 1.0 s, process killed", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_cannot_work_is_refused_with_question_and_error(reward: str, says: str) -> None:
    for field, rewards in (("reward", (reward,)), ("evaluation.reward", ("sample_rewards:length", reward))):
        with pytest.raises(RewardError) as error:
            trial(*rewards)
        assert str(error.value).startswith(f"{field} = {reward!r} fails: made-up answers to mine.jsonl, line 3: 2 of 2 samples")
        assert says in str(error.value)
        assert "\n" not in str(error.value)


def test_a_reward_that_fails_on_an_empty_answer_alone_is_left_to_the_limit() -> None:
    with pytest.raises(RewardError, match=r"1 of 2 samples could not be graded .first: ValueError: could not convert string to float"):
        trial("sample_rewards:needs_a_number")
    trial("sample_rewards:needs_a_number", grading__max_error_share=0.5)


def test_a_process_that_cannot_prepare_is_refused_too() -> None:
    with pytest.raises(RewardError, match=r"reward = 'evil_prepare:score' fails: the grader process .* cannot start: "):
        trial("evil_prepare:score")


def test_the_rewards_of_a_run_are_tried_on_its_own_rows_before_anything_long(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{split} {i} =", "answer": str(i), "split": split} for split in ("held_out", "validation", "train") for i in range(9)
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(data__source=f"jsonl:{file}", reward="sample_rewards:always_raises", evaluation__reward="sample_rewards:length")
    with pytest.raises(RewardError, match=rf"made-up answers to {re.escape(str(file))}\D*19: 2 of 2"):
        read_inputs(config)
    config.reward, config.evaluation.reward = "sample_rewards:length", "sample_rewards:always_raises"
    began = time.monotonic()
    with pytest.raises(RewardError, match=rf"^evaluation.reward = .*made-up answers to {re.escape(str(file))}\D*1: 2 of 2"):
        read_inputs(config)
    assert time.monotonic() - began < 120
