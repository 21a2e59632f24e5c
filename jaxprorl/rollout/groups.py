"""Groups as arrays [P, N] (prompts, samples): rewards as graded and as shaped, lengths, which samples count; which groups have a signal."""

from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from jaxprorl.algorithms import shaping
from jaxprorl.algorithms.correction import is_sound
from jaxprorl.algorithms.filtering import keeps_signal
from jaxprorl.types import Completion, Group, Score


def counts(completion: Completion, score: Score) -> bool:
    """Whether a sample stays in its group: it was graded, ended by the policy or the limit, and all its log-probs are finite."""
    return score.outcome == "scored" and completion.finish_reason in ("stop", "length") and is_sound(completion.logprobs)


def graded(groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
    """reward_PN as the graders gave it, and mask_PN, 0 where the sample does not count (its reward is 0 then)."""
    mask_PN = np.array([[counts(*pair) for pair in zip(g.completions, g.scores, strict=True)] for g in groups], np.float64)
    reward_PN = np.array([[score.value for score in group.scores] for group in groups], np.float64)
    return np.where(mask_PN > 0, reward_PN, 0.0), mask_PN


def response_tokens(groups: Sequence[Group]) -> np.ndarray:
    """Completion lengths [P, N], the stop token included."""
    return np.array([[len(completion.token_ids) for completion in group.completions] for group in groups], np.int64)


def shaped(config: ConfigDict, groups: Sequence[Group], step: int) -> tuple[np.ndarray, np.ndarray]:
    """reward_PN after what `config.shaping` does with lengths and missing stops at this step, and mask_PN.

    A completion counts as stopped only if the model drew a stop id itself.
    """
    c = config.shaping
    settings = shaping.Shaping(
        stopping=c.stopping,
        max_response_tokens=config.rollout.max_response_tokens,
        penalty=c.penalty,
        buffer_tokens=c.buffer_tokens,
        coefficient=c.coefficient,
        cosine_weight=c.cosine_weight,
        cosine_minimum=c.cosine_minimum,
        cosine_maximum=c.cosine_maximum,
        cosine_on_steps=c.cosine_on_steps,
        cosine_off_steps=c.cosine_off_steps,
    )
    reward_PN, mask_PN = graded(groups)
    stopped_PN = np.array([[completion.finish_reason == "stop" for completion in group.completions] for group in groups])
    reward_PN = shaping.shaped(reward_PN, response_tokens(groups), stopped_PN, step, settings)
    return np.where(mask_PN > 0, reward_PN, 0.0), mask_PN


def has_signal(config: ConfigDict, group: Group) -> bool:
    """Whether dynamic sampling keeps a group: by the rule of its domain, from the graders' rewards or from what they call solved."""
    c = config.filtering
    reward_PN, mask_PN = graded([group])
    solved_PN = np.array([[score.solved for score in group.scores]])
    return bool(keeps_signal(c.rules.get(group.prompt.domain, c.rule), reward_PN, solved_PN, mask_PN, c.tolerance)[0])
