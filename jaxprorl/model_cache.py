"""The base model in the cache: whether the cache can hold it, and its folder."""

import os
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl import storage
from jaxprorl.commit import committed_steps
from jaxprorl.data.splits import Items, load_items
from jaxprorl.errors import ConfigError
from jaxprorl.monitoring.progress import Progress
from jaxprorl.run_folder import RunFolder
from jaxprorl.warmstart import fit


def check_cache(config: ConfigDict, folder: RunFolder | None = None) -> None:
    """Refuses, before the base model is made, a cache that could not hold it. One that can only be read serves as far as it goes.

    Args:
        folder: of the run; one that has a checkpoint needs no base model. None = it is made in any case.

    Raises:
        ConfigError: names the folder and what is wrong with it.
    """
    cache = Path(config.cache_dir)
    remedy = "allow writing there, or choose another one (--config.cache_dir=FOLDER)"
    reason = storage.unwritable(cache)
    if os.path.lexists(cache) and not cache.is_dir():
        raise ConfigError(f"cache_dir = {config.cache_dir!r}: {reason}; {remedy}")
    going_on = folder is not None and config.on_existing != "replace" and committed_steps(folder.checkpoints)
    needed = not config.model.path and not going_on and not fit.is_made(fit.cached_folder(warm_start_config(config)))
    if reason and needed:
        raise ConfigError(f"cache_dir = {config.cache_dir!r}: {reason}, and the base model has to be made and kept there; {remedy}")


def base_model(config: ConfigDict, mesh: Mesh, progress: Progress, items: Items | None = None) -> tuple[Path, bool]:
    """The folder of the start model, and whether it was there already. `items` of `config.data` save drawing them again."""
    if config.model.path:
        return Path(config.model.path), True
    source = warm_start_config(config)
    if items is None or source.data.source != config.data.source:
        items = load_items(source)
    return fit.base_model(source, items, mesh, progress.phase, progress.note)


def warm_start_config(config: ConfigDict) -> ConfigDict:
    """The config that the base model is made by: demonstrations come from the tasks, whatever RL trains on."""
    source = config.copy_and_resolve_references()
    with source.unlocked():
        source.data.source = "reasoning_gym"
    return source
