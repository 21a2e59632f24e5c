"""Streams and budgets of runs made up by hand; real run folders that were tampered with are in test_ablation.py."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxprorl.ablations.matching import first_difference, wrong_budget
from jaxprorl.ablations.records import Drawn, Record
from jaxprorl.ablations.runs import Run


def drawn(*steps: Sequence[int], carried: Sequence[Sequence[int]] = ()) -> list[Drawn]:
    """Prompt ids by step; `carried` come first in their step and were drawn before."""
    found = []
    for number, step in enumerate(steps):
        before = list(carried[number]) if number < len(carried) else []
        places = {prompt: place for place, prompt in enumerate([*before, *step])}
        found += [Drawn(prompt, places[prompt], places) for prompt in step]
    return found


def test_a_shorter_stream_is_a_prefix_whatever_the_steps() -> None:
    assert first_difference(drawn([1, 2], [3, 4]), drawn([1, 2, 3], [4, 5], [6])) is None
    assert first_difference(drawn([1, 2]), []) is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([[1, 2], [3]], [[1, 2], [4]], (2, 3, 4)),
        ([[1, 2]], [[2, 1]], (0, 1, 2)),  # the same prompts in another order
        ([[1, 2], [3, 4]], [[1, 3], [4]], (1, 2, 3)),  # one left out
    ],
)
def test_streams_that_part_are_told_apart(a: list[list[int]], b: list[list[int]], expected: tuple[int, int, int]) -> None:
    assert first_difference(drawn(*a), drawn(*b)) == expected


def test_a_prompt_that_a_step_held_already_was_passed_over() -> None:
    """Epochs (1 2 3) (3 1 2): the second 3 comes while the step of `a` still holds the first; smaller steps draw it."""
    assert first_difference(drawn([1], [2, 3, 1], [2]), drawn([1], [2, 3], [3, 1], [2])) is None
    assert first_difference(drawn([1], [2, 3], [3, 1], [2]), drawn([1], [2, 3, 1], [2])) is None
    assert first_difference(drawn([1, 2], [4], carried=[[], [3]]), drawn([1, 2], [3], [4])) is None, "also one that was carried over"


def record(tokens: Sequence[int], budget: str = "completion_tokens", **end: Any) -> Record:
    counts = {"groups.drawn": 4, "groups.kept": 9, "updates": 1, "updates.skipped": 1}
    rows: list[dict[str, Any]] = [{"step": step, "tokens.completion": count} | counts for step, count in enumerate(tokens)]
    rows[1]["validation.completion_tokens"] = 5
    spent = {"completion_tokens": sum(tokens) + 5, "updates": 2 * len(tokens), "prompts": 4 * len(tokens)} | end
    told = {"steps": len(tokens), "spent": spent}
    config = {"batch": {"updates": 4}, "steps": 9}
    return Record(Run("a", 0), Path("a"), config, {}, told, [], rows, {})


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("completion_tokens", 35, ""),  # 10, 25, 35
        ("completion_tokens", 26, ""),
        ("completion_tokens", 25, "a-seed_0 used 35 completion_tokens, the budget of 25 was used up more than one step earlier"),
        ("completion_tokens", 36, "a-seed_0 used 35 of the budget of 36 completion_tokens and ended; raise steps in fields (now 9)"),
        ("steps", 3, ""),
        ("steps", 2, "more than one step earlier"),
        ("updates", 5, ""),  # 2, 4, 6, the skipped ones too
        ("updates", 4, "more than one step earlier"),
        ("updates", 7, "used 6 of the budget"),
        ("prompts", 9, ""),
        ("prompts", 8, "more than one step earlier"),
    ],
)
def test_a_run_ends_with_the_step_that_uses_the_budget_up(kind: str, size: int, expected: str) -> None:
    plan: Any = SimpleNamespace(budget={"kind": kind, "size": size})
    problems = wrong_budget(plan, record([10, 10, 10]))
    assert len(problems) == (expected != "")
    assert not problems or expected in problems[0]


def test_a_step_that_made_no_update_used_none() -> None:
    found = record([10, 10, 10])
    del found.rows[1]["updates"], found.rows[1]["updates.skipped"]
    assert found.steps_spent("updates") == [2, 0, 2]


def test_a_run_whose_metrics_do_not_make_up_its_end_is_caught() -> None:
    plan: Any = SimpleNamespace(budget={"kind": "completion_tokens", "size": 30})
    assert wrong_budget(plan, record([10, 10, 10], completion_tokens=30)) == [
        "a-seed_0: its metrics make up 35 completion_tokens, its end tells of 30"
    ]
