"""Domains that training may draw from, by the names that `data.mix` has for them. One is in the table once it has data and a grader."""

from collections.abc import Callable, Mapping, Sequence

from jaxprorl.errors import ConfigError
from jaxprorl.types import Prompt

# Name -> whether a prompt is of that domain. `Prompt.domain` is finer: of a puzzle it is reasoning-gym's category.
DOMAINS: Mapping[str, Callable[[Prompt], bool]] = {
    "logic": lambda prompt: "entry" in prompt.item,  # reasoning-gym's puzzles, graded by rewards/puzzles.py
}


def choose(prompts: Sequence[Prompt], mix: Sequence[str]) -> tuple[Prompt, ...]:
    """The prompts of the domains and tasks in `mix`, in their order; all of them when it is empty.

    Raises:
        ConfigError: a name that no prompt answers to.
    """
    if not mix:
        return tuple(prompts)
    answers = {name: [_is_of(prompt, name) for prompt in prompts] for name in mix}
    empty = [name for name in mix if not any(answers[name])]
    if empty:
        tasks = ", ".join(sorted({prompt.task for prompt in prompts}))
        raise ConfigError(f"data.mix: {', '.join(empty)}: the data has no such domain or task; its tasks are {tasks}")
    return tuple(prompt for row, prompt in enumerate(prompts) if any(answers[name][row] for name in mix))


def _is_of(prompt: Prompt, name: str) -> bool:
    return prompt.task == name or (name in DOMAINS and DOMAINS[name](prompt))
