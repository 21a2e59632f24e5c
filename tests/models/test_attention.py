import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE

from jaxprorl.models import kernels
from jaxprorl.models.attention import attend, packed_attention
from jaxprorl.models.chunked import first_chunks
from jaxprorl.models.compute import Compute
from jaxprorl.models.naive import packed_causal_mask
from jaxprorl.sharding.mesh import make_mesh

KERNELS = ("triton", "splash")  # interpreted here
Arrays = tuple[np.ndarray, ...]


def naive(q_BSHK: np.ndarray, k_BTGK: np.ndarray, v_BTGK: np.ndarray, mask_B1ST: np.ndarray) -> np.ndarray:
    """Attention, one query of one head at a time."""
    batch, queries, heads, width = q_BSHK.shape
    per_group = heads // k_BTGK.shape[2]
    context = np.zeros_like(q_BSHK)
    for b in range(batch):
        for s in range(queries):
            readable = [t for t in range(k_BTGK.shape[1]) if mask_B1ST[b, 0, s, t]]
            for h in range(heads):
                scores = np.array([q_BSHK[b, s, h] @ k_BTGK[b, t, h // per_group] for t in readable]) / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                context[b, s, h] = sum(w * v_BTGK[b, t, h // per_group] for w, t in zip(weights, readable, strict=True))
    return context


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_context_equals_a_loop_over_queries_and_heads(heads: int, groups: int) -> None:
    random = np.random.RandomState(heads + groups)
    q, k, v = (random.standard_normal((2, size, n, 8)) for size, n in ((5, heads), (7, groups), (7, groups)))
    mask = random.uniform(size=(2, 1, 5, 7)) < 0.5
    mask[..., 2] = True  # every query reads something
    with jax.enable_x64(True):
        context = attend(*map(jnp.asarray, (q, k, v, mask)))
        assert context.dtype == "float64"
    np.testing.assert_allclose(context, naive(q, k, v, mask), rtol=0, atol=1e-13)


def test_mask_of_a_drawn_example() -> None:
    # Two sequences of two and one tokens, one token of padding. Rows read, columns are read.
    mask = packed_causal_mask(jnp.array([[1, 1, 2, 0]]))
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(mask, np.array(expected, bool)[None, None])


def test_softmax_is_taken_in_float32_for_bfloat16_inputs() -> None:
    # 1024 equal scores: a bfloat16 sum of weights would stop growing at 256 times its step and be off by far.
    q, k = jnp.zeros((1, 1, 1, 8), jnp.bfloat16), jnp.zeros((1, 1024, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, 1024, 1, 8), jnp.bfloat16)
    context = attend(q, k, v, jnp.ones((1, 1, 1, 1024), bool))
    assert context.dtype == jnp.bfloat16
    np.testing.assert_allclose(context.astype(jnp.float32), 1.0, rtol=2**-8)


@pytest.mark.parametrize("name", ["naive", "chunked"])
def test_gradients_are_finite_where_scores_are_huge(name: str) -> None:
    q = jnp.asarray(1e8 * (1 + np.random.RandomState(0).uniform(size=(1, 9, 1, 4))), "float32")
    compute = Compute("float32", name, attention_chunk_tokens=3)
    gradient = jax.grad(lambda q: packed_attention(compute, jnp.ones((1, 9), jnp.int32))(q, q, q).sum())(q)
    assert np.isfinite(gradient).all()


# --- implementations for packed rows, against `attend` with the mask -----------------------------------------------------------------


def segments(*rows: list[int], size: int) -> np.ndarray:
    """segment_ids_BS of rows with segments of these lengths, the rest padding."""
    ids_BS = np.zeros((len(rows), size), np.int32)
    for row, lengths in enumerate(rows):
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        ids_BS[row, : len(ids)] = ids
    return ids_BS


def inputs(ids_BS: np.ndarray, heads: int, groups: int, width: int, dtype: str) -> Arrays:
    """q, k, v and the derivative by the context, which is 0 in padding: no loss looks there."""
    random = np.random.RandomState(heads + width)
    q, k, v, d = (random.standard_normal((*ids_BS.shape, n, width)) for n in (heads, groups, groups, heads))
    d *= (ids_BS > 0)[:, :, None, None]
    return tuple(x.astype(jnp.dtype(dtype)) for x in (q, k, v, d))


def results(compute: Compute, ids_BS: np.ndarray, arrays: Arrays, context_ids_BS: np.ndarray | None = None) -> Arrays:
    """What real tokens get, and the gradients by q, k and v."""
    with jax.enable_x64(arrays[0].dtype == np.float64):
        *gradients, context = _results(compute, jnp.asarray(ids_BS), context_ids_BS, *map(jnp.asarray, arrays))
        return np.asarray(context)[ids_BS > 0], *map(np.asarray, gradients)


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def _results(compute: Compute, ids_BS: jax.Array, context_ids_BS: jax.Array | None, *arrays: jax.Array) -> Any:
    def product(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        context = packed_attention(compute, ids_BS, context_ids_BS)(q, k, v)
        return jnp.sum(context.astype(arrays[3].dtype) * arrays[3]), context

    gradients, context = jax.grad(product, argnums=(0, 1, 2), has_aux=True)(*arrays[:3])
    return *gradients, context


LAYOUTS = {
    "one_segment": segments([23], size=23),
    "packed": segments([4, 1, 9, 6], [5, 5, 5], [3], [23], size=23),  # also: ends at a chunk's border, chunks of padding alone
    "a_row_of_padding": segments([], [7], size=23),
    "ids_in_any_order": np.array([[7, 7, 0, 0, 2, 2, 2, 7, 7, 0, 5, 5, 2, 2]], np.int32),  # no layout of ours: equal ids are one segment
    "padding_first": np.array([[0, 0, 0, 0, 0, 0, 1, 1, 1]], np.int32),
}


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(8, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunked_equals_naive_in_value_and_gradient(layout: str, chunk: int) -> None:
    ids = LAYOUTS[layout]
    for heads, groups in ((4, 4), (4, 2), (3, 1)) if layout == "packed" else ((4, 2),):
        arrays = inputs(ids, heads, groups, 8, "float64")
        expected = results(Compute("float64", "naive"), ids, arrays)
        found = results(Compute("float64", "chunked", attention_chunk_tokens=chunk), ids, arrays)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_chunks_of_keys_that_no_query_may_read_are_skipped() -> None:
    # Chunks of two. Row 0 alone would let the chunks start at 0, 0, 1, 3; row 1 wants them at 0, 1, 2, 2.
    ids = np.array([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 3, 3, 3, 0]], np.int32)
    np.testing.assert_array_equal(first_chunks(ids[:1], 2), [0, 0, 1, 3])
    # The last chunk of row 1 holds ids 0 to 3: padding counts as the smallest id, so everything might meet it.
    np.testing.assert_array_equal(first_chunks(ids[1:], 2), [0, 1, 2, 0])
    np.testing.assert_array_equal(first_chunks(ids, 2), [0, 0, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["chunked", *KERNELS])
def test_every_implementation_equals_naive_on_two_devices(name: str, dtype: str) -> None:
    ids = segments([100, 30, 1, 120, 100], [384], [40], [], size=384)  # three blocks; the last row is padding alone
    arrays = inputs(ids, 4, 2, 64, dtype)
    exact = results(Compute("float64", "naive"), ids, tuple(x.astype(np.float64) for x in arrays))
    found = results(Compute(dtype, name, mesh=make_mesh("dp")), ids, arrays)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == dtype
        # float32: a sum of 384 terms may be off by 384 x 2^-24 of its size. bfloat16: of the values on the way, weights, their
        # derivatives, scaled queries and the result are rounded to 8 bits, each by up to 2^-9 of the largest: four times that, doubled.
        atol = (384 * 2**-24 if dtype == "float32" else 8 * 2**-9) * np.abs(b).max()
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=0, atol=atol)


def test_segments_with_a_context_equal_the_context_and_each_of_them_alone() -> None:
    # Two prompts (segments 1 and 5), the first with three samples, one of a single token; blocks of queries begin inside of segments.
    lengths = [70, 60, 1, 50, 10, 40]
    ids = segments(lengths, size=256)
    contexts = np.array([0, 0, 1, 1, 1, 0, 5], np.int32)[ids]
    arrays = inputs(ids, 4, 2, 8, "float64")
    compute = Compute("float64", "naive", shared_prompts=True)
    context, *gradients = results(compute, ids, arrays, contexts)
    starts = np.cumsum([0, *lengths])
    expected = [np.zeros_like(x) for x in arrays[:3]]
    for prompt, members in ((0, (1, 2, 3)), (4, (5,))):
        before = np.arange(starts[prompt], starts[prompt + 1])
        for number, member in enumerate(members):
            here = np.concatenate([before, np.arange(starts[member], starts[member + 1])])
            q, k, v, d = (x[:, here].copy() for x in arrays)
            if number:
                d[:, : len(before)] = 0  # what the prompt itself gives counts once
            alone, *alone_gradients = results(compute, np.ones((1, len(here)), np.int32), (q, k, v, d))
            np.testing.assert_allclose(context[here], alone, rtol=0, atol=1e-12)
            for total, part in zip(expected, alone_gradients, strict=True):
                total[:, here] += part
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["chunked", *KERNELS])
def test_only_naive_attention_takes_contexts(name: str) -> None:
    ids = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=f"'{name}' attention knows nothing of a context"):
        packed_attention(Compute(attention=name), ids, ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "chunked"])
def test_a_segment_in_a_row_equals_the_segment_alone(name: str) -> None:
    lengths = [6, 1, 11, 2]
    ids = segments(lengths, size=23)
    arrays = inputs(ids, 4, 2, 8, "float64")
    compute = Compute("float64", name, attention_chunk_tokens=4)
    context, *gradients = results(compute, ids, arrays)
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        here = slice(start, start + length)
        alone, *alone_gradients = results(compute, np.ones((1, length), np.int32), tuple(x[:, here] for x in arrays))
        np.testing.assert_allclose(context[here], alone, rtol=0, atol=1e-12)
        for a, b in zip(gradients, alone_gradients, strict=True):
            np.testing.assert_allclose(a[:, here], b, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "chunked", *KERNELS])
