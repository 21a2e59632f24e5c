"""Small models, configs, prompts and groups for tests: one place, no randomness that a library update could change."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from ml_collections import ConfigDict

from configs import base
from jaxprorl.models.qwen2 import Qwen2Config, declarations
from jaxprorl.types import Completion, Group, Prompt, Score

PROPERTY = settings(deadline=None, derandomize=True)  # the same examples every time, however busy the machine
# Compile options for tests of formulas, where compiling takes the time: several times faster, hardly optimised.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

TINY = Qwen2Config(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    max_position_embeddings=64,
)


def tiny_model(**changes: Any) -> Qwen2Config:
    return dataclasses.replace(TINY, **changes)


def random_params(c: Qwen2Config, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Parameters of a size that makes every part matter: no bias is zero, no norm is one, no softmax is flat.

    RandomState's stream is frozen for ever, unlike that of numpy's newer generators; golden numbers rest on it.
    """
    random = np.random.RandomState(seed)
    params = {}
    for name, declaration in declarations(c).items():
        noise = random.standard_normal(declaration.shape)
        params[name] = (1.0 + 0.2 * noise if declaration.init == "ones" else 0.3 * noise).astype(np.float32).astype(dtype)
    return params


def tiny_config(**overrides: Any) -> ConfigDict:
    """A config of four prompts, four samples each and two updates; overrides by dotted name with `__` for the dot."""
    config = base.get_config()
    changes = {
        "batch__prompts": 4,
        "batch__updates": 2,
        "batch__row_tokens": 24,
        "batch__micro_batch_rows": 4,
        "mesh__cpu_devices": 2,
        "batch__refill_prompts": 2,
        "rollout__samples_per_prompt": 4,
        "rollout__max_prompt_tokens": 8,
        "rollout__max_response_tokens": 12,
        "rollout__slots": 16,
        "rollout__decode_chunk_tokens": 4,
        "optimizer__learning_rate": 1e-2,
    }
    for name, value in (changes | overrides).items():
        section, _, field = name.partition("__")
        if field:
            config[section][field] = value
        else:
            config[section] = value
    return config


def make_prompt(prompt_id: int, token_ids: Sequence[int] = (5, 6, 7), task: str = "task") -> Prompt:
    return Prompt(prompt_id, "domain", np.array(token_ids, np.int32), task, "answer")


def make_score(value: float, outcome: str = "scored") -> Score:
    return Score(value, outcome == "scored" and value >= 1, outcome, "test:grader", "0", 0.0)  # type: ignore[arg-type]


def make_group(
    prompt: Prompt, responses: Sequence[Sequence[int]], values: Sequence[float | None], logprobs: Sequence[Sequence[float]] | None = None
) -> Group:
    """A group of these responses; a value of None is a grader error."""
    completions = []
    for sample, ids in enumerate(responses):
        logp = np.array(logprobs[sample] if logprobs else [-1.0] * len(ids), np.float32)
        completions.append(Completion(prompt.prompt_id, sample, np.array(ids, np.int32), logp, "stop", ((0, 0, len(ids)),)))
    scores = [make_score(0.0, "grader_error") if value is None else make_score(value) for value in values]
    return Group(prompt, tuple(completions), tuple(scores))


def random_groups(count: int, samples: int = 4, seed: int = 1, vocab: int = 48) -> list[Group]:
    """Groups with prompts and responses of many lengths, continuous rewards, no grader errors."""
    random = np.random.RandomState(seed)
    groups = []
    for prompt_id in range(count):
        prompt = make_prompt(prompt_id, random.randint(1, vocab, size=random.randint(1, 9)))
        responses = [random.randint(1, vocab, size=random.randint(1, 13)) for _ in range(samples)]
        logprobs = [-3.0 + 0.5 * random.standard_normal(len(ids)) for ids in responses]
        groups.append(make_group(prompt, responses, list(random.uniform(size=samples)), logprobs))
    return groups
