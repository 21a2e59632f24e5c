import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.models.attention import attend
from jaxprorl.models.cached_attention import Partial, finish, merge, nothing, partial_attention, readable

ROWS, GROUPS, QUERIES, WIDTH, COLUMNS = 3, 2, 2, 8, 11


def arrays(seed: int = 0, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q_BGRK, k_BGKW, v_BGWK and a mask_BW of which every row may read something."""
    random = np.random.RandomState(seed)
    q = random.standard_normal((ROWS, GROUPS, QUERIES, WIDTH))
    k = random.standard_normal((ROWS, GROUPS, WIDTH, COLUMNS))
    v = random.standard_normal((ROWS, GROUPS, COLUMNS, WIDTH))
    mask = random.uniform(size=(ROWS, COLUMNS)) < 0.6
    mask[:, 4] = True
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), mask


def pieces(cuts: list[int], q: Any, k: Any, v: Any, mask: Any) -> list[Partial]:
    bounds = [0, *sorted(cuts), COLUMNS]
    ranges = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    return [partial_attention(q, k[..., r], v[:, :, r], mask[:, r]) for r in ranges]


@given(cuts=st.lists(st.integers(1, COLUMNS - 1), max_size=3, unique=True), seed=st.integers(0, 100))
@PROPERTY
def test_any_cut_into_pieces_gives_plain_attention(cuts: list[int], seed: int) -> None:
    q, k, v, mask = arrays(seed)
    found = nothing(jnp.array(q))
    for part in pieces(cuts, q, k, v, mask):
        found = merge(found, part)
    # attend takes [B, S, H, K] queries and [B, T, G, K] keys.
    q_B1HK = q.reshape(ROWS, 1, GROUPS * QUERIES, WIDTH)
    expected = attend(q_B1HK, jnp.transpose(k, (0, 3, 1, 2)), jnp.transpose(v, (0, 2, 1, 3)), mask[:, None, None])
    np.testing.assert_allclose(finish(found, jnp.float32).reshape(expected.shape), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_piece_that_a_row_may_not_read_changes_none_of_its_bits(place: str, dtype: str) -> None:
    q, k, v, mask = arrays(dtype="float32")
    q, k, v = (jnp.array(x, dtype) for x in (q, k, v))
    real = partial_attention(q, k, v, mask)
    closed = partial_attention(q, 50 * k, 50 * v, np.zeros_like(mask))  # its values are garbage, and large
    for other in (closed, nothing(q)):
        joined = merge(other, real) if place == "before" else merge(real, other)
        for a, b in zip(joined, real, strict=True):
            np.testing.assert_array_equal(a, b)


def test_rows_that_may_read_a_piece_are_changed_by_it() -> None:
    q, k, v, mask = arrays()
    real = partial_attention(q, k, v, mask)
    joined = merge(real, partial_attention(q, k, 2 * v, np.ones_like(mask)))
    assert (np.abs(finish(joined, jnp.float32) - finish(real, jnp.float32)).max(axis=(1, 2, 3)) > 1e-3).all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v, mask = arrays()
    result = finish(merge(partial_attention(100 * q, k, v, mask), partial_attention(100 * q, -k, v, mask)), jnp.float32)
    assert np.isfinite(result).all()
    assert np.abs(result).max() <= np.abs(v).max() * (1 + 1e-6)  # a weighted mean of values


def test_the_result_has_the_asked_dtype_and_sums_in_float32() -> None:
    q, k, v, mask = arrays()
    part = partial_attention(jnp.array(q, "bfloat16"), jnp.array(k, "bfloat16"), jnp.array(v, "bfloat16"), jnp.array(mask))
    assert {x.dtype for x in part} == {jnp.dtype("float32")}
    assert finish(part, jnp.bfloat16).dtype == jnp.bfloat16
    assert jax.eval_shape(nothing, jnp.zeros((1, 1, 1, 4), "bfloat16")).context.dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_reaches_only_those_who_read_its_column(bad: float) -> None:
    q, k, v, _ = arrays()
    v[:, 0, 3, 1] = bad
    kept_k, kept_v = readable(np.swapaxes(k, 2, 3), v)
    reads, skips = np.arange(COLUMNS) <= 5, np.arange(COLUMNS) != 3
    mask = np.stack([reads, skips, skips])
    found = np.array(finish(partial_attention(q, jnp.swapaxes(kept_k, 2, 3), kept_v, mask), jnp.float32))
    assert np.isnan(found[0, 0]).all() and np.isfinite(found[0, 1]).all() and np.isfinite(found[1:]).all()
    v[:, 0, 3, 1] = 0.5  # whatever else stood there
    expected = finish(partial_attention(q, k, v, mask), jnp.float32)
    np.testing.assert_array_equal(found[1:], expected[1:])
    np.testing.assert_array_equal(found[0, 1], expected[0, 1])
    kept_k, kept_v = readable(np.swapaxes(k, 2, 3), v)
    np.testing.assert_array_equal(kept_v, v)
    np.testing.assert_array_equal(np.swapaxes(kept_k, 2, 3), k)
