import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.data import mixture
from jaxprorl.data.mixture import draw, prompt_index
from jaxprorl.types import Prompt


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 5), size=st.integers(1, 50))
def test_every_epoch_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    order = [prompt_index(seed, epoch * size + i, size) for i in range(size)]
    assert sorted(order) == list(range(size))


def test_pure_whatever_was_asked_before() -> None:
    order = [prompt_index(3, position, 10) for position in range(100)]
    mixture._permutation.cache_clear()
    assert [prompt_index(3, position, 10) for position in reversed(range(100))] == order[::-1]


def test_golden_order() -> None:
    """Fixed for good: a run resumed under another numpy must see the same order."""
    assert [prompt_index(0, position, 8) for position in range(16)] == [0, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 1, 6, 5, 0]


def test_seeds_and_epochs_differ() -> None:
    orders = {tuple(prompt_index(seed, epoch * 30 + i, 30) for i in range(30)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_every_stage_has_an_order_of_its_own_and_the_first_has_that_of_a_run_without_stages() -> None:
    orders = [tuple(prompt_index(0, position, 30, stage) for position in range(60)) for stage in range(4)]
    assert orders[0] == tuple(prompt_index(0, position, 30) for position in range(60))
    epochs = [order[start : start + 30] for order in orders for start in (0, 30)]
    assert len(set(epochs)) == 8 and all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert [prompt_index(0, position, 8, 1) for position in range(8)] != [prompt_index(0, position, 8) for position in range(8)]


def test_draws_join_at_any_restart() -> None:
    prompts = [Prompt(i, "d", np.zeros(1, np.int32), "t", "") for i in range(7)]
    whole = draw(prompts, 1, 0, 40)
    for start in range(40):
        assert draw(prompts, 1, 0, start) + draw(prompts, 1, start, 40 - start) == whole
    assert draw(prompts, 1, 5, 0) == ()


@pytest.mark.parametrize(("seed", "position", "size", "stage"), [(-1, 0, 3, 0), (0, -1, 3, 0), (0, 0, 0, 0), (0, 0, 3, -1)])
def test_refuses_nonsense(seed: int, position: int, size: int, stage: int) -> None:
    with pytest.raises(ValueError, match="need size >= 1"):
        prompt_index(seed, position, size, stage)
