import numpy as np
import pytest
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.algorithms.filtering import FILTERS, has_mixed_accuracy, has_spread, keeps_signal


def test_groups_by_hand() -> None:
    cases = [
        # rewards, mask, kept
        ([1, 0, 0, 0], [1, 1, 1, 1], True),
        ([1, 1, 1, 1], [1, 1, 1, 1], False),  # all right
        ([0, 0, 0, 0], [1, 1, 1, 1], False),  # all wrong
        ([0.3, 0.3, 0.3, 0.3], [1, 1, 1, 1], False),
        ([0.3, 0.3, 0.4, 0.3], [1, 1, 1, 1], True),
        ([1, 0, 0, 0], [0, 1, 1, 1], False),  # the only difference is a grader error
        ([1, 0, 0.5, 0.5], [1, 1, 0, 0], True),
        ([1, 0, 0, 0], [1, 0, 0, 0], False),  # one sample is no group
        ([1, 0, 0, 0], [0, 0, 0, 0], False),
    ]
    rewards, masks, kept = (np.array(column) for column in zip(*cases, strict=True))
    np.testing.assert_array_equal(has_spread(rewards, masks, 1e-6), kept)


def test_a_spread_within_the_tolerance_is_none() -> None:
    reward_PN = np.array([[0.5, 0.5625], [0.5, 0.625], [0.5, 0.75]])  # exact in binary
    np.testing.assert_array_equal(has_spread(reward_PN, np.ones((3, 2)), 0.125), [False, False, True])


def test_accuracies_by_hand() -> None:
    cases = [
        # solved, mask, kept
        ([1, 0, 0, 0], [1, 1, 1, 1], True),
        ([1, 1, 1, 0], [1, 1, 1, 1], True),
        ([1, 1, 1, 1], [1, 1, 1, 1], False),
        ([0, 0, 0, 0], [1, 1, 1, 1], False),
        ([1, 0, 1, 0], [1, 1, 0, 0], True),
        ([1, 0, 0, 0], [0, 1, 1, 1], False),
        ([1, 0, 0, 0], [1, 0, 0, 0], False),
        ([1, 0, 0, 0], [0, 0, 0, 0], False),
    ]
    rewards, masks, kept = (np.array(column) for column in zip(*cases, strict=True))
    np.testing.assert_array_equal(has_mixed_accuracy(rewards, masks), kept)


@pytest.mark.parametrize(
    ("rewards", "solved", "by_accuracy", "by_spread"),
    [
        ([1.0, 0.4], [1, 1], False, True),  # a length penalty differs, the answers are all right
        ([-0.3, -2.0], [0, 0], False, True),
        ([0.7, 0.7], [1, 0], True, False),  # the grader's own word
        ([3.5, -1.0], [1, 0], True, True),
    ],
)
def test_accuracy_reads_what_is_solved_and_spread_the_rewards(
    rewards: list[float], solved: list[int], by_accuracy: bool, by_spread: bool
) -> None:
    arrays = np.array([rewards]), np.array([solved]), np.ones((1, 2))
    assert keeps_signal("accuracy", *arrays, 1e-6)[0] == by_accuracy
    assert keeps_signal("spread", *arrays, 1e-6)[0] == by_spread


@PROPERTY
@given(seed=st.integers(0, 2**32 - 1), tolerance=st.floats(0, 0.99))
def test_both_rules_agree_on_binary_rewards_and_know_no_order(seed: int, tolerance: float) -> None:
    random = np.random.RandomState(seed)
    reward_PN = random.randint(0, 2, (20, 3)).astype(float)
    mask_PN = (random.uniform(size=reward_PN.shape) < 0.8).astype(float)
    kept = {kind: keeps_signal(kind, reward_PN, reward_PN == 1, mask_PN, tolerance) for kind in FILTERS}
    np.testing.assert_array_equal(kept["accuracy"], kept["spread"])
    order = random.permutation(20)[:, None], random.permutation(3)[None]
    for kind, keep_P in kept.items():
        shuffled = keeps_signal(kind, reward_PN[order], reward_PN[order] == 1, mask_PN[order], tolerance)
        np.testing.assert_array_equal(shuffled, keep_P[order[0][:, 0]])


def test_the_tolerance_reaches_the_rule_that_reads_it() -> None:
    reward_PN = np.array([[0.5, 0.6]])
    assert keeps_signal("spread", reward_PN, reward_PN == 1, np.ones((1, 2)), 0.05).all()
    assert not keeps_signal("spread", reward_PN, reward_PN == 1, np.ones((1, 2)), 0.2).any()


def test_off_keeps_groups_without_spread_and_without_samples() -> None:
    reward_PN, mask_PN = np.array([[1, 0], [1, 1], [0, 0], [0.5, 0.5]]), np.array([[1, 1], [1, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal(keeps_signal("off", reward_PN, reward_PN == 1, mask_PN, 1e-6), [True] * 4)


@pytest.mark.parametrize("kind", FILTERS)
def test_no_groups_keep_none(kind: str) -> None:
    assert keeps_signal(kind, np.zeros((0, 4)), np.zeros((0, 4)), np.zeros((0, 4)), 1e-6).shape == (0,)
