import re

import pytest
import reasoning_gym

from configs.quickstart import get_config
from jaxprorl.data.splits import Items
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import DataError
from jaxprorl.warmstart.solutions import WORKED, careless, demonstration, worked_solution

TASKS = sorted(get_config().data.tasks)


def _entries(items: Items, task: str, count: int = 300) -> list[dict]:
    return [item.item["entry"] for item in items.train if item.task == task][:count]


@pytest.mark.parametrize(
    ("task", "metadata", "work", "answer"),
    [
        ("chain_sum", {"expression": "8 + 5 - 4"}, "8+5=13 13-4=9", "9"),
        ("chain_sum", {"expression": "2 - 5 - 3 + 9"}, "2-5=-3 -3-3=-6 -6+9=3", "3"),
        ("spell_backward", {"word": "glink"}, "1g2l3i4n5k", "knilg"),
        ("spell_backward", {"word": "Pyxis"}, "1P2y3x4i5s", "sixyP"),
        ("number_filtering", {"operation": "keep_smaller", "filter_value": "6", "original_numbers": ["5", "7"]}, "< 5<6+ 7>6-", "['5']"),
        ("number_filtering", {"operation": "keep_larger", "filter_value": "6", "original_numbers": ["6", "7"]}, "> 6=6- 7>6+", "['7']"),
        (
            "number_filtering",
            {"operation": "remove_larger", "filter_value": "6", "original_numbers": ["6", "7", "2"]},
            "<= 6=6+ 7>6- 2<6+",
            "['6', '2']",
        ),
        ("number_filtering", {"operation": "remove_smaller", "filter_value": "6", "original_numbers": ["5"]}, ">= 5<6-", "[]"),
        ("complex_arithmetic", {"operation": "-", "num1": [1.0, 4.0], "num2": [2.0, 9.0]}, "1-2=-1 4-9=-5", "-1-5i"),
        ("complex_arithmetic", {"operation": "+", "num1": [6.0, 4.0], "num2": [5.0, 9.0]}, "6+5=11 4+9=13", "11+13i"),
        ("complex_arithmetic", {"operation": "-", "num1": [3.0, 4.0], "num2": [3.0, 4.0]}, "3-3=0 4-4=0", "0+0i"),
    ],
)
def test_by_hand(task: str, metadata: dict, work: str, answer: str) -> None:
    assert worked_solution(task, {"metadata": metadata}) == (work, answer)
    assert demonstration(task, {"metadata": metadata}) == f"<think>{work}</think><answer>{answer}</answer>"


@pytest.mark.parametrize("task", TASKS)
def test_reasoning_gym_pays_every_answer_in_full(items: Items, task: str) -> None:
    scorer = reasoning_gym.get_score_answer_fn(task)
    for entry in _entries(items, task):
        assert scorer(worked_solution(task, entry)[1], entry) == 1.0, entry


def test_quickstart_tasks_are_all_worked() -> None:
    assert set(TASKS) <= WORKED.keys()


def _check_sums(work: str) -> list[int]:
    """Every `a+b=c` of the work holds; returns the results."""
    results = []
    for step in work.split(" "):
        left, sign, right, result = re.fullmatch(r"(-?\d+)([+-])(-?\d+)=(-?\d+)", step).groups()
        assert int(left) + int(right) * (1 if sign == "+" else -1) == int(result), step
        results.append(int(result))
    return results


def test_sums_hold_and_chain(items: Items) -> None:
    for entry in _entries(items, "chain_sum"):
        work, answer = worked_solution("chain_sum", entry)
        results = _check_sums(work)
        starts = [int(re.match(r"-?\d+", step).group()) for step in work.split(" ")]
        assert starts[1:] == results[:-1]
        assert answer == str(results[-1])
        used = re.match(r"-?\d+", work).group() + "".join(re.findall(r"[+-]\d+(?==)", work))
        assert used == entry["metadata"]["expression"].replace(" ", "")


def test_complex_parts_hold(items: Items) -> None:
    for entry in _entries(items, "complex_arithmetic"):
        work, answer = worked_solution("complex_arithmetic", entry)
        real, imaginary = _check_sums(work)
        assert complex(answer.replace("i", "j")) == complex(real, imaginary)


def test_comparisons_hold(items: Items) -> None:
    for entry in _entries(items, "number_filtering"):
        work, answer = worked_solution("number_filtering", entry)
        relation, *steps = work.split(" ")
        kept = []
        for step, number in zip(steps, entry["metadata"]["original_numbers"], strict=True):
            left, comparison, right, verdict = re.fullmatch(r"(\d+)([<=>])(\d+)([+-])", step).groups()
            assert left == number
            assert right == entry["metadata"]["filter_value"]
            assert {"<": int(left) < int(right), "=": int(left) == int(right), ">": int(left) > int(right)}[comparison]
            assert (verdict == "+") == (comparison in relation)
            kept += [left] if verdict == "+" else []
        assert answer == str(kept) == entry["answer"]


def test_letters_are_numbered(items: Items) -> None:
    for entry in _entries(items, "spell_backward"):
        work, answer = worked_solution("spell_backward", entry)
        places, letters = re.findall(r"\d", work), re.sub(r"\d", "", work)
        assert places == [str(i + 1) for i in range(len(letters))]
        assert answer == letters[::-1] == entry["answer"]


@pytest.mark.parametrize("task", TASKS)
def test_careless_is_another_items_answer_and_wrong(items: Items, task: str) -> None:
    entries = _entries(items, task)
    answers = [worked_solution(task, entry)[1] for entry in entries]
    scorer = reasoning_gym.get_score_answer_fn(task)
    chosen = []
    for entry in entries:
        text = careless(task, entry, answers, seed=3)
        answer = re.fullmatch(r"<think></think><answer>(.*)</answer>", text).group(1)
        assert answer in answers
        assert scorer(answer, entry) < 1.0
        assert text == careless(task, entry, answers, seed=3)
        chosen.append(answer)
    assert chosen != [re.sub("<.*?>", "", careless(task, entry, answers, seed=4)) for entry in entries]
    assert len(set(chosen)) > 15


def test_careless_finds_the_one_wrong_answer() -> None:
    entry = {"answer": "5", "metadata": {"source_index": 0}}
    assert careless("chain_sum", entry, ["5"] * 500 + ["6"] + ["5.0"] * 500, 0) == "<think></think><answer>6</answer>"
    for answers in ([], ["5"], ["5", "05"]):
        with pytest.raises(DataError, match=r"data\.tasks\.chain_sum: no wrong answer among"):
            careless("chain_sum", entry, answers, 0)


def test_unknown_task_and_operation() -> None:
    with pytest.raises(DataError, match=r"data\.tasks\.gcd: no worked solution.*chain_sum.*register one"):
        worked_solution("gcd", {})
    entry = {"metadata": {"operation": "*", "num1": [1, 2], "num2": [3, 4]}}
    with pytest.raises(DataError, match=r"data\.tasks\.complex_arithmetic: .*operations_weights"):
        worked_solution("complex_arithmetic", entry)


@pytest.mark.parametrize("task", TASKS)
def test_completions_fit(items: Items, tokenizer: Tokenizer, task: str) -> None:
    """With the end of turn, in the quickstart's response budget."""
    limit = get_config().rollout.max_response_tokens
    for entry in _entries(items, task, 2000):
        text = demonstration(task, entry) + "<|im_end|>"
        assert len(tokenizer.encode(text)) <= limit
