"""Dynamic sampling: which groups carry a learning signal (DAPO, arXiv 2503.14476, section 3.2; ProRL, section 2.3).

"spread" reads the rewards, which may be any finite numbers. "accuracy" reads which answers are solved, and no reward.
"""

from collections.abc import Callable

import numpy as np


def has_spread(reward_PN: np.ndarray, mask_PN: np.ndarray, tolerance: float) -> np.ndarray:
    """keep_P: True where the largest and smallest counted reward differ by more than `tolerance`.

    Covers binary rewards (accuracy exactly 0 or 1) and continuous ones alike; fewer than two counted samples have no spread.
    differs from ProRL: the paper states the rule for accuracies only; for continuous rewards it is a choice.
    """
    counted = np.asarray(mask_PN) > 0
    highest_P = np.where(counted, reward_PN, -np.inf).max(axis=1)
    lowest_P = np.where(counted, reward_PN, np.inf).min(axis=1)
    return highest_P - lowest_P > tolerance


def has_mixed_accuracy(solved_PN: np.ndarray, mask_PN: np.ndarray) -> np.ndarray:
    """keep_P: True where some counted answers are solved and some are not: the papers' rule, whatever the rewards are."""
    counted = np.asarray(mask_PN) > 0
    right_P = (counted & np.asarray(solved_PN, bool)).sum(axis=1)
    return (right_P > 0) & (right_P < counted.sum(axis=1))


def keep_all(reward_PN: np.ndarray, mask_PN: np.ndarray) -> np.ndarray:
    """keep_P: True everywhere, as without dynamic sampling (GRPO, arXiv 2402.03300); groups without spread get advantages of 0."""
    return np.ones(len(reward_PN), bool)


# Rules by name; each takes reward_PN, solved_PN, mask_PN and the tolerance.
FILTERS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]] = {
    "spread": lambda reward_PN, solved_PN, mask_PN, tolerance: has_spread(reward_PN, mask_PN, tolerance),
    "accuracy": lambda reward_PN, solved_PN, mask_PN, tolerance: has_mixed_accuracy(solved_PN, mask_PN),
    "off": lambda reward_PN, solved_PN, mask_PN, tolerance: keep_all(reward_PN, mask_PN),
}


def keeps_signal(kind: str, reward_PN: np.ndarray, solved_PN: np.ndarray, mask_PN: np.ndarray, tolerance: float) -> np.ndarray:
    """keep_P: which groups to train on, by a rule of `FILTERS`; only "spread" reads the rewards and the tolerance."""
    return FILTERS[kind](reward_PN, solved_PN, mask_PN, tolerance)
