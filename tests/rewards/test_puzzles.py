import json
from functools import cache
from typing import Any

import hostile
import numpy as np
import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from configs import quickstart
from jaxprorl.rewards import puzzles
from jaxprorl.rewards.puzzles import check_task, continuous, exact
from jaxprorl.types import Prompt

QUICKSTART = {name: dict(args) for name, args in quickstart.get_config().data.tasks.items()}
REFUSED = {"game_of_life_halting", "coin_flip", "arc_agi", "rearc", "composite", *puzzles.EXECUTES_ANSWER}
SLOW_TO_MAKE = {"futoshiki", "knight_swap", "zebra_puzzles"}
GRADABLE = sorted(set(DATASETS) - REFUSED)


@cache
def prompts(task: str, n: int = 40) -> list[Prompt]:
    dataset = reasoning_gym.create_dataset(task, seed=11, size=n, **QUICKSTART.get(task, {}))
    entries = [json.loads(json.dumps(dataset[i], default=str)) for i in range(n)]
    return [
        Prompt(i, dataset.category, np.zeros(1, np.int32), task, entry["answer"] or "", {"task": task, "entry": entry})
        for i, entry in enumerate(entries)
    ]


def made(task: str, answer: str, **metadata: Any) -> Prompt:
    return Prompt(0, "x", np.zeros(1, np.int32), task, answer, {"task": task, "entry": {"answer": answer, "metadata": metadata}})


def wrap(answer: str) -> str:
    return f"<think>w</think><answer>{answer}</answer>"


def both(answer: str, prompt: Prompt) -> tuple[float, float]:
    return exact(wrap(answer), prompt), continuous(wrap(answer), prompt)


@pytest.mark.parametrize("task", QUICKSTART)
def test_quickstart_tasks_pay_their_answer_and_only_it(task: str) -> None:
    items = prompts(task)
    for prompt in items:
        assert both(prompt.answer, prompt) == (1.0, 1.0)
        assert both(f"  {prompt.answer}\n", prompt) == (1.0, 1.0)
        assert exact(prompt.answer, prompt) == 0.0  # no tags
        assert exact(f"<think><answer>{prompt.answer}</answer>", prompt) == 0.0  # still thinking
        for other in items:
            if other.answer != prompt.answer:
                assert exact(wrap(other.answer), prompt) == 0.0
                assert continuous(wrap(other.answer), prompt) < 1.0


@pytest.mark.parametrize("task", QUICKSTART)
@pytest.mark.parametrize("change", ["{} x", "x {}", "{}9", "{} {}", "9{}", "{}, 1, 2, 3"])
def test_quickstart_tasks_do_not_pay_for_more_than_the_answer(task: str, change: str) -> None:
    for prompt in prompts(task):
        value, partial = both(change.format(prompt.answer, prompt.answer), prompt)
        assert value == 0.0
        most = {"spell_backward": 0.8, "complex_arithmetic": 0.99}.get(task, 0.0)  # 4.00i9 is near, the others are not graded
        assert partial == pytest.approx(most) or partial < most


@pytest.mark.parametrize("length", range(3, 11))
def test_spell_backward_tail_is_not_solved_at_any_length(length: int) -> None:
    word = "abcdefghij"[:length]
    prompt = made("spell_backward", word)
    assert both(word, prompt) == (1.0, 1.0)
    assert both(word + "tail", prompt) == (0.0, pytest.approx(0.8))


def test_spell_backward_partial_credit_is_monotonic() -> None:
    prompt = made("spell_backward", "abcdef")
    values = [continuous(wrap("abcdef"[:n].ljust(6, "?")), prompt) for n in range(7)]
    assert values == sorted(values) and values[0] == 0.0 and values[6] == 1.0
    assert values[3] == pytest.approx(0.5)


def test_complex_arithmetic_by_hand() -> None:
    prompt = made("complex_arithmetic", "3.0 + 4.0i", result=[3, 4])
    for right in ("3.0 + 4.0i", "3+4i", "(3 + 4i)", "3+4j"):
        assert both(right, prompt) == (1.0, 1.0)
    assert both("3 + 5i", prompt) == (0.0, pytest.approx(np.exp(-1)))
    assert both("9 + 14i", prompt) == (0.0, 0.0)  # the scorer pays 9e-6
    for trap in ("nan", "NaN", "n an", "nan+nani", "3+nani", "nan+4i", "inf", "-inf-infi", "1e308+1e308i", "1e999"):
        assert both(trap, prompt) == (0.0, 0.0)
    values = [continuous(wrap(f"3 + {4 + d}i"), prompt) for d in (0, 1, 2, 3, 4, 9)]
    assert values == sorted(values, reverse=True)
    assert both("3.0000001 + 4i", prompt) == (0.0, pytest.approx(0.99))


