"""Executables are made before the loop; a compilation inside it is an error that names the shapes."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache

# JAX announces every compilation here, with function name and argument shapes, before it happens.
_LOGGER = logging.getLogger("jax._src.interpreters.pxla")


class CompilationError(RuntimeError):
    """Something was compiled where nothing may be."""


class _Refuse(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Compiling"):
            raise CompilationError(
                f"compilation inside the training loop: {message}. Shapes in the loop are fixed; compile this one before it"
            )


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Any XLA compilation inside this block raises CompilationError with the function and the argument shapes."""
    handler, level, propagate = _Refuse(level=logging.DEBUG), _LOGGER.level, _LOGGER.propagate
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.DEBUG)
    _LOGGER.propagate = False
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)
        _LOGGER.propagate = propagate


def use_compilation_cache(folder: str | Path) -> list[str]:
    """Keeps executables on disk, however small and quick to compile.

    JAX writes an entry in place and never again while a file of that name exists: one torn by a kill would be read, refused and
    recompiled at every start. Such entries are removed here; their names are returned.
    """
    torn = remove_torn_entries(Path(folder))
    compilation_cache.reset_cache()  # else it stays as it was at the first program that this process compiled
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return torn


def remove_torn_entries(folder: Path) -> list[str]:
    """Deletes cache entries that do not unpack (the compression carries a checksum); returns their names."""
    torn = []
    for path in sorted(folder.glob("*-cache")):
        try:
            compilation_cache.decompress_executable(path.read_bytes())
        except Exception:  # zlib's or zstandard's own type, depending on which of them JAX found
            path.unlink(missing_ok=True)
            torn.append(path.name)
    return torn
