from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from factories import make_prompt, make_score

from jaxprorl.errors import GraderError
from jaxprorl.evaluation.harness import evaluate, first_per_task
from jaxprorl.rewards.pool import require_graded
from jaxprorl.rollout.engine import Sampling
from jaxprorl.types import Completion, Prompt, Score

PROMPTS = [make_prompt(1, task="sums"), make_prompt(2, task="words"), make_prompt(3, task="sums"), make_prompt(4, task="sums")]


class FakeEngine:
    """Answers every prompt, the last one first."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Prompt], Sampling]] = []

    def set_weights(self, params: Any, version: int) -> None:
        raise AssertionError("evaluation must not swap weights")

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Completion]:
        self.asked.append((list(prompts), sampling))
        for prompt in reversed(prompts):
            yield Completion(prompt.prompt_id, 0, np.array([7, 8], np.int32), np.zeros(2, np.float32), "stop", ((0, 0, 2),))


class FakeGraders:
    """Scores by prompt id."""

    def __init__(self, scores: dict[int, Score]):
        self._scores = scores
        self.submitted: list[tuple[int, int]] = []

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        self.submitted += [(prompt.prompt_id, completion.prompt_id) for completion in completions]

    def collect(self) -> dict[tuple[int, int], Score]:
        return {(asked, 0): self._scores[asked] for asked, _ in self.submitted}


def run(scores: dict[int, Score], limit: float = 0.05, **kwargs: Any) -> tuple[dict[str, Any], FakeEngine, FakeGraders]:
    engine, graders = FakeEngine(), FakeGraders(scores)
    check = partial(require_graded, "evaluation", max_error_share=limit)
    return evaluate(engine, graders, PROMPTS, Sampling(1, 0.7, 20, step=0, top_p=0.9), check, **kwargs), engine, graders  # type: ignore[arg-type]


def test_scores_are_summarised_per_task() -> None:
    result, _, _ = run({1: make_score(1.0), 2: make_score(0.5), 3: make_score(0.25), 4: make_score(1.0)})
    assert result["per_task"]["sums"]["solve_rate"] == pytest.approx(2 / 3)
    assert result["per_task"]["sums"]["mean_score"] == pytest.approx(0.75)
    assert result["per_task"]["sums"]["n"] == 3
    assert result["per_task"]["words"]["solve_rate"] == 0.0
    assert result["solve_rate"] == pytest.approx(0.5)
    assert result["mean_score"] == pytest.approx(2.75 / 4)


def test_an_item_whose_grader_failed_is_in_no_rate_and_is_counted() -> None:
    scores = {1: make_score(1.0), 2: make_score(0.0), 3: make_score(0.0, "grader_error"), 4: make_score(1.0)}
    result, _, _ = run(scores, limit=0.25)
    assert (result["per_task"]["sums"]["n"], result["per_task"]["sums"]["ungraded"]) == (2, 1)
    assert result["per_task"]["sums"]["solve_rate"] == 1.0
    assert result["solve_rate"] == pytest.approx(2 / 3)
    assert result["ungraded"] == 1


def test_too_many_grader_errors_end_the_evaluation_with_share_and_first_error() -> None:
    scores = {number: make_score(1.0) for number in (1, 3, 4)} | {2: replace(make_score(0.0, "grader_error"), detail="KeyError: 'bonus'")}
    says = (
        r"evaluation: 1 of 4 samples could not be graded \(first: KeyError: 'bonus'\), a share of 0.25 and more than .*error_share = 0.24"
    )
    with pytest.raises(GraderError, match=says):
        run(scores, limit=0.24)
    assert run(scores, limit=0.25)[0]["per_task"]["words"]["solve_rate"] is None  # a task of which nothing was graded


def test_every_item_is_sampled_once_as_was_asked() -> None:
    _, engine, graders = run({number: make_score(1.0) for number in (1, 2, 3, 4)})
    assert engine.asked == [(PROMPTS, Sampling(samples=1, temperature=0.7, seed=20, step=0, top_p=0.9))]
    assert sorted(graders.submitted) == [(number, number) for number in (1, 2, 3, 4)]


def test_progress_is_told_with_every_completion() -> None:
    told: list[tuple[int, int]] = []
    run({number: make_score(1.0) for number in (1, 2, 3, 4)}, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_first_of_every_task_keep_their_order() -> None:
    assert [prompt.prompt_id for prompt in first_per_task(PROMPTS, 2)] == [1, 2, 3]
    assert [prompt.prompt_id for prompt in first_per_task(PROMPTS, 9)] == [1, 2, 3, 4]
    assert first_per_task(PROMPTS, 0) == []
