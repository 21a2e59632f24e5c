"""Reward for plain (prompt, answer) data: the extracted answer equals the reference."""

import re
from fractions import Fraction

from jaxprorl.rewards import answers
from jaxprorl.types import Prompt

NEEDS_ANSWER = True

# Exponents have at most 3 digits: Fraction("1e999999999") would fill the memory.
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d{1,3})?", re.ASCII)


def exact_match(completion: str, prompt: Prompt) -> float:
    """1.0 if the answer between the tags equals `prompt.answer`, else 0.0.

    Equal means: the same text up to whitespace and case, or the same number where both are numbers ("1,000.0", "1e3" and "2000/2"
    are one number; "1/3" and "0.333" are not). A text without the tags of `answers.extract_answer` has no answer.

    Raises:
        ValueError: the prompt has no reference answer.
    """
    reference = _normalise(prompt.answer)
    if not reference:
        raise ValueError(f"prompt {prompt.prompt_id} has no reference answer; exact_match needs one")
    answer = answers.extract_answer(completion)
    if not answer:
        return 0.0
    answer = _normalise(answer)
    if answer == reference:
        return 1.0
    number = _number(answer)
    return 1.0 if number is not None and number == _number(reference) else 0.0


def _normalise(text: str) -> str:
    """Casefolded, with every run of whitespace as one space."""
    return " ".join(text.split()).casefold()


def _number(text: str) -> Fraction | None:
    """The number that the whole text is, exactly; None if it is none."""
    parts = [part.strip() for part in text.split("/")]
    if len(parts) > 2:
        return None
    values = []
    for part in parts:
        if not any(c.isdigit() for c in part) or not _NUMBER.fullmatch(part):
            return None
        try:
            values.append(Fraction(part.replace(",", "")))
        except ValueError:  # e.g. "e5"
            return None
    if len(values) == 1:
        return values[0]
    return values[0] / values[1] if values[1] else None
