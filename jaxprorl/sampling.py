"""Completions of a run's newest checkpoint, graded: what `launch/sample.py` shows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from jaxprorl.checkpoint import newest_sound_step, read_host, restore_params
from jaxprorl.data.prompts import check_chat_template
from jaxprorl.data.splits import load_splits
from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer
from jaxprorl.errors import UserError
from jaxprorl.models import hf
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.jax_engine import JaxEngine
from jaxprorl.run_folder import RunFolder
from jaxprorl.schema import with_new_fields
from jaxprorl.sharding.mesh import param_shardings
from jaxprorl.start import abstract_params, grader_pool, prepare_devices
from jaxprorl.types import Completion, Group, Prompt


class SamplingError(UserError, ValueError):
    """Nothing can be sampled; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Sampled:
    """Graded groups, in prompt order, of the policy after `step` RL steps; `reward` names the function that scored them."""

    groups: list[Group]
    step: int
    reward: str
    tokenizer: Tokenizer


def sample(path: Path, split: str, task: str | None, prompts: int, samples: int, temperature: float, seed: int) -> Sampled:
    """Samples from the newest checkpoint of the run in `path` and grades with the run's evaluation reward.

    Args:
        split: train, validation or held_out.
        task: only prompts of this task; None = the tasks in turn.
        prompts: how many, at most.
        samples: completions of each.
        temperature: 0 = greedy.

    Raises:
        SamplingError: no such run, no checkpoint yet, no such task, a number out of range.
        DataError, ModelError, RewardError, CheckpointError: the run's files, data or reward are not usable.
    """
    if seed >= 2**32:
        raise SamplingError(f"--seed {seed}: must be below 2^32")
    for name, value, least in (("prompts", prompts, 1), ("samples", samples, 1), ("temperature", temperature, 0), ("seed", seed, 0)):
        if not least <= value < float("inf"):
            raise SamplingError(f"--{name} {value}: must be {least} or more")
    folder = RunFolder(path)
    config = _config(folder)
    step, _ = newest_sound_step(folder.checkpoints, "previous")
    if step is None:
        raise SamplingError(f"--run {path}: no checkpoint yet; the first is written after checkpoint.every_steps steps")
    mesh = prepare_devices(config)
    tokenizer = load_tokenizer(folder.base_model)
    check_chat_template(tokenizer)
    model_config = hf.read_config(folder.base_model)
    chosen = choose(getattr(load_splits(config, tokenizer), split), task, prompts)

    shardings = param_shardings(model_config, mesh, config.mesh.strategy)
    params = restore_params(folder.checkpoints, step, abstract_params(model_config, shardings))
    run = read_host(folder.checkpoints, step).run
    # As many slots as there are prompts: but for rounding what is drawn does not depend on their number, compile time and memory do.
    rows = -(-min(len(chosen), max(1, config.rollout.slots // samples)) // mesh.size) * mesh.size
    config.rollout.slots = rows * samples
    engine = JaxEngine(config, model_config, mesh, tokenizer.stop_ids)
    engine.compile(params, [samples])
    engine.set_weights(params, run.policy_version)

    reward = config.evaluation.reward or config.reward
    completions: dict[tuple[int, int], Completion] = {}
    by_id = {prompt.prompt_id: prompt for prompt in chosen}
    with grader_pool(config, reward, folder) as graders:
        for completion in engine.generate(chosen, Sampling(samples, temperature, seed, step=0)):
            completions[completion.prompt_id, completion.sample] = completion
            graders.submit(by_id[completion.prompt_id], [completion])
        scores = graders.collect()
    groups = []
    for prompt in chosen:
        keys = [(prompt.prompt_id, number) for number in range(samples)]
        groups.append(Group(prompt, tuple(completions[key] for key in keys), tuple(scores[key] for key in keys)))
    return Sampled(groups, run.step, reward, tokenizer)


def choose(prompts: Sequence[Prompt], task: str | None, count: int) -> list[Prompt]:
    """The first `count` prompts of `task`, or of all tasks in turn.

    Raises:
        SamplingError: no prompt is of this task; names those that there are.
    """
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    if task is not None:
        if task not in by_task:
            raise SamplingError(f"--task {task}: this split has no such task; choose one of {', '.join(sorted(by_task))}")
        return by_task[task][:count]
    ranked = [(rank, name, prompt) for name, members in by_task.items() for rank, prompt in enumerate(members)]
    return [prompt for _, _, prompt in sorted(ranked, key=lambda entry: entry[:2])[:count]]


def _config(folder: RunFolder) -> ConfigDict:
    if not folder.config.is_file():
        raise SamplingError(
            f"--run {folder.path}: no run there (it has no config.json); runs are in runs/ unless --config.runs_dir says so"
        )
    return with_new_fields(ConfigDict(json.loads(folder.config.read_text())))
