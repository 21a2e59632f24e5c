"""What a run is given, read and checked before it has a folder or touches a device: questions, rewards, and where its start model is."""

from pathlib import Path

from ml_collections import ConfigDict

from jaxprorl.data.domains import choose
from jaxprorl.data.splits import Items, load_items
from jaxprorl.errors import ConfigError
from jaxprorl.models import hf
from jaxprorl.recipe import stage_configs
from jaxprorl.rewards.trial import try_rewards
from jaxprorl.run_folder import RunFolder


def read_inputs(config: ConfigDict) -> Items:
    """The questions, once they suffice for every stage, the start model is there and the rewards can grade.

    Raises:
        ConfigError, DataError, ModelError, RewardError: names the field or file.
    """
    head_dim(config)
    items = load_items(config)
    for stage_config in stage_configs(config):
        check_items(stage_config, items)
    try_rewards(config, choose(items.train, stage_configs(config)[0].data.mix)[0], items.held_out[0])
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
