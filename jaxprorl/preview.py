"""What the start of a new run would refuse, looked at before the run has a folder and before a warm start takes its minutes."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.checkpoint import newest_sound_step
from jaxprorl.data.prompts import check_chat_template, check_questions_show, with_system
from jaxprorl.data.splits import Items, load_items, load_splits
from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer
from jaxprorl.errors import CheckpointError, ConfigError
from jaxprorl.inputs import is_run, read_prompts
from jaxprorl.model_cache import warm_start_config
from jaxprorl.models import hf
from jaxprorl.models.compute import automatic_compute, choose_compute
from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.recipe import longest, stage_configs, stages
from jaxprorl.run_folder import RunFolder
from jaxprorl.sharding.strategies import BATCH_AXES
from jaxprorl.start import check_model, prepare_devices
from jaxprorl.state import state_shardings
from jaxprorl.warmstart import fit
from jaxprorl.warmstart.tokenizer import build_tokenizer


def check_start(config: ConfigDict, items: Items) -> Mesh:
    """Refuses what cannot work with these devices, this model and these questions, in any stage. Returns the mesh.

    Args:
        items: from `inputs.read_inputs`.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: names the field or file.
    """
    mesh = prepare_devices(config)
    with start_model(config, items, mesh) as (model_config, tokenizer):
        check_model(longest(stage_configs(config)), model_config, tokenizer)
        check_devices(config, model_config, mesh)
        read_prompts(config, tokenizer, items)
    return mesh


def check_devices(config: ConfigDict, model_config: Qwen2Config, mesh: Mesh) -> None:
    """Refuses sizes that do not divide by the devices which share them, and an attention that these do not have.

    Raises:
        ConfigError: names the field, and the stage if there are several.
    """
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    for stage, stage_config in zip(stages(config) or (None,), stage_configs(config), strict=True):
        place = f"stages: in stage {stage.name!r}, " if stage else ""
        try:
            choose_compute(stage_config, model_config.head_dim, mesh)
        except ConfigError as error:
            raise ConfigError(f"{place}{error}") from None
        slots = stage_config.rollout.slots
        if stage_config.rollout.engine == "jax" and slots % shards:
            nearest = -(-slots // shards) * shards
            raise ConfigError(f"{place}rollout.slots = {slots}: must divide by the {shards} devices that share rows, e.g. {nearest}")
    state_shardings(config, model_config, mesh)


@contextmanager
def start_model(config: ConfigDict, items: Items, mesh: Mesh) -> Iterator[tuple[Qwen2Config, Tokenizer]]:
    """Shape and tokenizer of the start model: of the folder that is named or cached, else of the one that the warm start would make."""
    path = Path(config.model.path)
    if config.model.path and is_run(path):
        if newest_sound_step(RunFolder(path).checkpoints, "previous")[0] is None:
            raise CheckpointError(f"model.path = {str(path)!r}: this run has no checkpoint yet")
        path = RunFolder(path).base_model
    elif config.model.path:
        hf.check_headers(path, hf.read_config(path))
    else:
        path = fit.cached_folder(warm_start_config(config))
        if not fit.is_made(path):
            with tempfile.TemporaryDirectory() as scratch:
                yield warm_start_model(config, items, mesh, Path(scratch))
            return
    tokenizer = load_tokenizer(path)
    check_chat_template(tokenizer)
    asked = [with_system(item.messages, config.data.system_prompt) for item in (*items.train, *items.validation, *items.held_out)]
    check_questions_show(tokenizer, [messages for messages in asked if messages[-1]["role"] == "user"])
    yield hf.read_config(path), tokenizer


def warm_start_model(config: ConfigDict, items: Items, mesh: Mesh, scratch: Path) -> tuple[Qwen2Config, Tokenizer]:
    """What the warm start would make, once it can: its rows divide and hold every demonstration, and every task has worked solutions."""
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    rows, row_tokens = config.warmstart.rows, config.warmstart.row_tokens
    if rows % shards:
        raise ConfigError(f"warmstart.rows = {rows}: must divide by the {shards} devices that share the rows")
    automatic_compute(config, config.model.head_dim, "warmstart", mesh)
    source = warm_start_config(config)
    if source.data.source != config.data.source:
        items = load_items(source)
    tokenizer = build_tokenizer(items.train, scratch, config.data.system_prompt)
    model_config = fit.model_shape(config, tokenizer)
    check_devices(config, model_config, mesh)  # before the solutions, which take a while
    prompts = load_splits(source, tokenizer, items).train
    for demonstrations in fit.demonstrations(tokenizer, prompts, config.seed):
        for task, samples in demonstrations.items():
            tokens = max(sample.tokens for sample in samples)
            if tokens > row_tokens:
                raise ConfigError(f"warmstart.row_tokens = {row_tokens}: the longest demonstration of {task} has {tokens} tokens")
    return model_config, tokenizer
