"""Worked solutions: what the warm start teaches, and the careless answers that are mixed in last.

Every step of the work is one local look-up and restates whatever it needs, since the model is tiny. To add a task, decorate a
function from a reasoning-gym entry (question, answer, metadata) to (work, answer):

    @worked("gcd")
    def _gcd(entry): ...

The answer must score 1.0 with the task's own scorer; `tests/warmstart/test_solutions.py` checks every registered task.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np

from jaxprorl.errors import DataError

Entry = Mapping[str, Any]
Solution = Callable[[Entry], tuple[str, str]]

WORKED: dict[str, Solution] = {}  # task name -> its worked solution


def worked(task: str) -> Callable[[Solution], Solution]:
    """Registers the decorated function as the worked solution of a reasoning-gym task."""

    def register(solution: Solution) -> Solution:
        WORKED[task] = solution
        return solution

    return register


def worked_solution(task: str, entry: Entry) -> tuple[str, str]:
    """(work, answer) of one entry; the answer has the form that the scorer pays in full.

    Raises:
        DataError: no worked solution is registered for the task, or the entry is one that it does not cover.
    """
    if task not in WORKED:
        raise DataError(
            f"data.tasks.{task}: no worked solution. The warm start knows {', '.join(sorted(WORKED))}; "
            "register one with jaxprorl.warmstart.solutions.worked, or start from a model with model.path"
        )
    return WORKED[task](entry)


def demonstration(task: str, entry: Entry) -> str:
    """The completion the warm start teaches: the work between the think tags, then the answer (no end-of-turn token)."""
    work, answer = worked_solution(task, entry)
    return f"<think>{work}</think><answer>{answer}</answer>"


def careless(task: str, entry: Entry, answers: Sequence[str], seed: int) -> str:
    """A completion without work and with a wrong answer, taken from `answers` (of other train items of the same task).

    The choice depends on the seed and the question's position in the generator alone; it is never accidentally right.

    Raises:
        DataError: every answer given would be right.
    """
    if answers:
        index = int(entry["metadata"]["source_index"])
        words = np.random.Philox(np.random.SeedSequence([seed, index])).random_raw(2)
        start = int(words[0] % len(answers))
        step = 1 + int(words[1] % max(1, len(answers) - 1))
        # Random jumps first, then every answer in turn: one right answer in a long run of others is left quickly.
        for position in (*((start + i * step) % len(answers) for i in range(8)), *range(len(answers))):
            if score(task, answers[position], entry) < 1.0:
                return f"<think></think><answer>{answers[position]}</answer>"
    raise DataError(
        f"data.tasks.{task}: no wrong answer among {len(answers)} answers of its train items; draw more with data.train_per_task"
    )


def score(task: str, answer: str, entry: Entry) -> float:
    """What reasoning-gym's own scorer gives. For trusted answers only: some scorers execute what they are given."""
    return float(_scorer(task)(answer, entry))


@cache
def _scorer(task: str) -> Callable[[str, Entry], float]:
    import reasoning_gym  # takes over a second, and only the warm start needs it

    return reasoning_gym.get_score_answer_fn(task)


@worked("chain_sum")
def _chain_sum(entry: Entry) -> tuple[str, str]:
    """`8 + 5 - 4` -> `8+5=13 13-4=9`."""
    first, *rest = entry["metadata"]["expression"].split(" ")
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        value = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total}{sign}{term}={value}")
        total = value
    return " ".join(steps), str(total)


@worked("spell_backward")
def _spell_backward(entry: Entry) -> tuple[str, str]:
    """`glink` -> `1g2l3i4n5k`, from which the answer is read from the right."""
    word = entry["metadata"]["word"]
    return "".join(f"{place}{letter}" for place, letter in enumerate(word, start=1)), word[::-1]


@worked("number_filtering")
def _number_filtering(entry: Entry) -> tuple[str, str]:
    """Keep smaller than 6 of 5, 7 -> `< 5<6+ 7>6-`: the kept relation, then per item its comparison and whether it stays.

    Removing turns the relation round: remove larger keeps `<=`, remove smaller keeps `>=`.
    """
    metadata = entry["metadata"]
    relation = {"keep_smaller": "<", "keep_larger": ">", "remove_larger": "<=", "remove_smaller": ">="}[metadata["operation"]]
    threshold = metadata["filter_value"]
    steps, kept = [relation], []
    for number in metadata["original_numbers"]:
        difference = Decimal(number) - Decimal(threshold)
        comparison = "=" if difference == 0 else "<" if difference < 0 else ">"
        stays = comparison in relation
        steps.append(f"{number}{comparison}{threshold}{'+' if stays else '-'}")
        if stays:
            kept.append(number)
    return " ".join(steps), str(kept)


@worked("complex_arithmetic")
def _complex_arithmetic(entry: Entry) -> tuple[str, str]:
    """(1 + 4i) - (2 + 9i) -> `1-2=-1 4-9=-5`, answer `-1-5i`.

    The answer always names both parts (`0-5i`, `3+0i`, `2+1i`), though the scorer takes shorter ones: then it is the two results
    copied, without special cases to learn.
    """
    metadata = entry["metadata"]
    sign = metadata["operation"]
    if sign not in "+-":
        raise DataError(f"data.tasks.complex_arithmetic: no worked solution for {sign!r}; set operations_weights to (0.5, 0.5, 0.0, 0.0)")
    steps, parts = [], []
    for left, right in zip(metadata["num1"], metadata["num2"], strict=True):
        left, right = int(left), int(right)
        part = left + right if sign == "+" else left - right
        steps.append(f"{left}{sign}{right}={part}")
        parts.append(part)
    return " ".join(steps), f"{parts[0]}{parts[1]:+d}i"
