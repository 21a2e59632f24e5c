"""Domains that training may draw from, by the names that `data.mix` has for them. One is in the table once it has data and a grader."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from jaxprorl.data.prompts import Item
from jaxprorl.errors import ConfigError
from jaxprorl.types import Prompt

Question = TypeVar("Question", bound=Item | Prompt)

# Name -> whether a question is of that domain. Its own `domain` is finer: of a puzzle it is reasoning-gym's category.
DOMAINS: Mapping[str, Callable[[Item | Prompt], bool]] = {
    "logic": lambda question: "entry" in question.item,  # reasoning-gym's puzzles, graded by rewards/puzzles.py
}


def choose(questions: Sequence[Question], mix: Sequence[str]) -> tuple[Question, ...]:
    """The questions of the domains and tasks in `mix`, in their order; all of them when it is empty.

    Raises:
        ConfigError: a name that no question answers to.
    """
    if not mix:
        return tuple(questions)
    answers = {name: [_is_of(question, name) for question in questions] for name in mix}
    empty = [name for name in mix if not any(answers[name])]
    if empty:
        tasks = ", ".join(sorted({question.task for question in questions}))
        raise ConfigError(f"data.mix: {', '.join(empty)}: the data has no such domain or task; its tasks are {tasks}")
    return tuple(question for row, question in enumerate(questions) if any(answers[name][row] for name in mix))


def _is_of(question: Item | Prompt, name: str) -> bool:
    return question.task == name or (name in DOMAINS and DOMAINS[name](question))
