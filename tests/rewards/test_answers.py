import time

import hostile
import pytest

from jaxprorl.rewards.answers import MAX_ANSWER_CHARS, extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>1+1</think><answer>2</answer>", "2"),
        ("1+1</think><answer>2</answer>", "2"),  # the prompt may have opened the thought
        ("<think>a</think>\n<answer>\n 2 \n</answer>\n", "2"),
        ("<think>a</think><answer>2</answer> so it is<|im_end|>", "2"),
        ("<think>a</think><answer>1</answer><answer>2</answer>", "2"),
        ("<think>a</think><answer>1</answer><answer>2", "1"),  # the last complete one
        ("<think>a</think><answer>1<answer>2</answer>", "2"),
        ("<think>a</think><answer>2</answer></answer>", "2"),
        ("<think>a</think><answer>1</answer></think><answer>2</answer>", "2"),
        ("<think>a</think><answer></answer>", ""),
        ("<think><answer>2</answer></think>", None),  # only considered
        ("<think><answer>2</answer>", None),  # cut off while thinking
        ("<answer>2</answer>", None),
        ("<think>a</think>2", None),
        ("<think>a</think><answer>2", None),
        ("<think>a</think></answer>2<answer>", None),
        ("", None),
        ("</think>", None),
    ],
)
def test_one_rule(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_without_thinking_only_if_allowed() -> None:
    assert extract_answer("<answer>2</answer>", must_think=False) == "2"
    assert extract_answer("<think><answer>1</answer></think><answer>2</answer>", must_think=False) == "2"
    assert extract_answer("<think><answer>1</answer></think>", must_think=False) is None


def test_length_cap() -> None:
    wrap = "<think></think><answer>{}</answer>".format
    assert extract_answer(wrap("x" * MAX_ANSWER_CHARS)) == "x" * MAX_ANSWER_CHARS
    assert extract_answer(wrap("x" * (MAX_ANSWER_CHARS + 1))) is None


def test_linear_on_a_megabyte_of_tags() -> None:
    began = time.perf_counter()
    for piece in ("<answer>", "</answer>", "<think>", "</think>", "<answer></answer>", "<"):
        extract_answer(piece * (1_000_000 // len(piece)))
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize("kind", hostile.TEXTS)
def test_hostile_text_gives_text_or_none(kind: str) -> None:
    for completion in hostile.completions(hostile.TEXTS[kind]):
        answer = extract_answer(completion)
        assert answer is None or answer == answer.strip()
