"""Whether the cache can hold the base model that a run has to make."""

import os
from pathlib import Path

from ml_collections import ConfigDict

from jaxprorl import storage
from jaxprorl.commit import committed_steps
from jaxprorl.errors import ConfigError
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
    if reason and not config.model.path and not going_on:
        made = cache / "warmstart" / fit.fingerprint(of_warm_start(config))
        if not os.path.isfile(made / "config.json"):  # Path's raises for a name that is too long
            raise ConfigError(f"cache_dir = {config.cache_dir!r}: {reason}, and the base model has to be made and kept there; {remedy}")


def of_warm_start(config: ConfigDict) -> ConfigDict:
    """The config that the base model is made by: demonstrations come from the tasks, whatever RL trains on."""
    source = config.copy_and_resolve_references()
    with source.unlocked():
        source.data.source = "reasoning_gym"
    return source
