"""The papers' formulas once more, in plain Python: one number at a time, no arrays, nothing shared with the package.

A group is a list of (reward, counts, response_tokens); a sequence is a list of per-token numbers.
"""

import math
from collections.abc import Callable, Sequence

Group = list[tuple[float, bool, int]]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def each_sample(groups: list[Group], value: Callable[[float, list[float]], float]) -> list[list[float]]:
    """`value(reward, counted rewards of its group)` of every sample that counts in a group with spread; 0 elsewhere."""
    result = []
    for group in groups:
        counted = [reward for reward, counts, _ in group if counts]
        result.append([value(reward, counted) if counts and len(set(counted)) > 1 else 0.0 for reward, counts, _ in group])
    return result


def grpo(groups: list[Group]) -> list[list[float]]:
    return each_sample(groups, lambda reward, counted: (reward - mean(counted)) / deviation(counted))


def dr_grpo(groups: list[Group]) -> list[list[float]]:
    return each_sample(groups, lambda reward, counted: reward - mean(counted))


def rloo(groups: list[Group]) -> list[list[float]]:
    """The baseline of a sample is the mean reward of the others."""

    def value(reward: float, counted: list[float]) -> float:
        others = list(counted)
        others.remove(reward)
        return reward - mean(others)

    return each_sample(groups, value)


def reinforce_pp(groups: list[Group], over_tokens: bool) -> list[list[float]]:
    """Batch statistics over a plain list with one entry per trajectory, or per response token."""
    centred = dr_grpo(groups)
    batch = [
        value
        for values, group in zip(centred, groups, strict=True)
        for value, (_, counts, tokens) in zip(values, group, strict=True)
        if counts
        for _ in range(tokens if over_tokens else 1)
    ]
    return [
        [
            (value - mean(batch)) / deviation(batch) if counts and any(values) else 0.0
            for value, (_, counts, _) in zip(values, group, strict=True)
        ]
        for values, group in zip(centred, groups, strict=True)
    ]


def clipped(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """PPO's loss of one ratio with bounds 1 - low and 1 + high, and its derivative by the log-ratio."""
    bounded = max(1 - low, min(1 + high, ratio))
    free, held = ratio * advantage, bounded * advantage
    return -min(free, held), -free if free <= held else 0.0


def sequence_ratio(logp: Sequence[float], old: Sequence[float]) -> float:
    """GSPO's: (pi(y) / pi_old(y)) ** (1 / |y|), from the likelihoods of the whole answer."""
    return math.exp((math.fsum(logp) - math.fsum(old)) / len(logp))


def aggregate(kind: str, losses: list[list[float]], max_response_tokens: int) -> float:
    """One number from the per-token losses of several answers."""
    if kind == "token_mean":
        return mean([value for answer in losses for value in answer])
    if kind == "sequence_mean":
        return mean([mean(answer) for answer in losses])
    return mean([math.fsum(answer) / max_response_tokens for answer in losses])


def correction(kind: str, old: Sequence[float], engine: Sequence[float], low: float, high: float) -> list[float]:
    """Weights of one answer's tokens."""
    ratios = [math.exp(a - b) for a, b in zip(old, engine, strict=True)]
    if kind == "off":
        return [1.0 for _ in ratios]
    if kind == "truncated":
        return [min(ratio, high) for ratio in ratios]
    if kind == "icepop":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    geometric_mean = math.prod(ratio ** (1 / len(ratios)) for ratio in ratios)
    return ratios if low <= geometric_mean <= high else [0.0 for _ in ratios]


def overlong(tokens: int, limit: int, buffer: int, penalty: float) -> float:
    """DAPO's three cases, equation 13, times a penalty."""
    if tokens <= limit - buffer:
        return 0.0
    if tokens <= limit:
        return penalty * ((limit - buffer) - tokens) / buffer
    return -penalty
