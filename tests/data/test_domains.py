import numpy as np
import pytest

from jaxprorl.data.domains import choose
from jaxprorl.errors import ConfigError
from jaxprorl.types import Prompt


def prompt(number: int, task: str, puzzle: bool = True) -> Prompt:
    return Prompt(number, "category", np.zeros(1, np.int32), task, "", {"entry": {}} if puzzle else {})


PROMPTS = [prompt(0, "sums"), prompt(1, "words"), prompt(2, "sums"), prompt(3, "mine", puzzle=False)]


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ((), [0, 1, 2, 3]),
        (("sums",), [0, 2]),
        (("mine", "sums"), [0, 2, 3]),
        (("logic",), [0, 1, 2]),
        (("logic", "words"), [0, 1, 2]),
        (("logic", "mine"), [0, 1, 2, 3]),
    ],
)
def test_a_mix_is_of_domains_and_tasks_and_keeps_the_order(mix: tuple[str, ...], expected: list[int]) -> None:
    assert [p.prompt_id for p in choose(PROMPTS, mix)] == expected


def test_a_name_that_nothing_answers_to_is_told() -> None:
    with pytest.raises(ConfigError, match=r"data\.mix: math, Sums: the data has no such domain or task; its tasks are mine, sums, words"):
        choose(PROMPTS, ("math", "sums", "Sums"))
    with pytest.raises(ConfigError, match=r"data\.mix: logic: "):
        choose(PROMPTS[3:], ("logic",))
