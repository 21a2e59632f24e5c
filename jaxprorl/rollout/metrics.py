"""Numbers of one rollout batch, by the names of `monitoring.metrics`."""

from collections.abc import Sequence

import numpy as np

from jaxprorl.rewards.pool import error_share
from jaxprorl.rollout.collect import RolloutBatch
from jaxprorl.rollout.groups import counts, graded
from jaxprorl.rollout.repetition import repeated_ngram_share, unique_token_share
from jaxprorl.rollout.surplus import staleness
from jaxprorl.types import Completion, Group, Score


def rollout_metrics(batch: RolloutBatch, advantage_PN: np.ndarray, policy_version: int) -> dict[str, float]:
    """Group counts, lengths and rewards over everything that was drawn; advantages over what was trained on.

    Args:
        batch: the rollout batch.
        advantage_PN: begins with the rows of `batch.trained`.
        policy_version: of the weights that sampled it.
    """
    metrics: dict[str, float] = {
        "groups.drawn": len(batch.groups),
        "groups.kept": len(batch.trained),
        "groups.carried": len(batch.carried),
        "groups.surplus": sum(batch.has_signal) - sum(batch.kept),
        "groups.refill_rounds": len(batch.refills),
        "groups.staleness_max": max((staleness(group, policy_version) for group in batch.trained), default=0),
        "tokens.completion": tokens_of(batch.groups),
        "tokens.wasted": wasted_tokens(batch),
        "time.rollout_s": batch.rollout_s,
        "time.grading_wait_s": batch.grading_wait_s,
    }
    metrics |= {f"rollout.{name}": value for name, value in batch.engine.items()}
    return metrics | (drawn_metrics(batch) if batch.groups else {}) | advantage_metrics(batch.trained, advantage_PN)


def drawn_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Means over the drawn groups."""
    pairs = pairs_of(batch.groups)
    lengths = np.array([len(completion.token_ids) for completion, _ in pairs])
    drawn = len(batch.groups)
    solved = [all(score.solved for score in group.scores) for group in batch.groups]
    metrics = {
        "response_tokens.mean": float(lengths.mean()),
        "response_tokens.max": int(lengths.max()),
        "response.stop_share": sum(c.finish_reason == "stop" for c, _ in pairs) / len(pairs),
        "repetition.unique_share": float(np.mean([unique_token_share(c.token_ids) for c, _ in pairs])),
        "repetition.ngram_share": float(np.mean([repeated_ngram_share(c.token_ids) for c, _ in pairs])),
        "groups.zero_spread_share": 1.0 - sum(batch.has_signal) / drawn,
        "groups.all_correct_share": sum(solved) / drawn,
        "grader.error_share": error_share(score for _, score in pairs),
        "samples.dropped_share": sum(not counts(*pair) for pair in pairs) / len(pairs),
        "time.completion_tokens_per_s": float(lengths.sum()) / batch.rollout_s,
    }
    everything = scores_of(batch.groups)
    if everything.size:
        metrics |= {"reward.mean": float(everything.mean()), "reward.solve_rate": sum(s.solved for _, s in pairs) / everything.size}
    for task in sorted({group.prompt.task for group in batch.groups}):
        values = scores_of([group for group in batch.groups if group.prompt.task == task])
        if values.size:
            metrics[f"reward.{task}"] = float(values.mean())
    for domain in sorted({group.prompt.domain for group in batch.groups}):
        values = scores_of([group for group in batch.groups if group.prompt.domain == domain])
        if values.size:
            metrics |= {f"reward_mean.{domain}": float(values.mean()), f"reward_std.{domain}": float(values.std())}
    return metrics


def advantage_metrics(trained: Sequence[Group], advantage_PN: np.ndarray) -> dict[str, float]:
    """Moments of the advantage by domain."""
    metrics: dict[str, float] = {}
    for domain in sorted({group.prompt.domain for group in trained}):
        chosen = [p for p, group in enumerate(trained) if group.prompt.domain == domain]
        mask_PN = graded([trained[p] for p in chosen])[1] > 0
        values = np.asarray(advantage_PN, np.float64)[chosen][mask_PN]
        if values.size:
            metrics |= {f"advantage_mean.{domain}": float(values.mean()), f"advantage_std.{domain}": float(values.std())}
    return metrics


def wasted_tokens(batch: RolloutBatch) -> int:
    """Tokens that were sampled and will never be trained on."""
    waiting = {id(group) for group in batch.surplus}
    unused = [group for group, kept in zip(batch.groups, batch.kept, strict=True) if not kept and id(group) not in waiting]
    return tokens_of(unused) + tokens_of(batch.expired)


def tokens_of(groups: Sequence[Group]) -> int:
    """Completion tokens of all samples."""
    return sum(len(completion.token_ids) for completion, _ in pairs_of(groups))


def scores_of(groups: Sequence[Group]) -> np.ndarray:
    """Values of all samples that could be graded."""
    return np.array([score.value for _, score in pairs_of(groups) if score.outcome == "scored"], np.float64)


def pairs_of(groups: Sequence[Group]) -> list[tuple[Completion, Score]]:
    """Every completion with its score."""
    return [pair for group in groups for pair in zip(group.completions, group.scores, strict=True)]
