import numpy as np
import pytest
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.algorithms.advantages import group_relative


def advantages(rewards: list[float], mask: list[float] | None = None) -> np.ndarray:
    return group_relative(np.array([rewards]), np.array([mask or [1.0] * len(rewards)]))[0]


def naive(reward_PN: np.ndarray, mask_PN: np.ndarray) -> np.ndarray:
    """The paper's formula, group by group and sample by sample."""
    result = np.zeros(reward_PN.shape)
    for p, (rewards, mask) in enumerate(zip(reward_PN, mask_PN, strict=True)):
        counted = [r for r, m in zip(rewards, mask, strict=True) if m]
        if len(set(counted)) > 1:
            for n, reward in enumerate(rewards):
                if mask[n]:
                    result[p, n] = (reward - np.mean(counted)) / np.std(counted)
    return result


def test_one_right_answer_of_four() -> None:
    # Mean 1/4. Variance (9/16 + 3 x 1/16) / 4 = 3/16, deviation 0.4330127. 0.75 / 0.4330127 = sqrt(3), -0.25 / 0.4330127 = -1 / sqrt(3).
    np.testing.assert_allclose(advantages([1, 0, 0, 0]), [1.7320508, -0.5773503, -0.5773503, -0.5773503], rtol=1e-7)


def test_continuous_rewards() -> None:
    # Mean 0.5. Variance (0.09 + 0 + 0.09) / 3 = 0.06, deviation 0.2449490. 0.3 / 0.2449490 = 1.2247449.
    np.testing.assert_allclose(advantages([0.2, 0.5, 0.8]), [-1.2247449, 0, 1.2247449], rtol=1e-6, atol=1e-7)


def test_a_sample_without_a_score_leaves_its_group() -> None:
    # Counted are 1, 0 and 0.5: mean 0.5, variance (0.25 + 0.25 + 0) / 3 = 1/6, deviation 0.4082483. 0.5 / 0.4082483 = 1.2247449.
    # The fourth reward, whatever it is, changes nothing and gets no advantage.
    for reward in (0.0, 1.0, 77.0):
        np.testing.assert_allclose(advantages([1, 0, 0.5, reward], [1, 1, 1, 0]), [1.2247449, -1.2247449, 0, 0], rtol=1e-6, atol=1e-7)


@PROPERTY
@given(st.floats(0, 1), st.integers(1, 33))
def test_groups_without_spread_get_exactly_zero(reward: float, samples: int) -> None:
    assert (advantages([reward] * samples) == 0).all()  # 0.1 + 0.1 + 0.1 is not 0.3: the mean of equal rewards is not their value


@pytest.mark.parametrize("mask", [[1, 0, 0], [0, 0, 0]])
def test_one_counted_sample_or_none_gives_zero(mask: list[float]) -> None:
    assert (advantages([1, 0, 0.5], mask) == 0).all()


def test_a_small_but_real_spread_counts() -> None:
    np.testing.assert_allclose(advantages([0.5, 0.5 + 1e-4]), [-1, 1], rtol=1e-6)


@PROPERTY
@given(st.integers(0, 2**32 - 1))
def test_many_groups_equal_a_loop_and_know_no_order(seed: int) -> None:
    random = np.random.RandomState(seed)
    reward_PN = random.randint(0, 5, (6, 5)) / 4
    mask_PN = (random.uniform(size=(6, 5)) < 0.8).astype(float)
    advantage_PN = group_relative(reward_PN, mask_PN)
    assert advantage_PN.dtype == np.float32
    np.testing.assert_allclose(advantage_PN, naive(reward_PN, mask_PN), rtol=1e-6, atol=1e-6)
    groups, samples = random.permutation(6), random.permutation(5)
    permuted_PN = group_relative(reward_PN[groups][:, samples], mask_PN[groups][:, samples])
    np.testing.assert_allclose(permuted_PN, advantage_PN[groups][:, samples], rtol=1e-6, atol=1e-7)


@PROPERTY
@given(st.integers(0, 2**32 - 1))
def test_advantages_of_a_group_have_mean_0_and_deviation_1(seed: int) -> None:
    rewards = np.random.RandomState(seed).uniform(size=(1, 8))
    advantage_N = group_relative(rewards, np.ones((1, 8)))[0].astype(float)
    assert advantage_N.mean() == pytest.approx(0, abs=1e-6)
    assert advantage_N.std() == pytest.approx(1, abs=1e-6)
