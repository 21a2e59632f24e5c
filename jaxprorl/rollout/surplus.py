"""Groups that a batch had no room for, as JSON: they are part of a checkpoint when a later step may train on them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from ml_collections import ConfigDict

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


def usable(groups: Sequence[Group], config: ConfigDict, policy_version: int) -> list[Group]:
    """Those that a run resumed with `config`, accepted changes included, may train on: their size, lengths and age are within it."""
    c = config.rollout
    return [
        group
        for group in groups
        if len(group.completions) == c.samples_per_prompt
        and max(len(completion.token_ids) for completion in group.completions) <= c.max_response_tokens
        and staleness(group, policy_version) <= c.max_staleness
    ]


def carried_over(
    groups: Sequence[Group], before: ConfigDict, after: ConfigDict, prompts: Sequence[Prompt], policy_version: int
) -> list[Group]:
    """Those that a stage with the config `after`, which draws from `prompts`, may still train on."""
    if before.rollout.temperature != after.rollout.temperature:  # their log-probs are those of another distribution
        return []
    ids = {prompt.prompt_id for prompt in prompts}
    return [group for group in usable(groups, after, policy_version) if group.prompt.prompt_id in ids]


def decode(groups: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt]) -> list[Group]:
    """What `encode` was given, with the prompts of the train split; but not groups whose prompt left it (other data was accepted)."""
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    return [
        Group(
            by_id[group["prompt_id"]],
            tuple(_completion(fields) for fields in group["completions"]),
            tuple(Score(**fields) for fields in group["scores"]),
        )
        for group in groups
        if group["prompt_id"] in by_id
    ]


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
