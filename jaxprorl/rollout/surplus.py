"""Groups that a batch had no room for, as JSON: they are part of a checkpoint when a later step may train on them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxprorl.rewards.graded import is_solved
from jaxprorl.rollout.groups import has_signal
from jaxprorl.types import Completion, Group, Prompt, Score


def staleness(group: Group, policy_version: int) -> int:
    """How many weight swaps ago the oldest token of a group was sampled."""
    spans = (span for completion in group.completions for span in completion.version_spans)
    return policy_version - min((version for version, _, _ in spans), default=policy_version)


def encode(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """JSON types only, every bit kept. Prompts go by their id."""
    return [
        {
            "prompt_id": group.prompt.prompt_id,
            "completions": [
                asdict(replace(c, token_ids=_pack(c.token_ids, "int32"), logprobs=_pack(c.logprobs, "float32")))  # type: ignore[arg-type]
                for c in group.completions
            ],
            "scores": [asdict(score) for score in group.scores],
        }
        for group in groups
    ]


def usable(
    groups: Sequence[Group], config: ConfigDict, prompts: Sequence[Prompt], policy_version: int, temperature: float | None
) -> list[Group]:
    """Those that steps with `config` may train on, where a stage begins or a run goes on with accepted changes.

    Their distribution must be that of what these steps sample: same temperature, number of samples and prompts, answers within the
    response limit and none cut at a lower one. They must have a signal by the filter of now, and be within `rollout.max_staleness`.
    What differs by rounding (`model.dtype`, the engine) is as between engine and trainer: `algorithm.correction` weighs it.

    Args:
        prompts: that the steps draw from.
        policy_version: of the weights now.
        temperature: at which the groups were sampled; None = unknown, which is no temperature.

    Raises:
        RewardError: the filter does not fit the reward.
    """
    c, ids = config.rollout, {prompt.prompt_id for prompt in prompts}
    if temperature != c.temperature:  # their log-probs are those of another distribution
        return []
    return [
        group
        for group in groups
        if group.prompt.prompt_id in ids
        and len(group.completions) == c.samples_per_prompt
        and all(_within(completion, c.max_response_tokens) for completion in group.completions)
        and staleness(group, policy_version) <= c.max_staleness
        and has_signal(config, group)
    ]


def _within(completion: Completion, limit: int) -> bool:
    """Whether a completion could have come about under this limit: it is no longer, and if one cut it, it was this one."""
    tokens = len(completion.token_ids)
    return tokens <= limit and (tokens == limit or completion.finish_reason != "length")


def decode(groups: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt]) -> list[Group]:
    """What `encode` was given, with the prompts of the train split; but not groups whose prompt left it (other data was accepted)."""
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    return [
        Group(
            by_id[group["prompt_id"]],
            tuple(_completion(fields) for fields in group["completions"]),
            tuple(_score(fields) for fields in group["scores"]),
        )
        for group in groups
        if group["prompt_id"] in by_id
    ]


def _score(fields: Mapping[str, Any]) -> Score:
    if "solved" not in fields:  # a checkpoint of before this field, when solved meant a reward of 1
        fields = {**fields, "solved": fields["outcome"] == "scored" and is_solved(fields["value"], None, 1.0)}
    return Score(**fields)


def _completion(fields: Mapping[str, Any]) -> Completion:
    return Completion(
        prompt_id=fields["prompt_id"],
        sample=fields["sample"],
        token_ids=_unpack(fields["token_ids"], "int32"),
        logprobs=_unpack(fields["logprobs"], "float32"),
        finish_reason=fields["finish_reason"],
        version_spans=tuple((int(a), int(b), int(c)) for a, b, c in fields["version_spans"]),
    )


def _pack(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).tobytes()).decode("ascii")


def _unpack(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