def test_what_stands_in_padding_changes_nothing_and_gets_no_gradient(name: str) -> None:
    ids = segments([60, 30], [5], size=128)
    arrays = inputs(ids, 2, 1, 64, "float32")
    compute = Compute("float32", name, attention_chunk_tokens=32, mesh=make_mesh("dp"))
    before = results(compute, ids, arrays)
    for x in arrays[:3]:
        x[ids == 0] = 100.0  # scores of 80,000
    after = results(compute, ids, arrays)
    np.testing.assert_array_equal(after[0], before[0])
    for a, b in zip(after[1:], before[1:], strict=True):
        np.testing.assert_array_equal(a[ids > 0], b[ids > 0])
        np.testing.assert_array_equal(a[ids == 0], 0.0)


def test_rows_of_one_sequence_reach_cudnn_with_their_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only GPUs have cuDNN; XLA's form of the same function takes the same arguments."""
    asked = []

    def by_xla(*arrays: jax.Array, implementation: str, **options: Any) -> jax.Array:
        asked.append(implementation)
        return dot_product_attention(*arrays, implementation="xla", **options)

    dot_product_attention: Callable[..., jax.Array] = jax.nn.dot_product_attention
    monkeypatch.setattr(kernels.jax.nn, "dot_product_attention", by_xla)
    ids = segments([16], [5], [], [1], size=16)
    arrays = inputs(ids, 4, 2, 8, "float32")
    exact = results(Compute("float64", "naive"), ids, tuple(x.astype(np.float64) for x in arrays))
    for a, b in zip(results(Compute("float32", "cudnn", mesh=make_mesh("dp")), ids, arrays), exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=16 * 2**-24 * np.abs(b).max())
    assert set(asked) == {"cudnn"}


def temporary_bytes(name: str, size: int) -> int:
    """Compiled temporary memory of one row's gradient."""
    shapes = [jax.ShapeDtypeStruct((1, size, n, 32), "float32") for n in (3, 1, 1)]
    compute = Compute("float32", name)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, ids_BS: jax.Array) -> jax.Array:
        return packed_attention(compute, ids_BS)(q, k, v).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)), compiler_options=QUICK_COMPILE)
    return gradient.lower(*shapes, jax.ShapeDtypeStruct((1, size), "int32")).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_chunked_grows_like_the_row_and_that_of_naive_like_its_square() -> None:
    naive, chunked = ([temporary_bytes(name, size) for size in (2048, 4096, 8192)] for name in ("naive", "chunked"))
    assert naive[1] / naive[0] > 3.5 and naive[2] / naive[1] > 3.5
    assert chunked[1] / chunked[0] <= 2 and chunked[2] / chunked[1] <= 2
    assert chunked[0] < 2048 * 2048  # less than one byte for each pair of tokens


def test_loading_a_kernel_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    q = jnp.zeros((1, 128, 1, 16))
    jax.eval_shape(kernels.kernel("triton", interpret=True), q, q, q, jnp.zeros((1, 128), jnp.int32))
    assert not recwarn.list
