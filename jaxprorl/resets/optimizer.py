"""Resets as functions on the training state."""

from ml_collections import ConfigDict

from jaxprorl.optimizer import make_optimizer
from jaxprorl.state import TrainState, reference_of


def reset(state: TrainState, config: ConfigDict) -> TrainState:
    """The reference becomes the current policy; with `config.resets.optimizer` the Optax state starts afresh too.

    ProRL (arXiv 2505.24864, section 2.3.2) hard-resets both. Jit it with the state donated: the copy is then made once.
    """
    opt_state = make_optimizer(config).init(state.params) if config.resets.optimizer else state.opt_state
    return TrainState(state.params, reference_of(state.params, config), opt_state)
