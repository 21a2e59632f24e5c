"""What `train` changes of the process that calls it, and puts back whichever way it is left."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src import compilation_cache

# Set in `compilation.use_compilation_cache`.
CACHE_FIELDS = (
    "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes",
)  # fmt: skip


@contextmanager
def left_as_found() -> Iterator[None]:
    """JAX's compilation cache and number types, and `sys.path`, are the run's inside and the caller's after.

    JAX's devices stay: a process has them once.
    """
    folder = os.getcwd()
    had_folder, had = folder in sys.path, {name: getattr(jax.config, name) for name in CACHE_FIELDS}
    wide = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)  # the dtypes of a run are its config's
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", wide)
        for name, value in had.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX opens it once, by the first program that it compiles
        if not had_folder and folder in sys.path:
            sys.path.remove(folder)  # added by rewards/registry.py
