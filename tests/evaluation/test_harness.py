from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from factories import make_prompt, make_score

from jaxprorl.evaluation.harness import evaluate, first_per_task
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


def run(scores: dict[int, Score], **kwargs: Any) -> tuple[dict[str, Any], FakeEngine, FakeGraders]:
    engine, graders = FakeEngine(), FakeGraders(scores)
    return evaluate(engine, graders, PROMPTS, Sampling(1, 0.7, 20, step=0, top_p=0.9), **kwargs), engine, graders  # type: ignore[arg-type]


def test_scores_are_summarised_per_task() -> None:
    result, _, _ = run({1: make_score(1.0), 2: make_score(0.5), 3: make_score(0.25), 4: make_score(1.0)})
    assert result["per_task"]["sums"]["solve_rate"] == pytest.approx(2 / 3)
    assert result["per_task"]["sums"]["mean_score"] == pytest.approx(0.75)
    assert result["per_task"]["sums"]["n"] == 3
    assert result["per_task"]["words"]["solve_rate"] == 0.0
    assert result["solve_rate"] == pytest.approx(0.5)
    assert result["mean_score"] == pytest.approx(2.75 / 4)


def test_a_grader_error_counts_as_not_solved() -> None:
    result, _, _ = run({1: make_score(1.0), 2: make_score(1.0), 3: make_score(0.0, "grader_error"), 4: make_score(1.0)})
    assert result["per_task"]["sums"]["n"] == 3
    assert result["solve_rate"] == pytest.approx(3 / 4)


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
