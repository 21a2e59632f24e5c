"""Everything that the loop calls on devices, compiled before it starts for the only shapes that it uses."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.batch import batch_shapes, per_sample_shape
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Qwen2Config, build
from jaxprorl.monitoring.recorder import Recorder
from jaxprorl.resets.optimizer import reset
from jaxprorl.rollout.engine import Engine
from jaxprorl.sharding.mesh import moment_shardings, replicated
from jaxprorl.state import TrainState
from jaxprorl.update import Batch, Fixed, Metrics, make_log_probs, make_train_step


@dataclass(frozen=True)
class Compiled:
    """The executables of the loop; `train_step` and `reset` take the state's memory.

    Attributes:
        log_probs: (state, batch) -> what stays fixed over the batch's updates, and kl_sum_PN; see `update.make_log_probs`.
        train_step: (state, batch, fixed, advantage_PN) -> (state, metrics); see `update.make_train_step`.
        reset: state -> state; see `resets.optimizer.reset`.
    """

    log_probs: Callable[[TrainState, Batch], tuple[Fixed, jax.Array]]
    train_step: Callable[[TrainState, Batch, Fixed, np.ndarray], tuple[TrainState, Metrics]]
    reset: Callable[[TrainState], TrainState]


def compile_all(
    config: ConfigDict,
    model_config: Qwen2Config,
    compute: Compute,
    mesh: Mesh,
    engine: Engine,
    recorder: Recorder,
    state: TrainState,
    shardings: TrainState,
    fresh: bool,
) -> Compiled:
    """Compiles the engine and the executables of the loop. `fresh`: a new run, whose log tells of it."""
    graphdef, whole = build(model_config, compute), replicated(mesh)
    batch, per_sample = batch_shapes(config, mesh), per_sample_shape(config, mesh)
    gradients = moment_shardings(model_config, mesh, config.mesh.strategy)
    log_probs = make_log_probs(graphdef, config)
    names = jax.eval_shape(log_probs, state.params, state.reference, batch)[0]
    fixed = dict.fromkeys(names, batch["mask"])  # one number per token, where the token is
    rows = dict.fromkeys(names, batch["mask"].sharding)
    parts = {
        "engine": lambda: engine.compile(state.params, [config.rollout.samples_per_prompt, 1]),
        "log_probs": lambda: jax.jit(log_probs, out_shardings=(rows, whole)).lower(state.params, state.reference, batch).compile(),
        "train_step": lambda: (
            jax.jit(make_train_step(graphdef, config, shardings.params, gradients), donate_argnums=0, out_shardings=(shardings, whole))
            .lower(state, batch, fixed, per_sample)
            .compile()
        ),
        "reset": lambda: compile_reset(config, state, shardings),
    }
    made: dict[str, Any] = {}
    for number, (name, make) in enumerate(parts.items()):
        recorder.progress.phase("compiling", number, len(parts), part=name)
        started_s = time.perf_counter()
        made[name] = make()
        if fresh:  # a resumed run's log continues as if nothing had happened
            recorder.event(0, "compile", name=name, time_s=round(time.perf_counter() - started_s, 2))
    recorder.progress.phase("compiling", len(parts), len(parts))
    return Compiled(
        log_probs=lambda state, batch: made["log_probs"](state.params, state.reference, batch),
        train_step=lambda state, batch, fixed, advantage_PN: made["train_step"](
            state, batch, fixed, jax.device_put(advantage_PN, per_sample.sharding)
        ),
        reset=made["reset"],
    )


def compile_reset(config: ConfigDict, state: TrainState, shardings: TrainState) -> Callable[[TrainState], TrainState]:
    """The reset of a state. The engine is sampling with the parameters meanwhile: they are not donated, the rest is."""
    executable = (
        jax.jit(
            lambda params, rest: _without_params(reset(replace(rest, params=params), config)),
            donate_argnums=1,
            keep_unused=True,  # what starts afresh is not read, and would otherwise keep its memory beside the new arrays
            out_shardings=replace(shardings, params={}),
        )
        .lower(state.params, _without_params(state))
        .compile()
    )
    return lambda state: replace(executable(state.params, _without_params(state)), params=state.params)


def _without_params(state: TrainState) -> TrainState:
    return replace(state, params={})
