"""Dynamic sampling: which groups carry a learning signal (DAPO, arXiv 2503.14476, section 3.2; ProRL, section 2.3)."""

import numpy as np


def has_spread(reward_PN: np.ndarray, mask_PN: np.ndarray, tolerance: float) -> np.ndarray:
    """keep_P: True where the largest and smallest counted reward differ by more than `tolerance`.

    Covers binary rewards (accuracy exactly 0 or 1) and continuous ones alike.
    differs from ProRL: the paper states the rule for accuracies only; for continuous rewards it is a choice.
    """
    counted = np.asarray(mask_PN) > 0
    highest_P = np.where(counted, reward_PN, -np.inf).max(axis=1)
    lowest_P = np.where(counted, reward_PN, np.inf).min(axis=1)
    return (counted.sum(axis=1) >= 2) & (highest_P - lowest_P > tolerance)
