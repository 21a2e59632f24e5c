"""Advantages of groups of answers to one prompt. Groups are an array axis (prompts P, samples N), never ids.

Every function takes `mask_PN`, 1 where a sample counts: one with a grader error leaves its group and n - 1 remain, so groups of
different sizes may share an array. Groups without spread get exactly 0, as does every masked sample; there is no epsilon in a divisor.
All return float32 and raise ValueError where a counted reward is not finite.
"""

from collections.abc import Callable

import numpy as np

EQUAL = 1e-8  # rewards are of the order of 1: a group whose counted rewards all lie within this is without spread, but for rounding


def group_relative(reward_PN: np.ndarray, mask_PN: np.ndarray) -> np.ndarray:
    """GRPO: (reward - group mean) / group standard deviation (arXiv 2402.03300, section 4.1.2).

    The standard deviation is the population's (divisor n), as in the paper's formula.
    """
    centred_PN, count_P1 = _centred(reward_PN, mask_PN)
    return _divide(centred_PN, np.sqrt((centred_PN**2).sum(axis=1, keepdims=True) / count_P1))


def mean_centred(reward_PN: np.ndarray, mask_PN: np.ndarray) -> np.ndarray:
    """Dr. GRPO: reward - group mean, so that very easy and very hard prompts are not scaled up (arXiv 2503.20783, section 3)."""
    return _centred(reward_PN, mask_PN)[0].astype(np.float32)


def leave_one_out(reward_PN: np.ndarray, mask_PN: np.ndarray) -> np.ndarray:
    """RLOO: reward - mean of the group's other rewards = n / (n - 1) x (reward - group mean) (arXiv 2402.14740)."""
    centred_PN, count_P1 = _centred(reward_PN, mask_PN)
    return (centred_PN * count_P1 / np.maximum(count_P1 - 1, 1)).astype(np.float32)


def reinforce_pp_baseline(reward_PN: np.ndarray, mask_PN: np.ndarray, weight_PN: np.ndarray) -> np.ndarray:
    """REINFORCE++-baseline: x = reward - group mean, then (x - batch mean) / batch standard deviation (arXiv 2501.03262; ProRL v2).

    Args:
        reward_PN: rewards of the whole rollout batch.
        mask_PN: 1 where the sample counts.
        weight_PN: weight of each sample in the batch's statistics: 1 for statistics over trajectories (ProRL v2's formula), its response
            tokens for statistics over response tokens (NeMo-RL). A sample of weight 0 does not count.

    differs from NeMo-RL: a group without spread weighs in the statistics too, but gets 0 instead of -mean / deviation, an offset that
    says nothing about its answers; the variance has no floor of 1e-8.
    """
    counted = (np.asarray(mask_PN) > 0) & (np.asarray(weight_PN) > 0)
    weight_PN = np.where(counted, weight_PN, 0).astype(np.float64)
    centred_PN, _ = _centred(reward_PN, counted)
    total = max(weight_PN.sum(), 1e-300)
    offset_PN = centred_PN - (weight_PN * centred_PN).sum() / total
    deviation = np.sqrt((weight_PN * offset_PN**2).sum() / total)
    spread_P1 = centred_PN.any(axis=1, keepdims=True)
    return _divide(np.where(counted & spread_P1, offset_PN, 0.0), deviation)


def _centred(reward_PN: np.ndarray, mask_PN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reward - group mean in float64, exactly 0 without spread and where masked; and count_P1, at least 1."""
    counted = np.asarray(mask_PN) > 0
    reward_PN = np.asarray(reward_PN, np.float64)
    wrong = np.argwhere(counted & ~np.isfinite(reward_PN))
    if len(wrong):
        p, n = wrong[0]
        raise ValueError(f"reward of group {p}, sample {n} is {reward_PN[p, n]}; a sample without a finite reward must be masked")
    reward_PN = np.where(counted, reward_PN, 0.0)
    count_P1 = np.maximum(counted.sum(axis=1, keepdims=True), 1)
    highest_P1 = np.where(counted, reward_PN, -np.inf).max(axis=1, keepdims=True)
    lowest_P1 = np.where(counted, reward_PN, np.inf).min(axis=1, keepdims=True)
    mean_P1 = reward_PN.sum(axis=1, keepdims=True) / count_P1
    return np.where(counted & (highest_P1 - lowest_P1 > EQUAL), reward_PN - mean_P1, 0.0), count_P1


def _divide(x_PN: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Float32 x / deviation; 0 where x is 0, whatever the deviation."""
    return np.divide(x_PN, deviation, out=np.zeros_like(x_PN), where=x_PN != 0).astype(np.float32)


# Kinds by name; each takes reward_PN, mask_PN and response_tokens_PN.
ADVANTAGES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "grpo": lambda reward_PN, mask_PN, _: group_relative(reward_PN, mask_PN),
    "dr_grpo": lambda reward_PN, mask_PN, _: mean_centred(reward_PN, mask_PN),
    "rloo": lambda reward_PN, mask_PN, _: leave_one_out(reward_PN, mask_PN),
    "reinforce_pp_trajectory": lambda reward_PN, mask_PN, _: reinforce_pp_baseline(reward_PN, mask_PN, np.ones_like(mask_PN)),
    "reinforce_pp_token": reinforce_pp_baseline,
}


def advantages(kind: str, reward_PN: np.ndarray, mask_PN: np.ndarray, response_tokens_PN: np.ndarray) -> np.ndarray:
    """advantage_PN (float32) of a rollout batch by the name of its kind, a key of `ADVANTAGES`.

    Args:
        kind: which advantage.
        reward_PN: rewards, one row per prompt.
        mask_PN: 1 where the sample counts.
        response_tokens_PN: integer lengths; only "reinforce_pp_token" reads them.
    """
    return ADVANTAGES[kind](reward_PN, mask_PN, response_tokens_PN)
