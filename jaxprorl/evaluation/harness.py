"""Evaluation: one sample per item, graded by the same pool as training, summarised per task."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxprorl.evaluation.statistics import solve_summary
from jaxprorl.rewards.pool import GraderPool
from jaxprorl.rollout.engine import Engine, Sampling
from jaxprorl.types import Prompt, Score


def evaluate(
    engine: Engine,
    graders: GraderPool,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    check: Callable[[Sequence[Score]], None],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Samples every prompt once and grades it.

    Args:
        sampling: of one sample per prompt; the same one and the same weights give the same result.
        check: called with all scores before they are summarised; raises where too many are grader errors.
        on_progress: called with (completions so far, all).

    Returns:
        A `solve_summary`, and `completion_tokens`, the number sampled.
    """
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    tokens = 0
    for done, completion in enumerate(engine.generate(prompts, sampling), start=1):
        graders.submit(by_id[completion.prompt_id], [completion])
        tokens += len(completion.token_ids)
        on_progress(done, len(prompts))
    found = graders.collect()
    by_task: dict[str, list[Score]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(found[prompt.prompt_id, 0])
    check([score for scores in by_task.values() for score in scores])
    return solve_summary(by_task) | {"completion_tokens": tokens}


def first_per_task(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of every task, in their order."""
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.task] = seen.get(prompt.task, 0) + 1
        if seen[prompt.task] <= count:
            kept.append(prompt)
    return kept
