"""Group-relative advantages. Groups are an array axis (prompts P, samples N), never ids."""

import numpy as np


def group_relative(reward_PN: np.ndarray, mask_PN: np.ndarray) -> np.ndarray:
    """GRPO's advantage: (reward - group mean) / group standard deviation (arXiv 2402.03300, section 4.1.2).

    Args:
        reward_PN: float rewards.
        mask_PN: 1 where the sample counts; a sample with a grader error does not, and n - 1 remain.

    Returns:
        advantage_PN, float32; exactly 0 for groups without spread and where the mask is 0.

    The standard deviation is the population's (divisor n), as in the paper's formula; there is no epsilon in the
    divisor, because groups without spread are zeroed rather than divided.
    """
    reward_PN = np.asarray(reward_PN, np.float64)
    mask_PN = np.asarray(mask_PN, np.float64)
    count_P1 = np.maximum(mask_PN.sum(axis=1, keepdims=True), 1.0)
    mean_P1 = (reward_PN * mask_PN).sum(axis=1, keepdims=True) / count_P1
    centred_PN = (reward_PN - mean_P1) * mask_PN
    deviation_P1 = np.sqrt((centred_PN**2).sum(axis=1, keepdims=True) / count_P1)
    spread = np.broadcast_to(deviation_P1 > 1e-8, reward_PN.shape)  # below it: rounding of equal rewards
    advantage_PN = np.divide(centred_PN, deviation_P1, out=np.zeros_like(centred_PN), where=spread)
    return advantage_PN.astype(np.float32)
