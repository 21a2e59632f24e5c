"""The probe that ends a weight swap: the worker samples answers to fixed prompts, the trainer takes their log-probs itself.

The prompts are longer than a cache block and the same every time, so that a prefix cache that outlived its weights answers from
it and is found out. The temperature is the run's, so a worker that forgets it is found out too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.models.compute import Compute
from jaxprorl.models.logprobs import token_log_probs
from jaxprorl.models.qwen2 import Params, Qwen2Config, build
from jaxprorl.rollout.preflight import BEYOND_BLOCK_TOKENS, PROMPTS, probe_tokens
from jaxprorl.sharding.mesh import replicated
from jaxprorl.types import Completion

# Nats by the coarser of both sides' dtypes. float32 kernels differ by 1e-5 (docs/rollouts.md); logits of size 16 to 32 in bfloat16 are
# 0.125 apart, and a few such steps lie between two implementations.
TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.5}
# Of the mean over all tokens of the probe, which tells weights from rounding where single tokens do not: bfloat16's is 0.02.
MEAN_TOLERANCE_NATS = {"float32": 1e-4, "bfloat16": 0.1}


@dataclass(frozen=True)
class Difference:
    """Of engine and trainer, in nats: |difference| of a token's log-probs, the largest and the mean; or how large they may be."""

    largest: float
    mean: float

    def within(self, bound: "Difference") -> bool:
        """False also for what is no number."""
        return self.largest <= bound.largest and self.mean <= bound.mean


def probe_prompts(vocab_size: int, block_tokens: int) -> list[np.ndarray]:
    """int32 token ids, spread over the vocabulary, the same for every run of a model."""
    random = np.random.RandomState(0)  # its stream is frozen for ever
    return [random.randint(0, vocab_size, block_tokens + BEYOND_BLOCK_TOKENS + i).astype(np.int32) for i in range(PROMPTS)]


def tolerance(config: ConfigDict) -> Difference:
    """How far engine and trainer may be apart: by dtype; `rollout.vllm.probe_tolerance_nats`, if not 0, moves both bounds in proportion."""
    c = config.rollout.vllm
    coarser = "bfloat16" if "bfloat16" in (c.dtype, config.model.dtype) else "float32"
    largest = float(c.probe_tolerance_nats) or TOLERANCE_NATS[coarser]
    return Difference(largest, largest / TOLERANCE_NATS[coarser] * MEAN_TOLERANCE_NATS[coarser])


class Probe:
    """The trainer's side: one executable for the probe's shape."""

    def __init__(self, config: ConfigDict, c: Qwen2Config, mesh: Mesh):
        self.prompts = probe_prompts(c.vocab_size, config.rollout.vllm.block_tokens)
        self.temperature = float(config.rollout.temperature)
        self._graphdef = build(c, Compute(config.model.dtype))
        self._mesh = mesh
        self._shape = PROMPTS, probe_tokens(config.rollout.vllm.block_tokens)
        self._log_probs: jax.stages.Compiled | None = None

    def compile(self, params: Params) -> None:
        """Compiles the trainer's log-probs. `params` may be shapes with shardings."""
        whole = replicated(self._mesh)
        tokens = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=whole)
        self._log_probs = jax.jit(self._compute, out_shardings=whole).lower(params, tokens, tokens).compile()

    def difference(self, params: Params, completions: Sequence[Completion]) -> Difference:
        """Of engine and trainer over the tokens of the answers to `prompts`, in their order; inf if one is not a number."""
        assert self._log_probs is not None, "compile first"
        tokens_BS, segments_BS = np.zeros(self._shape, np.int32), np.zeros(self._shape, np.int32)
        sequences = [np.concatenate([prompt, c.token_ids]) for prompt, c in zip(self.prompts, completions, strict=True)]
        for row, sequence in enumerate(sequences):
            tokens_BS[row, : len(sequence)], segments_BS[row, : len(sequence)] = sequence, 1
        logp_BS = np.asarray(self._log_probs(params, *jax.device_put((tokens_BS, segments_BS), replicated(self._mesh))))
        differences = [
            np.abs(logp_BS[row, len(prompt) - 1 : len(prompt) - 1 + len(c.token_ids)] - c.logprobs)
            for row, (prompt, c) in enumerate(zip(self.prompts, completions, strict=True))
        ]
        joined = np.concatenate(differences)
        finite = bool(np.isfinite(joined).all())
        return Difference(float(joined.max()), float(joined.mean())) if finite else Difference(float("inf"), float("inf"))

    def _compute(self, params: Params, tokens_BS: jax.Array, segments_BS: jax.Array) -> jax.Array:
        """logp_BS: of the token after each."""
        model = nnx.merge(self._graphdef, params)
        positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        hidden_BSD = model(tokens_BS, positions_BS, segments_BS)
        targets_BS = jnp.roll(tokens_BS, -1, axis=1)
        return token_log_probs(hidden_BSD, model.head(), targets_BS, self.temperature, segments_BS.astype(jnp.float32))[0]
