"""Executables are made before the loop; a compilation inside it is an error that names the shapes."""

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache

from jaxprorl import storage

# JAX announces every compilation here, with function name and argument shapes, before it happens.
_LOGGER = logging.getLogger("jax._src.interpreters.pxla")
WRITTEN_WITHIN_S = 1.0  # JAX writes an entry at one go, from memory: milliseconds


class CompilationError(RuntimeError):
    """Something was compiled where nothing may be."""


class _Refuse(logging.Handler):
    """Refuses compilations of the thread that made it; others are not the loop's."""

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if threading.get_ident() == self._thread and message.startswith("Compiling"):
            raise CompilationError(
                f"compilation inside the training loop: {message}. Shapes in the loop are fixed; compile this one before it"
            )


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Any XLA compilation of this thread inside this block raises CompilationError with the function and the argument shapes."""
    handler, level, propagate = _Refuse(), _LOGGER.level, _LOGGER.propagate
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
    """Keeps executables on disk, however small and quick to compile. Where nothing can be written, what is there is read.

    JAX writes an entry in place and never again while a file of that name exists: one torn by a kill would be read, refused and
    recompiled at every start. Such entries are removed here.

    Returns:
        What to tell about the folder, a line each.
    """
    folder = Path(folder)
    reason = storage.unwritable(folder)
    told = [f"WARNING: {folder.parent} (cache_dir): {reason}; what is compiled now is compiled again at the next start"] if reason else []
    if not reason:
        told = [f"{folder.parent}: removed the torn cache entry {name}; it is compiled again" for name in remove_torn_entries(folder)]
    elif not folder.is_dir():
        return told  # JAX would try to make it
    compilation_cache.reset_cache()  # else it stays as it was at the first program that this process compiled
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
    if reason:  # a warning for every entry that cannot be written would hide the rest
        warnings.filterwarnings("ignore", message="Error writing persistent compilation cache entry")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return told


def remove_torn_entries(folder: Path, wait_s: float = WRITTEN_WITHIN_S) -> list[str]:
    """Deletes cache entries that do not unpack (the compression carries a checksum); returns their names.

    One that another process is writing looks torn too, but not `wait_s` later.
    """
    found = {path: content for path in sorted(folder.glob("*-cache")) if (content := torn_content(path)) is not None}
    if found:
        time.sleep(wait_s)
    torn = []
    for path, content in found.items():
        if torn_content(path) == content:
            path.unlink(missing_ok=True)
            torn.append(path.name)
    return torn


def torn_content(path: Path) -> bytes | None:
    """What a cache entry holds, if that does not unpack; None if it does, or cannot be read (another process removed it)."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        compilation_cache.decompress_executable(content)
    except Exception:  # zlib's or zstandard's own type, depending on which of them JAX found
        return content
    return None
