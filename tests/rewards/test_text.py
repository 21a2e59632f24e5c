import hostile
import numpy as np
import pytest

from jaxprorl.rewards.text import exact_match
from jaxprorl.types import Prompt


def prompt(answer: str) -> Prompt:
    return Prompt(1, "jsonl", np.zeros(1, np.int32), "qa", answer)


def score(answer: str, reference: str) -> float:
    return exact_match(f"<think>w</think><answer>{answer}</answer>", prompt(reference))


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("Paris", "paris"),
        ("  new \n york ", "New York"),
        ("STRASSE", "straße"),
        ("42", "42"),
        ("42.0", "42"),
        ("+42", "42"),
        ("1,000", "1000"),
        ("1e3", "1000"),
        (".5", "1/2"),
        ("0.50", "0.5"),
        ("12/4", "3"),
        ("-7 / 2", "-3.5"),
        ("42.", "42"),
    ],
)
def test_equal(answer: str, reference: str) -> None:
    assert score(answer, reference) == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("London", "Paris"),
        ("Paris London", "Paris"),
        ("41", "42"),
        ("-42", "42"),
        ("0.333", "1/3"),
        ("1,00", "100"),
        ("1/0", "1"),
        ("0/0", "0"),
        ("e5", "5"),
        (".", "0"),
        ("1/2/3", "1"),
        ("nan", "42"),
        ("1e9999", "42"),
        ("", "42"),
        ("0.1", "0.10000000000000001"),
        ("٤٢", "42"),
    ],
)
def test_different(answer: str, reference: str) -> None:
    assert score(answer, reference) == 0.0


def test_symmetric_on_numbers() -> None:
    values = ["1", "1.0", "1e0", "2/2", "2", "0.5", "1/2", "-1", "1,000", "1000"]
    for a in values:
        for b in values:
            assert score(a, b) == score(b, a)
        assert score(a, a) == 1.0


def test_tags_are_required() -> None:
    assert exact_match("42", prompt("42")) == 0.0
    assert exact_match("<answer>42</answer>", prompt("42")) == 0.0


def test_no_reference_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="prompt 1 has no reference answer"):
        score("42", " ")


@pytest.mark.parametrize("kind", hostile.TEXTS)
def test_hostile_text_is_wrong(kind: str) -> None:
    for reference in ("42", "1/2", "a long answer"):
        for completion in hostile.completions(hostile.TEXTS[kind]):
            assert exact_match(completion, prompt(reference)) == 0.0
