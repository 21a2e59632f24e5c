"""Resets as functions on the training state."""

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxprorl.optimizer import make_optimizer
from jaxprorl.state import TrainState


def reset(state: TrainState, config: ConfigDict) -> TrainState:
    """The reference becomes the current policy; with `config.resets.optimizer` the Optax state starts afresh too.

    ProRL (arXiv 2505.24864, section 2.3.2) hard-resets both. Jit it with the state donated: the copy is then made once.
    """
    reference = jax.tree.map(jnp.copy, state.params)
    opt_state = make_optimizer(config).init(state.params) if config.resets.optimizer else state.opt_state
    return TrainState(state.params, reference, opt_state)
