"""Log-probs the long way: the logits of a whole sequence, and scipy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from factories import QUICK_COMPILE
from flax import nnx

from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Qwen2Config, build

WIDTH = 96


def response_logits(c: Qwen2Config, params: Any, prompt_ids: np.ndarray, response_ids: np.ndarray) -> np.ndarray:
    """Logits [T, V], float64, that each response token was chosen by."""
    sequence = np.concatenate([prompt_ids, response_ids])
    row, segments = np.zeros((2, WIDTH), np.int32)[:, None]
    row[0, : len(sequence)], segments[0, : len(sequence)] = sequence, 1
    logits_SV = np.asarray(_logits(c, params, row, segments))[0].astype(np.float64)
    return logits_SV[len(prompt_ids) - 1 : len(sequence) - 1]


def response_log_probs(
    c: Qwen2Config, params: Any, prompt_ids: np.ndarray, response_ids: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Of each response token."""
    logp_TV = scipy.special.log_softmax(response_logits(c, params, prompt_ids, response_ids) / temperature, axis=1)
    return logp_TV[np.arange(len(response_ids)), response_ids]


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def _logits(c: Qwen2Config, params: Any, row_BS: jax.Array, segments_BS: jax.Array) -> jax.Array:
    model = nnx.merge(build(c, Compute()), params)
    return model(row_BS, jnp.arange(WIDTH)[None], segments_BS) @ model.head().T
