"""Sizes that a config leaves to rules, which were measured (docs/performance.md): host devices and rows of a micro-batch."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.models.compute import Compute
from jaxprorl.packing import most_rows
from jaxprorl.recipe import stage_configs
from jaxprorl.sharding.strategies import AXES, BATCH_AXES, CONTEXT_AXIS, STRATEGIES

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MAX_CPU_DEVICES = 8  # a choice: two were measured, on two cores
# Of a micro-batch, per device. CPUs: within what was measured to cost no time; memory grows with it. Others: a choice, large enough for
# full matrix units; the event `compile` tells the memory that it takes.
MICRO_BATCH_TOKENS = {"cpu": 1536, "gpu": 8192, "tpu": 8192}


def with_cpu_devices(config: ConfigDict, devices: int = 0, most: int | None = None) -> ConfigDict:
    """The config with `mesh.cpu_devices` chosen, where it is 0: `devices`, or if that is 0 too, by rule, but not more than `most`.

    The rule: as many as the sizes of `config.mesh` ask for; without any, one where the strategy would split parameters by them, else the
    largest power of two that the process has cores for and that divides what devices share: `rollout.slots` and `batch.micro_batch_rows` of
    all stages, and `warmstart.rows`.
    """
    if config.mesh.cpu_devices:
        return config
    return _changed(config, "mesh", cpu_devices=devices or _devices_by_rule(config, MAX_CPU_DEVICES if most is None else most))


def _devices_by_rule(config: ConfigDict, most: int) -> int:
    asked, strategy = math.prod(max(1, config.mesh[axis]) for axis in AXES), STRATEGIES.get(config.mesh.strategy)
    if strategy is None or asked > 1 or config.mesh[strategy.fills] or strategy.fills not in BATCH_AXES:
        return asked
    shared, devices = math.gcd(*_shared(config)), 1
    while 2 * devices <= min(usable_cores(), MAX_CPU_DEVICES, most) and shared % (2 * devices) == 0:
        devices *= 2
    return devices


def _shared(config: ConfigDict) -> Iterator[int]:
    """What has to divide by the devices; 0, which every number divides, where a rule is still to choose."""
    for stage_config in stage_configs(config):
        yield stage_config.rollout.slots
        yield stage_config.batch.micro_batch_rows
    yield 0 if config.model.path else config.warmstart.rows


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = CPU_QUOTA.read_text(encoding="ascii").split()
        return max(1, min(cores, math.ceil(int(quota_us) / int(period_us))))
    except (OSError, ValueError):  # no such file, or no quota: "max"
        return cores


def with_micro_batch_rows(config: ConfigDict, compute: Compute) -> ConfigDict:
    """A stage's config with `batch.micro_batch_rows` chosen, where it is 0, for how `choose_compute` has it computed.

    The rule: as many rows as MICRO_BATCH_TOKENS hold on each device, one at least, but not more than a mini-batch of the longest sequences
    fills.
    """
    batch = config.batch
    if batch.micro_batch_rows:
        return config
    assert compute.mesh is not None
    shards = math.prod(compute.mesh.shape[axis] for axis in BATCH_AXES)
    needed = rows_per_update(config, compute.shared_prompts)
    tokens = batch.row_tokens // compute.mesh.shape[CONTEXT_AXIS]  # of a row on each device
    rows = min(max(1, MICRO_BATCH_TOKENS[compute.platform] // tokens), math.ceil(needed / shards))
    return _changed(config, "batch", micro_batch_rows=shards * rows)


def rows_per_update(config: ConfigDict, shared: bool) -> int:
    """Rows that the largest mini-batch of the longest sequences takes."""
    batch, rollout = config.batch, config.rollout
    groups, samples = math.ceil(batch.prompts / batch.updates), rollout.samples_per_prompt
    if not batch.packing:
        return int(groups * samples)
    return most_rows(groups, samples, rollout.max_prompt_tokens, rollout.max_response_tokens, batch.row_tokens, shared)


def _changed(config: ConfigDict, section: str, **values: Any) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config[section].update(values)
    return config
