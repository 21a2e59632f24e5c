"""What a run is given, read and checked before it has a folder or touches a device: its questions, and where its start model is."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.data.domains import choose
from jaxprorl.data.splits import Items, load_items
from jaxprorl.errors import ConfigError
from jaxprorl.models import hf
from jaxprorl.recipe import stage_configs
from jaxprorl.rewards.registry import reward_spec
from jaxprorl.run_folder import RunFolder


def with_arguments(config: ConfigDict, reward: Any, questions: Path | None) -> ConfigDict:
    """A copy of the config with what `train` was given beside it."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        if reward is not None:
            config.reward = reward_spec(reward, Path(config.cache_dir) / "rewards")
        if questions is not None:
            config.data.source = f"jsonl:{questions}"
    return config


def read_inputs(config: ConfigDict) -> Items:
    """The questions, once they suffice for every stage and the start model is there.

    Raises:
        ConfigError, DataError, ModelError: names the field or file.
    """
    head_dim(config)
    items = load_items(config)
    for stage_config in stage_configs(config):
        check_items(stage_config, items)
    return items


def check_items(config: ConfigDict, items: Items) -> None:
    """Refuses a stage's config that the questions do not suffice for, or that names domains which they do not have."""
    mix, domains = config.data.mix, sorted({item.domain for item in items.train})
    count = len(choose(items.train, mix))
    if count < config.batch.prompts:
        of_these = f" of {', '.join(mix)}" if mix else ""
        raise ConfigError(
            f"batch.prompts = {config.batch.prompts}: the train split holds {count} prompts{of_these} only; lower it, or add data"
        )
    unknown = sorted(set(config.filtering.rules) - set(domains))
    if unknown:
        raise ConfigError(f"filtering.rules.{unknown[0]}: the data has no such domain, only {', '.join(domains)}")


def head_dim(config: ConfigDict) -> int:
    """Width of the model's heads, known before there is a model."""
    path = Path(config.model.path)
    if not config.model.path:
        return int(config.model.head_dim)
    return hf.read_config(RunFolder(path).base_model if is_run(path) else path).head_dim


def is_run(path: Path) -> bool:
    """True if a folder is a run's, not a model's."""
    return RunFolder(path).checkpoints.is_dir()
