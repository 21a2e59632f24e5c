"""What the loop of each stage works with, made and compiled before the first step."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.data.domains import choose
from jaxprorl.executables import Compiled, Plan, compile_all
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.monitoring.recorder import Recorder
from jaxprorl.recipe import Stage, engine_fields, larger, longest, stages
from jaxprorl.rollout.engine import Engine
from jaxprorl.state import TrainState
from jaxprorl.types import Prompt
from jaxprorl.watch import Rules, make_rules


@dataclass(frozen=True)
class Setting:
    """What the steps of one stage work with.

    Attributes:
        stage: None = the run has no stages, this is all of it.
        prompts: that it draws from.
    """

    stage: Stage | None
    config: ConfigDict
    compute: Compute
    rules: Rules
    prompts: tuple[Prompt, ...]
    engine: Engine
    compiled: Compiled


def make_settings(
    config: ConfigDict,
    configs: tuple[ConfigDict, ...],
    first: int,
    prompts: Sequence[Prompt],
    computes: Sequence[Compute],
    model_config: Qwen2Config,
    mesh: Mesh,
    open_engine: Callable[[ConfigDict], Engine],
    recorder: Recorder,
    state: TrainState,
    shardings: TrainState,
    fresh: bool,
) -> tuple[dict[int, Setting], Engine]:
    """The settings of the stages from `first` on, by number, and the engine that evaluates in all of them.

    Args:
        config: the run's.
        configs: the stages', with all sizes chosen.
        prompts: the train split.
        computes: how each stage computes.
        open_engine: makes the engine of a config.
        fresh: a new run, whose log tells of what is compiled.
    """
    declared, numbers = stages(config) or (None,), range(first, len(configs))
    engines: dict[str, Engine] = {}
    samples: dict[Engine, list[int]] = {}

    def engine_of(stage_config: ConfigDict, count: int) -> Engine:
        key = json.dumps(engine_fields(stage_config), sort_keys=True)
        if key not in engines:
            engines[key] = open_engine(stage_config)
        served = samples.setdefault(engines[key], [])
        if count not in served:
            served.append(count)
        return engines[key]

    chosen = {number: engine_of(configs[number], configs[number].rollout.samples_per_prompt) for number in numbers}
    exam = engine_of(longest(configs), 1)
    plans = [_plan(declared[number], configs[number], computes[number]) for number in numbers]
    compiled = compile_all(plans, samples, model_config, mesh, recorder, state, shardings, fresh)
    rules = make_rules(config)
    return {
        number: Setting(
            declared[number],
            configs[number],
            computes[number],
            rules[number],
            choose(prompts, configs[number].data.mix),
            chosen[number],
            executables,
        )
        for number, executables in zip(numbers, compiled, strict=True)
    }, exam


def _plan(stage: Stage | None, config: ConfigDict, compute: Compute) -> Plan:
    resets = [(bool(config.resets.reference), config.resets.optimizer)]
    if stage and stage.resets:
        own = (stage.reset_reference, stage.reset_optimizer)
        resets += [own, larger(own, resets[0])]  # alone, and together with one that is due at the same boundary
    return Plan(stage.name if stage else "", config, compute, tuple(resets))
