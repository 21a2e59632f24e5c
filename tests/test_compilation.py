import logging
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from jaxprorl import compilation
from jaxprorl.compilation import CompilationError, no_compilation, remove_torn_entries

ROOT = Path(__file__).resolve().parent.parent


def make_double():
    """A fresh function, so that nothing is cached."""

    def double_it(x: jax.Array) -> jax.Array:
        return 2 * x

    return jax.jit(double_it)


def test_a_compilation_inside_names_function_and_shape() -> None:
    double, x = make_double(), jnp.ones((3, 7))
    with no_compilation(), pytest.raises(CompilationError, match=r"double_it.*float32\[3,7\]"):
        double(x)


def test_what_was_compiled_before_runs_and_a_new_shape_does_not() -> None:
    double, x, other = make_double(), jnp.ones((3, 7)), jnp.ones((4, 7))
    double(x)
    with no_compilation():
        np.testing.assert_array_equal(double(x), 2 * np.ones((3, 7)))
        with pytest.raises(CompilationError, match=r"float32\[4,7\]"):
            double(other)
        np.testing.assert_array_equal(double(x), 2 * np.ones((3, 7)))  # the refusal breaks nothing


def test_an_executable_made_ahead_runs_and_making_one_inside_is_refused() -> None:
    double, x = make_double(), jnp.ones(5)
    ahead = make_double().lower(x).compile()
    with no_compilation():
        ahead(x)
        with pytest.raises(CompilationError, match=r"float32\[5\]"):
            double.lower(x).compile()


def test_array_arithmetic_outside_jit_counts_too() -> None:
    x = jnp.ones((2, 3, 5, 1))
    with no_compilation(), pytest.raises(CompilationError):
        x * 3.5 + x


def test_another_thread_may_compile_meanwhile_and_is_refused_nothing() -> None:
    x, results = jnp.ones((3, 9)), []
    with no_compilation():
        other = threading.Thread(target=lambda: results.append(make_double()(x)))
        other.start()
        other.join()
        with pytest.raises(CompilationError, match=r"float32\[3,9\]"):
            make_double()(x)
    np.testing.assert_array_equal(results[0], 2 * np.ones((3, 9)))


def test_a_loop_in_another_thread_than_the_main_one_is_refused_its_own_compilations_alone() -> None:
    x, told, inside, done = jnp.ones((3, 11)), [], threading.Event(), threading.Event()

    def loop() -> None:
        with no_compilation():
            inside.set()
            assert done.wait(60)
            try:
                make_double()(x)
            except CompilationError as error:
                told.append(str(error))

    thread = threading.Thread(target=loop)
    thread.start()
    assert inside.wait(60)
    try:
        np.testing.assert_array_equal(make_double()(x), 2 * np.ones((3, 11)))
    finally:
        done.set()
        thread.join()
    assert "float32[3,11]" in told[0]


def test_moving_arrays_is_no_compilation() -> None:
    with no_compilation():
        x = jax.device_put(np.ones((11, 3), np.float32))
        np.testing.assert_array_equal(jax.device_get(x), np.ones((11, 3)))


def test_after_the_block_everything_is_as_before() -> None:
    logger = logging.getLogger("jax._src.interpreters.pxla")
    before = logger.level, logger.propagate, list(logger.handlers)
    with pytest.raises(CompilationError), no_compilation():
        make_double()(jnp.ones(3))
    with pytest.raises(KeyError), no_compilation():
        raise KeyError
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    make_double()(jnp.ones(3))


# Compiles (or takes from the cache) one function; prints what was removed, how often the cache helped, and the result.
WITH_CACHE = """
import sys
import jax, jax.monitoring
from jaxprorl.compilation import use_compilation_cache
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
torn = use_compilation_cache(sys.argv[1])
result = jax.jit(lambda x: 2 * x + 1).lower(jax.ShapeDtypeStruct((), "int32")).compile()(20)
print(len(torn), len(hits), result)
"""


@pytest.mark.slow
def test_torn_cache_entries_are_removed_and_compiled_again(tmp_path: Path) -> None:
    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", WITH_CACHE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run() == "0 0 41\n"
    (entry,) = tmp_path.glob("*-cache")
    whole = entry.read_bytes()
    assert run() == "0 1 41\n"
    entry.write_bytes(whole[: len(whole) // 2])  # as a kill in the middle of the write leaves it
    assert run() == "1 0 41\n"
    assert entry.read_bytes()[:2] == whole[:2] and len(entry.read_bytes()) > len(whole) // 2
    assert run() == "0 1 41\n"


@pytest.mark.parametrize("damage", ["empty", "one byte short", "one bit flipped", "zeros at the end"])
def test_every_kind_of_torn_entry_is_found_and_the_others_stay(tmp_path: Path, damage: str) -> None:
    whole = compilation_cache.compress_executable(bytes(range(256)) * 40)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 16
    torn = {"empty": b"", "one byte short": whole[:-1], "one bit flipped": bytes(flipped), "zeros at the end": whole[:-9] + bytes(9)}
    (tmp_path / "a-cache").write_bytes(whole)
    (tmp_path / "b-cache").write_bytes(torn[damage])
    (tmp_path / "b-atime").write_bytes(b"no entry")
    assert remove_torn_entries(tmp_path, wait_s=0.0) == ["b-cache"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-cache", "b-atime"]
    assert remove_torn_entries(tmp_path / "nowhere") == []


@pytest.mark.parametrize("end", ["written", "removed", "still being written"])
def test_an_entry_that_another_process_writes_is_not_torn(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, entry = compilation_cache.compress_executable(bytes(range(256)) * 40), tmp_path / "a-cache"
    entry.write_bytes(whole[:100])

    def meanwhile(seconds: float) -> None:
        entry.unlink() if end == "removed" else entry.write_bytes(whole if end == "written" else whole[:200])

    monkeypatch.setattr(compilation.time, "sleep", meanwhile)
    assert remove_torn_entries(tmp_path) == []
    assert entry.exists() == (end != "removed")
