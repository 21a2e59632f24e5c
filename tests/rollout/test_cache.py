import jax
import pytest
from factories import PROPERTY, tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.rollout.cache import MAX_BANKS, SHORTEST_SEGMENT_TOKENS, cache_bytes, cache_shardings, empty_cache, make_layout, segments
from jaxprorl.sharding.mesh import make_mesh


@given(st.integers(1, 20_000))
@PROPERTY
def test_segments_make_up_the_length_and_at_most_double(tokens: int) -> None:
    sizes = segments(tokens)
    assert sum(sizes) == tokens and min(sizes) > 0
    assert all(size <= max(SHORTEST_SEGMENT_TOKENS, sum(sizes[:i])) for i, size in enumerate(sizes))


def test_segments_by_hand() -> None:
    assert segments(48) == (48,)
    assert segments(64) == (64,)
    assert segments(128) == (64, 64)
    assert segments(300) == (64, 64, 128, 44)


def test_the_layout_follows_slots_and_samples() -> None:
    mesh = make_mesh("dp")
    shards = mesh.size
    config = tiny_config(rollout__slots=32 * shards, rollout__max_prompt_tokens=70, rollout__max_response_tokens=130)
    layout = make_layout(config, 8, mesh)
    assert (layout.shards, layout.slots, layout.bank_entries, layout.banks, layout.entries) == (shards, 32, 4, MAX_BANKS, 16)
    assert (layout.prompt_segments, layout.response_segments) == ((64, 6), (64, 64, 2))
    alone = make_layout(config, 1, mesh)
    assert (alone.bank_entries, alone.banks) == (32, 1)  # every slot has a prompt of its own, more can never be in use
    few = make_layout(config, 48, mesh)
    assert (few.bank_entries, few.banks) == (1, MAX_BANKS)  # fewer slots than samples


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_the_bytes_are_those_of_the_arrays(samples: int, dtype: str) -> None:
    config, c, mesh = tiny_config(rollout__max_prompt_tokens=70, rollout__max_response_tokens=130), tiny_model(), make_mesh("dp")
    layout = make_layout(config, samples, mesh)
    cache = jax.eval_shape(lambda: empty_cache(layout, c, dtype))
    assert cache_bytes(layout, c, dtype) == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache["layers"]))
    shardings = cache_shardings(layout, c, mesh, "dp")
    assert jax.tree.structure(shardings) == jax.tree.structure(cache)
