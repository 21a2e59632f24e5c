"""Reward shaping by length and stopping (host side). Lengths are the engine's integers, never counted from text.

`stopped_PN` is True only where the model itself drew a stop id: an answer that was cut at the limit, aborted or lost is never a stop. The
aborted and the lost are not the model's doing and belong out of the batch, by their mask; here they merely are no stops.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def overlong_penalty(response_tokens_PN: np.ndarray, max_response_tokens: int, buffer_tokens: int, penalty: float) -> np.ndarray:
    """DAPO's soft overlong punishment, to be added to the reward (arXiv 2503.14476, section 3.4).

    0 up to max_response_tokens - buffer_tokens, then linear to -penalty at max_response_tokens.

    Raises:
        ValueError: the buffer is not within 1 and the limit, or the penalty is negative.
    """
    if not 1 <= buffer_tokens <= max_response_tokens:
        raise ValueError(f"buffer_tokens is {buffer_tokens}; it must be within 1 and max_response_tokens = {max_response_tokens}")
    _check_not_negative("penalty", penalty)
    over_PN = np.asarray(response_tokens_PN, np.float64) - (max_response_tokens - buffer_tokens)
    return -penalty * np.clip(over_PN / buffer_tokens, 0.0, 1.0)


def non_termination_penalty(stopped_PN: np.ndarray, penalty: float) -> np.ndarray:
    """-penalty where the answer never stopped, to be added to the reward (ProRL runs 4 and 5, appendix F; its size is not published).

    Raises:
        ValueError: the penalty is negative.
    """
    _check_not_negative("penalty", penalty)
    return np.where(np.asarray(stopped_PN, bool), 0.0, -penalty)


def stop_properly(reward_PN: np.ndarray, stopped_PN: np.ndarray, coefficient: float) -> np.ndarray:
    """Reward x coefficient where the answer never stopped (NeMo-RL's ProRL v2 recipe, coefficient 0; arXiv 2510.15110).

    differs from NeMo-RL: a negative reward is left as it is; scaled, it would rise, and never stopping would be rewarded.

    Raises:
        ValueError: the coefficient is not within 0 and 1.
    """
    if not 0 <= coefficient <= 1:
        raise ValueError(f"coefficient is {coefficient}; it must be within 0 (no reward without a stop) and 1 (no change)")
    reward_PN = np.asarray(reward_PN, np.float64)
    return np.where(np.asarray(stopped_PN, bool) | (reward_PN < 0), reward_PN, reward_PN * coefficient)


def cosine_length(response_tokens_PN: np.ndarray, max_response_tokens: int, minimum: float, maximum: float) -> np.ndarray:
    """ProRL v2's length term: minimum + (maximum - minimum) (1 + cos(pi t / T)) / 2, from maximum at 0 tokens to minimum at the limit T.

    R' = R + weight x term; the weight and both ends are not published. Shorter answers get more, right or wrong.

    Raises:
        ValueError: minimum exceeds maximum: longer answers would get more.
    """
    if minimum > maximum:
        raise ValueError(f"minimum is {minimum}, maximum {maximum}; the term falls with the length, from maximum to minimum")
    share_PN = np.clip(np.asarray(response_tokens_PN, np.float64) / max_response_tokens, 0.0, 1.0)
    return minimum + 0.5 * (maximum - minimum) * (1.0 + np.cos(np.pi * share_PN))


def cosine_is_on(step: int, on_steps: int, off_steps: int) -> bool:
    """Whether the length term counts in this step: on for `on_steps`, off for `off_steps`, again and again (ProRL v2: 100 and 500).

    Without on-steps it never counts, without off-steps always.

    Raises:
        ValueError: one of them is negative.
    """
    _check_not_negative("on_steps", on_steps)
    _check_not_negative("off_steps", off_steps)
    return on_steps > 0 and step % (on_steps + off_steps) < on_steps


def _check_not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} is {value}; it must not be negative")


@dataclass(frozen=True)
class Shaping:
    """What is done to rewards.

    Attributes:
        stopping: a key of `STOPPING`. One treatment at a time: each punishes the same answers, those cut at the limit, and two of them
            would do so twice (NeMo-RL cannot combine them either). The cosine term goes with any of them.
        max_response_tokens: the limit on response tokens.
        penalty: of "overlong" and "non_termination", in units of reward.
        buffer_tokens: of "overlong", length of the ramp below the limit.
        coefficient: of "stop_properly", what remains of the reward.
        cosine_weight: of the length term; 0 = none.
        cosine_minimum: the term at the limit.
        cosine_maximum: the term at 0 tokens.
        cosine_on_steps: steps with the length term, from the first.
        cosine_off_steps: steps without it, after each such phase.
    """

    stopping: str
    max_response_tokens: int
    penalty: float
    buffer_tokens: int
    coefficient: float
    cosine_weight: float
    cosine_minimum: float
    cosine_maximum: float
    cosine_on_steps: int
    cosine_off_steps: int


# Treatments of answers that do not stop, by name; each takes reward_PN, response_tokens_PN, stopped_PN and the settings.
STOPPING: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, Shaping], np.ndarray]] = {
    "off": lambda reward_PN, tokens_PN, stopped_PN, s: reward_PN,
    "overlong": lambda reward_PN, tokens_PN, stopped_PN, s: (
        reward_PN + overlong_penalty(tokens_PN, s.max_response_tokens, s.buffer_tokens, s.penalty)
    ),
    "non_termination": lambda reward_PN, tokens_PN, stopped_PN, s: reward_PN + non_termination_penalty(stopped_PN, s.penalty),
    "stop_properly": lambda reward_PN, tokens_PN, stopped_PN, s: stop_properly(reward_PN, stopped_PN, s.coefficient),
}


def shaped(reward_PN: np.ndarray, response_tokens_PN: np.ndarray, stopped_PN: np.ndarray, step: int, settings: Shaping) -> np.ndarray:
    """The rewards that advantages are taken of, float64: stopping first, then the cosine term in its phases.

    Which groups carry a signal is decided before this, by the graders' rewards: lengths always differ, so no group would be dropped after.
    """
    result_PN = STOPPING[settings.stopping](np.asarray(reward_PN, np.float64), response_tokens_PN, stopped_PN, settings)
    if settings.cosine_weight and cosine_is_on(step, settings.cosine_on_steps, settings.cosine_off_steps):
        length_PN = cosine_length(response_tokens_PN, settings.max_response_tokens, settings.cosine_minimum, settings.cosine_maximum)
        result_PN = result_PN + settings.cosine_weight * length_PN
    return result_PN
