import numpy as np

from jaxprorl.algorithms.filtering import has_spread


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
