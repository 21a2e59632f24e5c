import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprorl.models.compute import Compute
from jaxprorl.models.dense import multiply_by_copies, transposed_copy


@pytest.mark.parametrize("tokens", [1, 2, 7, 12])
def test_product_and_gradients_are_those_of_the_plain_one(tokens: int) -> None:
    random = np.random.RandomState(tokens)
    with jax.enable_x64(True):
        x, kernel, d = (jnp.asarray(random.standard_normal(shape)) for shape in ((tokens, 5), (5, 3), (tokens, 3)))
        product, pull = jax.vjp(multiply_by_copies, x, kernel)
        np.testing.assert_array_equal(product, x @ kernel)
        for found, expected in zip(pull(d), (d @ kernel.T, x.T @ d), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
        np.testing.assert_array_equal(transposed_copy(x), x.T)


def test_no_product_of_the_backward_pass_is_converted_to_float32() -> None:
    def loss(x: jax.Array, kernel: jax.Array, d: jax.Array) -> jax.Array:
        return jnp.sum((multiply_by_copies(x, kernel) * d).astype(jnp.float32))

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 32), (32, 48), (64, 48))]
    compiled = jax.jit(jax.grad(loss, argnums=1)).lower(*shapes).compile().as_text()
    if "ynn_fusion" not in compiled:
        pytest.skip("this JAX multiplies bfloat16 in another way")
    assert not re.search(r" = f32\[\S* dot\(", compiled)


def test_it_is_chosen_on_cpus_in_bfloat16_only() -> None:
    assert Compute("bfloat16").copies_for_gradients
    assert not Compute("float32").copies_for_gradients
