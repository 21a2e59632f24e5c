import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, random_params, tiny_model
from flax import nnx

from jaxprorl.models.compute import Compute
from jaxprorl.models.dense import multiply_plainly, transposed_copy
from jaxprorl.models.qwen2 import build
from jaxprorl.sharding.mesh import make_mesh


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_a_product(dtype: str) -> None:
    random = np.random.RandomState(0)
    x_ND, kernel_DF, d_NF = (jnp.asarray(random.standard_normal(shape), dtype) for shape in ((37, 24), (24, 40), (37, 40)))
    value, gradients_of = jax.vjp(jax.jit(multiply_plainly), x_ND, kernel_DF)
    x, kernel, d = (np.asarray(array, np.float64) for array in (x_ND, kernel_DF, d_NF))
    exact = ((x @ kernel, np.abs(x) @ np.abs(kernel)), (d @ kernel.T, np.abs(d) @ np.abs(kernel.T)), (x.T @ d, np.abs(x.T) @ np.abs(d)))
    for found, (right, sizes), terms in zip((value, *gradients_of(d_NF)), exact, (24, 40, 37), strict=True):
        assert found.dtype == dtype
        # Every addition of float32 numbers may be off by 2^-24 of the sum of their sizes; in bfloat16 the result is rounded to 8 bits.
        atol = terms * 2**-24 * sizes + (2**-8 * np.abs(right) if dtype == "bfloat16" else 0)
        assert (np.abs(np.asarray(found, np.float64) - right) <= atol).all()


def test_the_copy_is_the_transposed_array_in_memory() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(transposed_copy)(x), x.T)
    # As a view of x, which is what the compiler makes of a plain transposition, x^T would be read in the order of x.
    text = jax.jit(lambda x, d: transposed_copy(x) @ d).lower(jnp.ones((512, 256)), jnp.ones((512, 128))).compile().as_text()
    assert "lhs_contracting_dims={1}" in text
    assert "lhs_contracting_dims={0}" not in text
    plain = jax.jit(lambda x, d: x.T @ d).lower(jnp.ones((512, 256)), jnp.ones((512, 128))).compile().as_text()
    assert "lhs_contracting_dims={0}" in plain


def test_only_what_is_whole_and_bfloat16_on_a_cpu_is_multiplied_so() -> None:
    one, two = make_mesh("dp", jax.devices()[:1]), make_mesh("dp", jax.devices()[:2])
    for compute in (Compute("bfloat16"), Compute("bfloat16", mesh=one), Compute("bfloat16", mesh=two, own_rows=True)):
        assert compute.copies_for_gradients
    assert not Compute("bfloat16", mesh=two).copies_for_gradients
    assert not Compute("float32").copies_for_gradients


def test_the_models_gradients_read_their_operands_as_they_lie() -> None:
    """Every product with a kernel, forward and backward: none contracts the first axis of its left side or the last of its right."""
    model = tiny_model(num_hidden_layers=1, vocab_size=4096)
    ids = jnp.ones((2, 16), jnp.int32)

    def layer_products(compute: Compute) -> str:
        graphdef = build(model, compute)
        hidden = jax.grad(lambda params: nnx.merge(graphdef, params)(ids, ids, ids).astype(jnp.float32).sum())  # type: ignore[operator]
        text = jax.jit(hidden, compiler_options=QUICK_COMPILE).lower(random_params(model)).compile().as_text()
        return "\n".join(line for line in text.splitlines() if " dot(" in line and "batch_dims" not in line)

    turned = "lhs_contracting_dims={0}"
    assert turned not in layer_products(Compute("bfloat16"))
    assert turned in layer_products(Compute("bfloat16", mesh=make_mesh("dp", jax.devices()[:2])))
