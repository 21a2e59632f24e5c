from collections.abc import Callable

import loops
import numpy as np
import pytest
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.algorithms.advantages import ADVANTAGES, advantages, group_relative, leave_one_out, mean_centred, reinforce_pp_baseline

PER_GROUP = [group_relative, mean_centred, leave_one_out]
LOOPS: dict[str, Callable[[list[loops.Group]], list[list[float]]]] = {
    "grpo": loops.grpo,
    "dr_grpo": loops.dr_grpo,
    "rloo": loops.rloo,
    "reinforce_pp_trajectory": lambda groups: loops.reinforce_pp(groups, over_tokens=False),
    "reinforce_pp_token": lambda groups: loops.reinforce_pp(groups, over_tokens=True),
}
every_kind = pytest.mark.parametrize("kind", ADVANTAGES)


def one_group(kind: str, rewards: list[float], mask: list[float] | None = None, tokens: list[int] | None = None) -> np.ndarray:
    n = len(rewards)
    return advantages(kind, np.array([rewards]), np.array([mask or [1.0] * n]), np.array([tokens or [3] * n]))[0]


def test_every_kind_has_a_loop() -> None:
    assert set(LOOPS) == set(ADVANTAGES)


def test_one_right_answer_of_four() -> None:
    # Mean 1/4. Variance (9/16 + 3 x 1/16) / 4 = 3/16, deviation 0.4330127. 0.75 / 0.4330127 = sqrt(3), -0.25 / 0.4330127 = -1 / sqrt(3).
    expected = {
        "grpo": [1.7320508, -0.5773503, -0.5773503, -0.5773503],
        "dr_grpo": [0.75, -0.25, -0.25, -0.25],
        "rloo": [1, -1 / 3, -1 / 3, -1 / 3],  # 1 - 0, 0 - 1/3
    }
    for kind, values in expected.items():
        np.testing.assert_allclose(one_group(kind, [1, 0, 0, 0]), values, rtol=1e-7)


def test_continuous_rewards() -> None:
    # Mean 0.5. Variance (0.09 + 0 + 0.09) / 3 = 0.06, deviation 0.2449490. 0.3 / 0.2449490 = 1.2247449.
    expected = {
        "grpo": [-1.2247449, 0, 1.2247449],
        "dr_grpo": [-0.3, 0, 0.3],
        "rloo": [-0.45, 0, 0.45],  # 0.2 - 0.65, 0.5 - 0.5, 0.8 - 0.35
    }
    for kind, values in expected.items():
        np.testing.assert_allclose(one_group(kind, [0.2, 0.5, 0.8]), values, rtol=1e-6, atol=1e-7)


def test_reinforce_pp_by_hand() -> None:
    # Groups (1, 0) and (1, 0, 0, 0), minus their means: 0.5, -0.5 and 0.75, -0.25, -0.25, -0.25.
    reward_PN = np.array([[1, 0, 9, 9], [1, 0, 0, 0]], float)
    mask_PN = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], float)
    # Trajectories: mean 0, variance (0.25 + 0.25 + 0.5625 + 3 x 0.0625) / 6 = 1.25 / 6, deviation 0.4564355.
    expected_PN = [[1.0954451, -1.0954451, 0, 0], [1.6431677, -0.5477226, -0.5477226, -0.5477226]]
    np.testing.assert_allclose(reinforce_pp_baseline(reward_PN, mask_PN, np.ones((2, 4))), expected_PN, rtol=1e-6)
    # Tokens 1, 3 and 2, 2, 2, 2, twelve in all: mean (0.5 - 1.5 + 1.5 - 0.5 - 0.5 - 0.5) / 12 = -1/12,
    # mean square (0.25 + 0.75 + 1.125 + 3 x 0.125) / 12 = 2.5 / 12, variance 2.5 / 12 - 1/144 = 29/144, deviation 0.4487637.
    # (0.5 + 1/12) / 0.4487637 = 7 / sqrt(29) = 1.2998674, -5 / sqrt(29), 10 / sqrt(29), -2 / sqrt(29).
    tokens_PN = np.array([[1, 3, 7, 7], [2, 2, 2, 2]])
    expected_PN = [[1.2998674, -0.9284767, 0, 0], [1.8569534, -0.3713907, -0.3713907, -0.3713907]]
    np.testing.assert_allclose(reinforce_pp_baseline(reward_PN, mask_PN, tokens_PN), expected_PN, rtol=1e-6)
    np.testing.assert_allclose(advantages("reinforce_pp_token", reward_PN, mask_PN, tokens_PN), expected_PN, rtol=1e-6)


