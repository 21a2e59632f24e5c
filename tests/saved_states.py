"""Training states, bookkeeping and damaged files for tests of checkpoints."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from factories import random_params, tiny_config
from jax.sharding import Mesh

from jaxprorl import commit
from jaxprorl.checkpoint import Host
from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.start import abstract_params
from jaxprorl.state import RunState, TrainState, abstract_state, start_state, state_shardings

CONFIG = tiny_config(checkpoint__keep=2, checkpoint__keep_best=0)
RUN = RunState(step=3, prompts_consumed=17, policy_version=3, resets=1, reference_step=2, completion_tokens=99, rl_s=1.5, rollout_s=0.7)
HOST = Host(RUN, {"metrics": 12, "events": 34}, {"data": "d", "tokenizer": "t", "reward": "r"}, [{"prompt_id": 7}], surplus_temperature=1.2)


def new_state(model: Qwen2Config, mesh: Mesh, strategy: str = "dp", **changes: str) -> TrainState:
    """A state in which every array differs from every other and from zero."""
    config = tiny_config(mesh__strategy=strategy, **changes)
    shardings = state_shardings(config, model, mesh)
    params = {name: jax.device_put(value, shardings.params[name]) for name, value in random_params(model).items()}
    state = start_state(config, params, shardings)
    numbers = iter(range(1, 1000))
    return jax.tree.map(lambda x: jax.device_put((np.asarray(x) + next(numbers)).astype(x.dtype), x.sharding), state)


def abstract(model: Qwen2Config, mesh: Mesh, strategy: str = "dp", **changes: str) -> TrainState:
    config = tiny_config(mesh__strategy=strategy, **changes)
    shardings = state_shardings(config, model, mesh)
    return abstract_state(config, abstract_params(model, shardings.params), shardings)


def host_of(step: int) -> Host:
    return dataclasses.replace(HOST, run=RunState(step=step))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def committed(*steps: int) -> set[str]:
    return {f"step_{step}{suffix}" for step in steps for suffix in ("", ".commit.json")}


def largest_file(folder: Path, step: int) -> Path:
    return max((path for path in commit.step_folder(folder, step).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def assert_equal(a: object, b: object) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
