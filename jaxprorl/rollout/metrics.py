"""Numbers of one rollout batch, by the names of `monitoring.metrics`."""

import numpy as np

from jaxprorl.rewards.pool import error_share
from jaxprorl.rollout.collect import RolloutBatch


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards, lengths and group counts over everything that was drawn."""
    pairs = [(group.prompt.task, c, s) for group in batch.groups for c, s in zip(group.completions, group.scores, strict=True)]
    values: dict[str, list[float]] = {}
    for task, _, score in pairs:
        if score.outcome == "scored":
            values.setdefault(task, []).append(score.value)
    everything = [value for task in sorted(values) for value in values[task]]
    lengths = np.array([len(completion.token_ids) for _, completion, _ in pairs])
    drawn = len(batch.groups)
    solved = [all(s.outcome == "scored" and s.value >= 1.0 for s in group.scores) for group in batch.groups]
    metrics = {
        "response_tokens.mean": float(lengths.mean()),
        "response_tokens.max": int(lengths.max()),
        "response.stop_share": sum(c.finish_reason == "stop" for _, c, _ in pairs) / len(pairs),
        "groups.drawn": drawn,
        "groups.kept": sum(batch.kept),
        "groups.surplus": sum(batch.has_spread) - sum(batch.kept),
        "groups.zero_spread_share": 1.0 - sum(batch.has_spread) / drawn,
        "groups.all_correct_share": sum(solved) / drawn,
        "groups.refill_rounds": len(batch.refills),
        "grader.error_share": error_share(score for _, _, score in pairs),
        "tokens.completion": int(lengths.sum()),
        "time.rollout_s": batch.rollout_s,
        "time.grading_wait_s": batch.grading_wait_s,
        "time.completion_tokens_per_s": float(lengths.sum()) / batch.rollout_s,
    }
    if everything:
        metrics |= {"reward.mean": float(np.mean(everything)), "reward.solve_rate": float(np.mean(np.array(everything) >= 1.0))}
        metrics |= {f"reward.{task}": float(np.mean(rewards)) for task, rewards in values.items()}
    return metrics
