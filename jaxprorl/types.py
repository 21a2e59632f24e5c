"""Host types: what travels between data, rollout, rewards and training. Plain numpy, no JAX.

Token ids travel, text never does: `data.prompts` renders a prompt into ids once, only graders decode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "aborted", "error"]
Outcome = Literal["scored", "grader_error"]


@dataclass(frozen=True)
class Prompt:
    """One question, already rendered into token ids.

    Attributes:
        prompt_id: stable, unique over all splits; random draws depend on it, never on arrival order.
        domain: group in reports and mixtures, e.g. a reasoning-gym category or `jsonl`.
        token_ids: int32 [prompt_tokens], ends with the generation header of the chat template.
        task: name inside the domain, the row of every before/after table.
        answer: the reference answer as text (may be empty when only `item` can judge).
        item: what the reward function needs beside the answer (JSON types only).
    """

    prompt_id: int
    domain: str
    token_ids: np.ndarray
    task: str
    answer: str
    item: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        prompt_id: of the prompt it answers.
        sample: index within the group, 0 <= sample < n.
        token_ids: int32 [response_tokens]; a `stop` completion ends with the stop id the model drew.
        logprobs: float32 [response_tokens], at the sampling temperature.
        finish_reason: `stop` only if the model itself drew a stop id.
        version_spans: ((policy_version, first_token, end_token), ...), which weights made which tokens.
    """

    prompt_id: int
    sample: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    version_spans: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Score:
    """What a grader says of one completion. `grader_error` is never a zero: the sample leaves its group.

    Attributes:
        value: the reward, any finite number; 0 after a grader error.
        solved: whether the answer is right: the grader's own word, else value >= `grading.solved_from`. False after a grader error.
    """

    value: float
    solved: bool
    outcome: Outcome
    grader: str
    grader_version: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Group:
    """A prompt with its n completions and scores, in sample order."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]