def test_a_group_without_spread_weighs_in_the_batch_statistics_but_gets_nothing() -> None:
    # Centred 0.5, -0.5, 0, 0, 0, 0 with tokens 1, 3, 2, 2, 2, 2: mean -1/12, mean square 1/12, variance 11/144.
    # (0.5 + 1/12) / (sqrt(11) / 12) = 7 / sqrt(11), -5 / sqrt(11).
    reward_PN = np.array([[1, 0, 0, 0], [1, 1, 1, 1]], float)
    mask_PN = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], float)
    tokens_PN = np.array([[1, 3, 5, 5], [2, 2, 2, 2]])
    expected_PN = [[2.1105794, -1.5075567, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(advantages("reinforce_pp_token", reward_PN, mask_PN, tokens_PN), expected_PN, rtol=1e-6)


@every_kind
@pytest.mark.parametrize("reward", [0.0, 1.0, 77.0, np.nan, np.inf])
def test_a_sample_without_a_score_leaves_its_group(kind: str, reward: float) -> None:
    # Whatever the fourth reward and length are, they change nothing, and it gets no advantage.
    four = one_group(kind, [1, 0, 0.5, reward], [1, 1, 1, 0], [2, 3, 4, 100])
    assert four[3] == 0
    np.testing.assert_array_equal(four[:3], one_group(kind, [1, 0, 0.5], tokens=[2, 3, 4]))


def test_the_others_of_a_masked_sample_by_hand() -> None:
    # Counted are 1, 0 and 0.5: mean 0.5, variance (0.25 + 0.25 + 0) / 3 = 1/6, deviation 0.4082483. 0.5 / 0.4082483 = 1.2247449.
    np.testing.assert_allclose(one_group("grpo", [1, 0, 0.5, 9], [1, 1, 1, 0]), [1.2247449, -1.2247449, 0, 0], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(one_group("rloo", [1, 0, 0.5, 9], [1, 1, 1, 0]), [0.75, -0.75, 0, 0], rtol=1e-6, atol=1e-7)


@every_kind
def test_a_sample_without_tokens_does_no_harm(kind: str) -> None:
    assert np.isfinite(one_group(kind, [1, 0, 0.5], tokens=[0, 0, 0])).all()
    assert np.isfinite(one_group(kind, [1, 0, 0.5], tokens=[0, 0, 5])).all()
    np.testing.assert_array_equal(one_group("reinforce_pp_token", [1, 0, 0.5], tokens=[0, 4, 4])[0], 0)


@every_kind
@PROPERTY
@given(reward=st.floats(-100, 100), samples=st.integers(1, 33))
def test_groups_without_spread_get_exactly_zero(kind: str, reward: float, samples: int) -> None:
    assert (one_group(kind, [reward] * samples) == 0).all()  # 0.1 + 0.1 + 0.1 is not 0.3: the mean of equal rewards is not their value


@every_kind
def test_rounding_of_equal_rewards_is_no_spread(kind: str) -> None:
    assert (one_group(kind, [0.1 + 0.2, 0.3, 0.3]) == 0).all()


@every_kind
@pytest.mark.parametrize("mask", [[1, 0, 0], [0, 0, 0]])
def test_one_counted_sample_or_none_gives_zero(kind: str, mask: list[float]) -> None:
    assert (one_group(kind, [1, 0, 0.5], mask) == 0).all()


@every_kind
def test_no_groups_give_no_advantages(kind: str) -> None:
    empty = np.zeros((0, 4))
    assert advantages(kind, empty, empty, empty.astype(int)).shape == (0, 4)


@every_kind
def test_a_small_but_real_spread_counts(kind: str) -> None:
    sign = np.sign(one_group(kind, [0.5, 0.5 + 1e-4]))
    np.testing.assert_array_equal(sign, [-1, 1])


@every_kind
@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_a_counted_reward_must_be_finite(kind: str, reward: float) -> None:
    with pytest.raises(ValueError, match=r"reward of group 0, sample 1 is (nan|inf); a sample without a finite reward must be masked"):
        one_group(kind, [1, reward, 0])


@every_kind
@PROPERTY
@given(seed=st.integers(0, 2**32 - 1), prompts=st.integers(1, 6), samples=st.integers(1, 17))
def test_many_groups_equal_a_loop_and_know_no_order(kind: str, seed: int, prompts: int, samples: int) -> None:
    random = np.random.RandomState(seed)
    reward_PN = random.randint(0, 5, (prompts, samples)) / 4  # exact in binary: what is equal is exactly equal
    mask_PN = (random.uniform(size=reward_PN.shape) < 0.8).astype(float)
    tokens_PN = random.randint(1, 50, reward_PN.shape)
    advantage_PN = advantages(kind, reward_PN, mask_PN, tokens_PN)
    assert advantage_PN.dtype == np.float32
    groups = [list(zip(*columns, strict=True)) for columns in zip(reward_PN, mask_PN > 0, tokens_PN, strict=True)]
    np.testing.assert_allclose(advantage_PN, LOOPS[kind](groups), rtol=1e-6, atol=1e-6)
    order = random.permutation(prompts)[:, None], random.permutation(samples)[None]
    permuted_PN = advantages(kind, reward_PN[order], mask_PN[order], tokens_PN[order])
    np.testing.assert_allclose(permuted_PN, advantage_PN[order], rtol=1e-6, atol=1e-7)


@PROPERTY
@given(st.integers(0, 2**32 - 1))
def test_moments(seed: int) -> None:
    random = np.random.RandomState(seed)
    reward_PN, mask_PN, tokens_PN = random.uniform(size=(5, 8)), np.ones((5, 8)), random.randint(1, 90, (5, 8))
    grpo = group_relative(reward_PN, mask_PN).astype(float)
    np.testing.assert_allclose(grpo.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(grpo.std(axis=1), 1, atol=1e-6)
    for per_group in PER_GROUP:
        np.testing.assert_allclose(per_group(reward_PN, mask_PN).astype(float).sum(axis=1), 0, atol=1e-5)
    trajectory = reinforce_pp_baseline(reward_PN, mask_PN, mask_PN).astype(float)
    assert (trajectory.mean(), trajectory.std()) == pytest.approx((0, 1), abs=1e-6)
    over_tokens = np.repeat(reinforce_pp_baseline(reward_PN, mask_PN, tokens_PN).astype(float), tokens_PN.ravel())
    assert (over_tokens.mean(), over_tokens.std()) == pytest.approx((0, 1), abs=1e-6)
