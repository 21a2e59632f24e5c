"""Everything that the loop calls on devices, compiled before it starts for the only shapes that it uses."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.batch import batch_shapes, per_sample_shape
from jaxprorl.interrupts import safe_point
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Qwen2Config, build
from jaxprorl.monitoring.recorder import Recorder
from jaxprorl.resets.optimizer import reset, what_is_reset
from jaxprorl.rollout.engine import Engine
from jaxprorl.sharding.mesh import moment_shardings, replicated
from jaxprorl.state import TrainState
from jaxprorl.update import Batch, Fixed, Metrics, make_log_probs, make_train_step

# What log-probs and updates do not read: these groups, and of `rollout` all but these fields. Stages that differ in it share programs.
HOST_GROUPS = ("data", "filtering", "shaping", "resets", "stages", "rollout")
ROLLOUT_FIELDS = ("samples_per_prompt", "temperature", "max_prompt_tokens", "max_response_tokens")
What = tuple[bool, str]  # what a reset resets: `resets.reference`, `resets.optimizer`


@dataclass(frozen=True)
class Plan:
    """What the executables of a stage are compiled for.

    Attributes:
        name: of the stage; "" = there are none.
        resets: those that may come in it.
    """

    name: str
    config: ConfigDict
    compute: Compute
    resets: tuple[What, ...]


@dataclass(frozen=True)
class Compiled:
    """The executables of a stage's loop; `train_step` and `reset` take the state's memory.

    Attributes:
        log_probs: (state, batch) -> what stays fixed over the batch's updates, and kl_sum_PN; see `update.make_log_probs`.
        train_step: (state, batch, fixed, advantage_PN) -> (state, metrics); see `update.make_train_step`.
        reset: (state, what) -> state; see `resets.optimizer.reset`.
    """

    log_probs: Callable[[TrainState, Batch], tuple[Fixed, jax.Array]]
    train_step: Callable[[TrainState, Batch, Fixed, np.ndarray], tuple[TrainState, Metrics]]
    reset: Callable[[TrainState, What], TrainState]


def compile_all(
    plans: Sequence[Plan],
    engines: Mapping[Engine, Sequence[int]],
    model_config: Qwen2Config,
    mesh: Mesh,
    recorder: Recorder,
    state: TrainState,
    shardings: TrainState,
    fresh: bool,
) -> list[Compiled]:
    """Compiles the engines and the executables of all stages to come, each of them once.

    Args:
        engines: and the group sizes that each has to serve.
        fresh: a new run, whose log tells of it.
    """
    named = bool(plans[0].name)
    parts: dict[tuple[Any, ...], tuple[str, Callable[[], Any]]] = {}  # what it depends on -> name, how it is made
    for number, (engine, samples) in enumerate(engines.items()):
        parts["engine", engine] = f"engine {number + 1}" if named else "engine", partial(engine.compile, state.params, samples)
    for plan in plans:
        key, label = program_key(plan.config), f" of stage {plan.name}" if named else ""
        if ("train_step", key) not in parts:
            log_probs, train_step = step_parts(plan, model_config, mesh, state, shardings)
            parts["log_probs", key], parts["train_step", key] = (f"log_probs{label}", log_probs), (f"train_step{label}", train_step)
        for what in plan.resets:
            name = f"reset of {what_is_reset(*what)}" if named else "reset"
            parts.setdefault(("reset", what), (name, partial(compile_reset, reset_config(plan.config, what), state, shardings)))
    made: dict[tuple[Any, ...], Any] = {}
    for number, (part, (name, make)) in enumerate(parts.items()):
        safe_point()
        recorder.progress.phase("compiling", number, len(parts), part=name)
        started_s = time.perf_counter()
        made[part] = make()
        if fresh:  # a resumed run's log continues as if nothing had happened
            time_s = round(time.perf_counter() - started_s, 2)
            facts = made[part] if part[0] == "engine" else estimated_memory(made[part])
            recorder.event(0, "compile", name=name, time_s=time_s, **facts)
    recorder.progress.phase("compiling", len(parts), len(parts))
    return [_bound(plan, made, per_sample_shape(plan.config, mesh).sharding) for plan in plans]


def program_key(config: ConfigDict) -> str:
    """Equal for configs whose log-probs and updates are the same program."""
    read = {name: value for name, value in config.to_dict().items() if name not in HOST_GROUPS}
    return json.dumps(read | {name: config.rollout[name] for name in ROLLOUT_FIELDS}, sort_keys=True)


def step_parts(
    plan: Plan, model_config: Qwen2Config, mesh: Mesh, state: TrainState, shardings: TrainState
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """How the log-probs and the updates of a stage are compiled."""
    config = plan.config
    graphdef, whole = build(model_config, plan.compute), replicated(mesh)
    batch, per_sample = batch_shapes(config, mesh, plan.compute.shared_prompts), per_sample_shape(config, mesh)
    gradients = moment_shardings(model_config, mesh, config.mesh.strategy)
    log_probs = make_log_probs(graphdef, config)
    names = jax.eval_shape(log_probs, state.params, state.reference, batch)[0]
    fixed = dict.fromkeys(names, batch["mask"])  # one number per token, where the token is
    rows = dict.fromkeys(names, batch["mask"].sharding)
    train_step = make_train_step(graphdef, config, shardings.params, gradients)
    return (
        lambda: jax.jit(log_probs, out_shardings=(rows, whole)).lower(state.params, state.reference, batch).compile(),
        lambda: jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, whole)).lower(state, batch, fixed, per_sample).compile(),
    )


def _bound(plan: Plan, made: Mapping[tuple[Any, ...], Any], per_sample: Any) -> Compiled:
    key = program_key(plan.config)
    log_probs, train_step = made["log_probs", key], made["train_step", key]
    return Compiled(
        log_probs=lambda state, batch: log_probs(state.params, state.reference, batch),
        train_step=lambda state, batch, fixed, advantage_PN: train_step(state, batch, fixed, jax.device_put(advantage_PN, per_sample)),
        reset=lambda state, what: made["reset", what](state),
    )


def estimated_memory(made: Any) -> dict[str, dict[str, int]]:
    """The compiler's estimate for one device of the mesh as a field of the event `compile`; none where there is no executable to ask."""
    analysis = made.memory_analysis() if isinstance(made, jax.stages.Compiled) else None
    if analysis is None:
        return {}
    parts = ("argument", "output", "alias", "temp")
    return {"memory_bytes": {part: int(getattr(analysis, f"{part}_size_in_bytes")) for part in parts}}


def reset_config(config: ConfigDict, what: What) -> ConfigDict:
    """The config whose resets are of `what`."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.resets.reference, config.resets.optimizer = what
    return config


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
