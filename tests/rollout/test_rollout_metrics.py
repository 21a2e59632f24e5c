import dataclasses

import numpy as np
import pytest
from factories import make_group, make_prompt

from jaxprorl.monitoring.metrics import check_name
from jaxprorl.rollout.collect import RolloutBatch
from jaxprorl.rollout.metrics import rollout_metrics
from jaxprorl.types import Group


def group(prompt_id: int, values: list[float | None], lengths: list[int], domain: str = "domain", task: str = "task") -> Group:
    prompt = dataclasses.replace(make_prompt(prompt_id, task=task), domain=domain)
    return make_group(prompt, [[1] * length for length in lengths], values)


def test_numbers_of_a_batch_by_hand() -> None:
    kept = group(1, [1.0, 0.0], [2, 3])
    dropped = group(2, [1.0, 1.0], [4, 4], domain="other", task="easy")
    surplus = group(3, [None, 0.5], [5, 6])
    waiting = group(4, [1.0, 0.0], [7, 7])
    carried, expired = group(5, [0.0, 1.0], [8, 8]), group(6, [1.0, 0.0], [9, 9])
    cut = [dataclasses.replace(completion, finish_reason="length") for completion in kept.completions]
    kept = dataclasses.replace(kept, completions=(cut[0], kept.completions[1]))
    batch = RolloutBatch(
        groups=[kept, dropped, surplus, waiting],
        kept=[True, False, False, False],
        has_signal=[True, False, True, True],
        carried=[carried],
        surplus=[waiting],
        expired=[expired],
        refills=[1],
        rollout_s=2.0,
    )
    metrics = rollout_metrics(batch, np.array([[-1.0, 1.0], [2.0, -1.0], [0.0, 0.0]]), policy_version=1)
    for name in metrics:
        check_name(name, tasks=["task", "easy"], domains=["domain", "other"])
    assert (metrics["groups.drawn"], metrics["groups.kept"], metrics["groups.carried"], metrics["groups.surplus"]) == (4, 2, 1, 2)
    assert metrics["groups.staleness_max"] == 1  # everything in `factories` is of version 0
    assert metrics["tokens.completion"] == 5 + 8 + 11 + 14
    assert metrics["tokens.wasted"] == 8 + 11 + 18  # dropped, discarded, expired; what waits is not lost yet
    assert metrics["time.completion_tokens_per_s"] == 38 / 2
    assert metrics["groups.zero_spread_share"] == 1 / 4
    assert metrics["groups.all_correct_share"] == 1 / 4
    # All tokens are 1: of a completion of k tokens 1 / k are different, and all of its k - 3 4-grams but the first repeat.
    assert metrics["repetition.unique_share"] == pytest.approx((1 / 2 + 1 / 3 + 2 / 4 + 1 / 5 + 1 / 6 + 2 / 7) / 8)
    assert metrics["repetition.ngram_share"] == pytest.approx((1 / 2 + 2 / 3 + 2 * 3 / 4) / 8)
    assert metrics["samples.dropped_share"] == metrics["grader.error_share"] == 1 / 8
    assert metrics["response.stop_share"] == 7 / 8
    assert (metrics["response_tokens.mean"], metrics["response_tokens.max"]) == (38 / 8, 7)
    # Graded are 1, 0, 1, 1, 1/2, 1, 0.
    assert metrics["reward.mean"] == pytest.approx(4.5 / 7)
    assert metrics["reward.solve_rate"] == pytest.approx(4 / 7)
    assert metrics["reward.task"] == metrics["reward_mean.domain"] == pytest.approx(2.5 / 5)
    assert (metrics["reward_mean.other"], metrics["reward_std.other"]) == (1, 0)
    assert metrics["reward_std.domain"] == pytest.approx(np.std([1, 0, 0.5, 1, 0]))
    assert metrics["advantage_mean.domain"] == pytest.approx((-1 + 1 + 2 - 1) / 4)
    assert metrics["advantage_std.domain"] == pytest.approx(np.std([-1, 1, 2, -1]))
    assert "advantage_mean.other" not in metrics  # nothing of it was trained on


def test_a_step_that_drew_nothing_has_counts_and_no_means() -> None:
    batch = RolloutBatch(carried=[group(1, [1.0, 0.0], [2, 3])], rollout_s=0.1)
    metrics = rollout_metrics(batch, np.array([[1.0, -1.0]]), policy_version=2)
    assert metrics["groups.drawn"] == metrics["tokens.completion"] == 0
    assert metrics["groups.kept"] == metrics["groups.carried"] == 1
    assert "reward.mean" not in metrics and "response_tokens.mean" not in metrics
