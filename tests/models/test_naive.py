from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, random_groups, random_params, tiny_config, tiny_model

from jaxprorl.batch import host_batch
from jaxprorl.models.attention import packed_attention
from jaxprorl.models.compute import Compute
from jaxprorl.models.naive import naive_attention, query_blocks
from jaxprorl.models.qwen2 import UNROLL_MAX_LAYERS, Params, build
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.update import Batch, batch_log_probs

# One prompt with two samples, another segment and padding; and a row of padding alone.
IDS_BS = np.stack([np.repeat([1, 2, 3, 4, 0], [40, 30, 33, 20, 7]), np.zeros(130, int)]).astype(np.int32)
CONTEXTS_BS = np.where((IDS_BS == 2) | (IDS_BS == 3), 1, 0).astype(np.int32)
HEADS, GROUPS, WIDTH = 4, 2, 16


def inputs(dtype: str, sharpness: float = 1.0, mean: float = 0.0) -> tuple[np.ndarray, ...]:
    """q, k, v and the derivative by the context: numbers of bfloat16, queries times `sharpness`, values plus `mean`."""
    random = np.random.RandomState(0)
    q, k, v, d = (random.standard_normal((*IDS_BS.shape, n, WIDTH)) for n in (HEADS, GROUPS, GROUPS, HEADS))
    return tuple(x.astype(jnp.bfloat16).astype(jnp.dtype(dtype)) for x in (sharpness * q, k, v + mean, d))


def value_and_gradients(arrays: tuple[np.ndarray, ...], copies: bool, blocks: int) -> list[np.ndarray]:
    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        attend = lambda q, k, v: naive_attention(q, k, v, jnp.asarray(IDS_BS), blocks, jnp.asarray(CONTEXTS_BS), copies)  # noqa: E731
        context, back = jax.vjp(attend, *arrays[:3])
        return context, *back(arrays[3])

    with jax.enable_x64(arrays[0].dtype == np.float64):
        return [np.asarray(x) for x in run(*map(jnp.asarray, arrays))]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_its_own_backward_pass_gives_the_gradient(blocks: int) -> None:
    arrays = inputs("float64")
    for own, derived in zip(value_and_gradients(arrays, True, blocks), value_and_gradients(arrays, False, 1), strict=True):
        assert own.dtype == np.float64
        np.testing.assert_allclose(own, derived, rtol=0, atol=1e-13 * np.abs(derived).max())


@pytest.mark.parametrize(("sharpness", "mean"), [(1.0, 0.0), (8.0, 0.0), (1.0, 5.0)])
def test_in_bfloat16_its_gradient_is_about_as_close_to_the_exact_one_as_the_derived_one(sharpness: float, mean: float) -> None:
    exact = value_and_gradients(inputs("float64", sharpness, mean), False, 2)
    own, derived = (value_and_gradients(inputs("bfloat16", sharpness, mean), copies, 2) for copies in (True, False))
    for ours, theirs, right in zip(own, derived, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        errors = [np.sqrt(np.mean((x.astype(np.float64) - right) ** 2) / np.mean(right**2)) for x in (ours, theirs)]
        assert errors[0] < 2 * errors[1]  # the derived one keeps weights in float32
        assert errors[1] < 0.02, "the comparison is with something sound"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_with_and_without_gradients_have_the_same_bits(dtype: str) -> None:
    """One value in 65,536 lies in the middle of two of bfloat16, which not all of XLA:CPU rounds alike: there are 1.6 million."""
    ids, contexts = (jnp.asarray(np.tile(x, (2, 1))) for x in (IDS_BS, CONTEXTS_BS))
    attend = partial(naive_attention, segment_ids_BS=ids, blocks=2, context_ids_BS=contexts)
    alone = jax.jit(partial(attend, copies_for_gradients=False))

    def with_gradients(copies: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        context, back = jax.vjp(partial(attend, copies_for_gradients=copies), *arrays[:3])
        return context, *back(arrays[3])

    compiled = [jax.jit(partial(with_gradients, copies)) for copies in (True, False)]
    for seed in range(12):
        random = np.random.RandomState(seed)
        arrays = [jnp.asarray(3 * random.standard_normal((*ids.shape, n, 64)), dtype) for n in (HEADS, GROUPS, GROUPS, HEADS)]
        expected = alone(*arrays[:3])
        for run in compiled:
            np.testing.assert_array_equal(run(*arrays)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "dtype"), [(2, "float32"), (UNROLL_MAX_LAYERS + 1, "float32"), (UNROLL_MAX_LAYERS + 1, "bfloat16")])
def test_passes_of_a_model_with_and_without_gradients_have_the_same_bits(layers: int, dtype: str) -> None:
    """Layers side by side and in a loop, whose passes with gradients save what others fuse."""
    model = tiny_model(num_hidden_layers=layers)
    batch = host_batch(tiny_config(), random_groups(4), shared=True)
    rows = {name: jnp.asarray(value[0, 0]) for name, value in batch.items() if value.ndim == 4}
    graphdef, params = build(model, Compute(dtype, shared_prompts=True)), random_params(model)

    def log_probs(params: Params, rows: Batch) -> jax.Array:
        return batch_log_probs(graphdef, params, rows, 1.2)[0]

    def with_gradients(params: Params, rows: Batch) -> tuple[jax.Array, Params]:
        logp_BS, back = jax.vjp(lambda params: log_probs(params, rows), params)
        return logp_BS, back(jnp.ones_like(logp_BS))[0]

    np.testing.assert_array_equal(jax.jit(with_gradients)(params, rows)[0], jax.jit(log_probs)(params, rows))


def test_copies_are_for_bfloat16_on_cpus_alone() -> None:
    def products(compute: Compute) -> str:

        shape = jax.ShapeDtypeStruct((2, 128, 2, 16), compute.dtype)
        ids = jnp.ones((2, 128), jnp.int32)
        loss = lambda q, k, v: packed_attention(compute, ids)(q, k, v).astype("float32").sum()  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(shape, shape, shape))

    assert "layout_constraint" in products(Compute("bfloat16"))
    assert "layout_constraint" not in products(Compute("float32"))
    assert "layout_constraint" not in products(Compute("bfloat16", mesh=make_mesh("dp", jax.devices()[:2])))


def test_blocks_have_64_queries_or_more_and_are_four_at_most() -> None:
    assert [query_blocks(tokens, 1) for tokens in (1, 64, 127, 128, 192, 255, 256, 4096)] == [1, 1, 1, 2, 3, 3, 4, 4]
    assert query_blocks(256, 2) == 1