def test_chain_sum_by_hand() -> None:
    prompt = made("chain_sum", "12")
    for right in ("12", "+12", "012", "12.0", "1,2"):  # reasoning-gym drops commas
        assert both(right, prompt) == (1.0, 1.0)
    for wrong in ("11", "-12", "nan", "sNaN", "12 13", "10 11 12 13", "121", "12,", "twelve"):
        assert continuous(wrap(wrong), prompt) == (1.0 if wrong == "12," else 0.0)


def test_number_filtering_by_hand() -> None:
    prompt = made("number_filtering", "['3', '4']")
    assert both("['3', '4']", prompt) == (1.0, 1.0)
    for wrong in ("['4', '3']", "['3']", "[]", "3, 4", "['3', '4'] ['5']"):
        assert both(wrong, prompt) == (0.0, 0.0)


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_untrustworthy_tasks_are_refused(task: str) -> None:
    with pytest.raises(ValueError, match=rf"{task}.*remove it from data.tasks"):
        check_task(task)
    with pytest.raises(ValueError, match=task):
        exact(wrap("1"), made(task, "1"))


def test_refused_for_executing_are_the_nine() -> None:
    assert len(puzzles.EXECUTES_ANSWER) == 9 and set(DATASETS) >= puzzles.EXECUTES_ANSWER


def test_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="no task 'chain_summ'"):
        check_task("chain_summ")


def test_prompt_without_puzzle_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="has no entry of task 'chain_sum'"):
        exact(wrap("1"), Prompt(5, "x", np.zeros(1, np.int32), "chain_sum", "1"))
    other = made("spell_backward", "1")
    with pytest.raises(ValueError, match="prompt 0"):
        exact(wrap("1"), Prompt(0, "x", np.zeros(1, np.int32), "chain_sum", "1", other.item))


def test_broken_scorer_is_an_error_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(answer: str, entry: Any) -> float:
        raise KeyError("metadata")

    monkeypatch.setattr(puzzles, "_scorer", lambda name: broken)
    with pytest.raises(KeyError):
        exact(wrap("1"), made("chain_sum", "2"))


def test_text_that_makes_a_sound_scorer_raise_is_wrong() -> None:
    prompt = prompts("prime_factorization", 3)[0]
    scorer = reasoning_gym.get_score_answer_fn("prime_factorization")
    with pytest.raises(ValueError):
        scorer("The answer is 3", prompt.item["entry"])
    assert both("The answer is 3", prompt) == (0.0, 0.0)
    assert both(prompt.answer, prompt) == (1.0, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.5, 1.0000000000000002, 1.5])
def test_no_value_outside_the_range(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(puzzles, "_scorer", lambda name: lambda answer, entry: value)
    solved, partial = both("x", made("chain_sum", "2"))
    assert solved == 0.0 and 0.0 <= partial < 1.0


def test_scorer_is_made_once() -> None:
    assert puzzles._scorer("chain_sum") is puzzles._scorer("chain_sum")


@pytest.mark.parametrize("kind", hostile.TEXTS)
def test_quickstart_tasks_survive_hostile_text(kind: str) -> None:
    for task in QUICKSTART:
        for prompt in prompts(task)[:5]:
            for completion in hostile.completions(hostile.TEXTS[kind]):
                solved, partial = exact(completion, prompt), continuous(completion, prompt)
                assert solved in (0.0, 1.0) and 0.0 <= partial <= 1.0
                assert (solved == 1.0) == (partial == 1.0)
                assert solved == 0.0, (task, kind)


@pytest.mark.slow
@pytest.mark.parametrize("task", GRADABLE)
def test_every_gradable_task(task: str) -> None:
    """Its own answer is paid after JSON; junk stays in range, is never paid in all items and raises only where no answer is known."""
    items = prompts(task, 1 if task in SLOW_TO_MAKE else 3)
    for prompt in items:
        if isinstance(prompt.item["entry"]["answer"], str):
            assert both(prompt.answer, prompt) == (1.0, 1.0)
    for kind, text in hostile.TEXTS.items():
        if task == "propositional_logic" and kind in ("not", "digits", "newlines"):
            continue  # hangs: the pool's timeout is for that
        paid = 0
        for prompt in items:
            try:
                solved, partial = both(text, prompt)
            except Exception:
                assert prompt.item["entry"]["answer"] is None, (task, kind)
                continue
            assert solved in (0.0, 1.0) and 0.0 <= partial <= 1.0 and (solved == 1.0) == (partial == 1.0)
            paid += solved == 1.0
        assert paid < len(items) or len(items) == 1, (task, kind)
