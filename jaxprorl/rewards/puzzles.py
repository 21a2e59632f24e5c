"""Rewards for reasoning-gym tasks, by reasoning-gym's own scorers with their traps removed.

A prompt carries its puzzle: `prompt.item == {"task": name, "entry": {"question", "answer", "metadata"}}` in JSON types.
What the scorers of reasoning-gym 0.1.25 do that a reward must not:

- nine tasks run the model's answer as Python (`eval` or sympy's `parse_expr`): refused;
- `game_of_life_halting` pays 1.0 for any text, `coin_flip` for any prefix of the answer such as "0": refused;
- `arc_agi` and `rearc` reject their own answer once the puzzle has been through JSON, `composite` has no scorer alone: refused;
- `complex_arithmetic` pays 1.0 for "nan" and about 1e-7 for wrong answers, and raises on 1e308+1e308i;
- `spell_backward` pays 0.9999999999999999 (6 or 7 letters; 1.0000000000000002 for 9) for the right word with any tail, since it
  sums 1/length: hence solved means a score of exactly 1.0, which every other task gives its own answer;
- about 40 tasks pay len(answer)/len(text) when the text merely contains the answer: spraying guesses would earn;
- many tasks pay 0.01 to 0.05 for any text;
- some raise on text that is not of the expected form (`prime_factorization` on nearly any).
"""

import cmath
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jaxprorl.rewards import answers
from jaxprorl.types import Prompt

DISTRIBUTIONS = ("reasoning-gym",)
NEEDS_ANSWER = False  # the puzzle itself is what it grades by

EXECUTES_ANSWER = frozenset(
    (
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    )
)
_REFUSED = {
    **dict.fromkeys(EXECUTES_ANSWER, "its scorer executes the model's answer as Python, which needs a sandbox"),
    "game_of_life_halting": "its scorer pays 1.0 for any text",
    "coin_flip": "its scorer pays 1.0 for any prefix of the answer, so always for 0",
    "arc_agi": "its scorer rejects right answers once the puzzle has been stored as JSON",
    "rearc": "its scorer rejects right answers once the puzzle has been stored as JSON",
    "composite": "it has no scorer of its own; list its parts instead",
}

FLOOR = 0.05  # what tasks pay for any text at all; nothing up to it is a signal
_UNSOLVED_MAX = 0.99  # partial credit stays clear of 1.0

Scorer = Callable[[str, Mapping[str, Any]], float]


def exact(completion: str, prompt: Prompt) -> float:
    """1.0 if the completion solves the puzzle, else 0.0.

    Raises:
        ValueError: the prompt carries no puzzle or its task is refused (see check_task); never because of the text.
    """
    return 1.0 if continuous(completion, prompt) == 1.0 else 0.0


def continuous(completion: str, prompt: Prompt) -> float:
    """The scorer's value in [0, 1] without its false spread; 1.0 exactly when `exact` is 1.0.

    Raises:
        ValueError: as `exact`.
    """
    check_task(prompt.task)
    entry = prompt.item.get("entry")
    if not isinstance(entry, Mapping) or prompt.item.get("task") != prompt.task:
        raise ValueError(f"prompt {prompt.prompt_id}: item has no entry of task {prompt.task!r}; it needs {{'task', 'entry'}}")
    answer = answers.extract_answer(completion)
    if not answer:
        return 0.0
    value = _scorer_value(prompt.task, answer, entry)
    if value == 1.0:
        return 1.0
    if math.isnan(value) or value <= FLOOR or _is_substring_credit(value, answer, entry.get("answer")):
        return 0.0
    if prompt.task == "spell_backward" and math.isclose(value, 1.0, abs_tol=1e-9):
        return 0.8  # right word with a tail: what the scorer means to pay, and does where 1/length sums to 1
    return min(value, _UNSOLVED_MAX)


def check_task(name: str) -> None:
    """Refuses tasks that cannot be graded safely or truly.

    Raises:
        ValueError: naming the task, the reason and the remedy.
    """
    if name in _REFUSED:
        raise ValueError(f"reasoning-gym task {name!r} cannot be graded: {_REFUSED[name]}; remove it from data.tasks")
    _scorer(name)


def prepare() -> None:
    """Imports reasoning-gym (over a second) before a grader's clock runs."""
    import reasoning_gym  # noqa: F401


@cache
def _scorer(name: str) -> Scorer:
    """The task's scorer, made once per process: some datasets take most of a second to build."""
    import reasoning_gym  # here, because the parent process only checks that this module loads
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {name!r}; see reasoning_gym.factory.DATASETS")
    return reasoning_gym.get_score_answer_fn(name)


def _scorer_value(task: str, answer: str, entry: Mapping[str, Any]) -> float:
    """The scorer's value as a float; 0.0 where the text makes the scorer raise."""
    if task == "complex_arithmetic" and not _is_finite_complex(task, answer):
        return 0.0
    score = _scorer(task)
    try:
        return float(score(answer, entry))
    except (MemoryError, TimeoutError):
        raise
    except Exception:
        # A scorer that accepts its own answer is sound, so the text was at fault and is simply wrong. Otherwise the error is real.
        oracle = entry.get("answer")
        if not isinstance(oracle, str) or oracle == answer or score(oracle, entry) != 1.0:
            raise
        return 0.0


def _is_finite_complex(task: str, answer: str) -> bool:
    """False for nan, inf and numbers whose distance to anything overflows."""
    parse = _scorer(task).__self__.parse_string_to_complex  # type: ignore[attr-defined]  # the scorer is a bound method
    value = parse(answer)
    return value is not None and cmath.isfinite(value) and max(abs(value.real), abs(value.imag)) < 1e100


def _is_substring_credit(value: float, answer: str, oracle: object) -> bool:
    """Whether the value was paid only for containing the reference answer (some scorers drop commas first)."""
    if not isinstance(oracle, str) or not oracle:
        return False
    pairs = ((oracle, answer), (oracle.replace(",", ""), answer.replace(",", "")))
    return any(part in text and math.isclose(value, len(part) / len(text), rel_tol=1e-9) for part, text in pairs if part and text)
