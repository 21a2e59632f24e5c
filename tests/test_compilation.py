import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprorl.compilation import CompilationError, no_compilation


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
