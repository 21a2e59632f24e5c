"""What training changes: device arrays (TrainState) and the host's bookkeeping (RunState)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.models.qwen2 import Params, Qwen2Config
from jaxprorl.optimizer import make_optimizer
from jaxprorl.sharding.mesh import like_params, moment_shardings, param_shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Device arrays (or a tree of their shapes or shardings). `reference` is a copy of the policy, sharded like it."""

    params: Any  # Params, or shapes or shardings of them
    reference: Any
    opt_state: Any  # optax.OptState


@dataclasses.dataclass(frozen=True)
class RunState:
    """Host bookkeeping; JSON types only, stored beside the arrays.

    Attributes:
        step: RL steps done.
        prompts_consumed: training prompts drawn so far, the position in the prompt order.
        policy_version: number of weight swaps.
        resets: resets done.
        reference_step: step of the last reference reset, 0 = the start.
        completion_tokens: sampled in training rollouts so far.
        validation_tokens: sampled in periodic validations so far.
        updates: optimizer updates so far, skipped ones included.
        rl_s: seconds spent in steps so far (reported only).
        rollout_s: seconds of those spent in rollouts (reported only).
        cap_steps: steps in a row, up to the last, whose batch was not full.
        skipped_in_a_row: updates in a row, up to the last, that were skipped: gradient or change not finite.
        stage: number of the stage under way, from 0.
        stage_step: its first step.
        stage_prompts: `prompts_consumed` when it began; its order of prompts starts there.
        stages_ended: their number.
    """

    step: int = 0
    prompts_consumed: int = 0
    policy_version: int = 0
    resets: int = 0
    reference_step: int = 0
    completion_tokens: int = 0
    validation_tokens: int = 0
    updates: int = 0
    rl_s: float = 0.0
    rollout_s: float = 0.0
    cap_steps: int = 0
    skipped_in_a_row: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_prompts: int = 0
    stages_ended: int = 0


def state_shardings(config: ConfigDict, model_config: Qwen2Config, mesh: Mesh) -> TrainState:
    """A TrainState of shardings."""
    params = param_shardings(model_config, mesh, config.mesh.strategy)
    moments = moment_shardings(model_config, mesh, config.mesh.strategy)
    abstract = {name: jax.ShapeDtypeStruct((), "float32") for name in params}
    opt_state = jax.eval_shape(make_optimizer(config).init, abstract)
    return TrainState(params, params, like_params(opt_state, abstract, moments, mesh))


def reference_of(params: Params, config: ConfigDict) -> Params:
    """The policy as it is now, copied in the reference's dtype."""
    return jax.tree.map(lambda x: jnp.array(x, config.model.reference_dtype, copy=True), params)


def start_state(config: ConfigDict, params: Params, shardings: TrainState) -> TrainState:
    """The state of step 0: the reference is the policy, the optimizer is fresh. Arrays are born sharded."""
    return jax.jit(_start(config), out_shardings=shardings)(params)


def abstract_state(config: ConfigDict, params: Any, shardings: TrainState) -> Any:
    """Shapes, dtypes and target shardings of a TrainState, as compilation and restoring need them."""
    shapes = jax.eval_shape(_start(config), params)
    return jax.tree.map(lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, shardings)


def _start(config: ConfigDict) -> Callable[[Params], TrainState]:
    return lambda params: TrainState(params, reference_of(params, config), make_optimizer(config).init(params))
