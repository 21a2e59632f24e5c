"""What a run is given, read and checked before it has a folder or touches a device: questions, rewards, and where its start model is."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.data.domains import choose
from jaxprorl.data.duplicates import Finding
from jaxprorl.data.prompts import Item
from jaxprorl.data.splits import Items, Splits, load_items, load_splits
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import ConfigError
from jaxprorl.models import hf
from jaxprorl.monitoring import jsonl
from jaxprorl.recipe import stage_configs
from jaxprorl.rewards.registry import reward_spec
from jaxprorl.rewards.trial import try_rewards
from jaxprorl.run_folder import RunFolder
from jaxprorl.types import Prompt

ROWS_IN_EVENT = 20


def with_arguments(config: ConfigDict, reward: Any, questions: Path | None) -> ConfigDict:
    """A copy of the config with what `train` was given beside it."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        if reward is not None:
            config.reward = reward_spec(reward, Path(config.cache_dir) / "rewards")
            config.evaluation.reward = ""  # it grades the evaluation too
        if questions is not None:
            config.data.source = f"jsonl:{questions}"
    return config


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


def read_prompts(config: ConfigDict, tokenizer: Tokenizer, items: Items) -> Splits:
    """The questions as prompts, once those that are not too long suffice for every stage.

    Raises:
        ConfigError, DataError: names the field, or file and line.
    """
    splits = load_splits(config, tokenizer, items)
    if splits.findings != items.findings:
        for stage_config in stage_configs(config):
            check_items(stage_config, splits)
    return splits


def check_items(config: ConfigDict, items: Items | Splits) -> None:
    """Refuses a stage's config that the questions or prompts do not suffice for, or that names domains which they do not have."""
    mix, domains = config.data.mix, sorted({item.domain for item in items.train})
    train: Sequence[Item | Prompt] = items.train
    count = len(choose(train, mix))
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
    if not config.model.path:
        return int(config.model.head_dim)
    return hf.read_config(model_folder(Path(config.model.path))).head_dim


def model_folder(path: Path) -> Path:
    """Where the tokenizer and `config.json` of a start model are: its folder, or that in the run which it is the newest checkpoint of."""
    return RunFolder(path).base_model if is_run(path) else path


def is_run(path: Path) -> bool:
    """True if a folder is a run's, not a model's."""
    return RunFolder(path).checkpoints.is_dir()


def record_findings(findings: Sequence[Finding], folder: RunFolder) -> dict[str, Any]:
    """What the event `data` tells of rows that were left out or look alike; where they are many, all go to `data_findings.jsonl`."""
    rows = [asdict(finding) for finding in findings]
    if len(rows) > ROWS_IN_EVENT:
        text = "".join(f"{jsonl.encode(row)}\n" for row in rows)
        (folder.path / "data_findings.jsonl").write_text(text, encoding="utf-8")
    return {"findings": dict(Counter(row["kind"] for row in rows)), "rows": rows[:ROWS_IN_EVENT]} if rows else {}
