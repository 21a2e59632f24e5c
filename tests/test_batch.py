import dataclasses

import jax
import numpy as np
import pytest
from factories import make_group, make_prompt, random_groups, tiny_config
from ml_collections import ConfigDict

from jaxprorl.batch import batch_advantages, batch_shapes, device_batch, host_batch, micro_batches_per_update, packing_metrics
from jaxprorl.rollout.groups import shaped
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.types import Group


def sequences(arrays: dict[str, np.ndarray], update: int) -> list[tuple[list[int], list[int], int]]:
    """(tokens, learned targets, number of the sample) of every sequence in one mini-batch, as they lie in the rows."""
    found = []
    rows = {name: value[update].reshape(-1, value.shape[-1]) for name, value in arrays.items() if value.ndim == 4}
    for row, segments in enumerate(rows["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            learned = here & (rows["mask"][row] > 0)
            (number,) = set(rows["sequence"][row][learned].tolist())
            found.append((rows["tokens"][row][here].tolist(), rows["targets"][row][learned].tolist(), number))
    return found


def group_with_errors() -> Group:
    # Counted are 1, 0 and 1: mean 2/3, deviation sqrt(2)/3; (1 - 2/3) / 0.4714045 = 0.7071068, -2/3 / 0.4714045 = -1.4142136.
    return make_group(make_prompt(0), [[10, 11], [20], [30, 31, 32], [40]], [1.0, 0.0, None, 1.0], [[-1, -2], [-3], [-4, -5, -6], [-7]])


def test_samples_that_could_not_be_graded_are_left_out_and_the_others_carry_their_advantage() -> None:
    config = tiny_config()
    groups = [random_groups(1)[0], group_with_errors()]
    advantage_PN = batch_advantages(config, groups, 0, np.zeros((4, 4)))
    np.testing.assert_allclose(advantage_PN[1], [0.7071068, -1.4142136, 0, 0.7071068], rtol=1e-6)
    assert advantage_PN.shape == (4, 4) and not advantage_PN[2:].any()
    arrays = jax.device_get(device_batch(config, groups, make_mesh("dp"), shared=False))
    # The second group is the second mini-batch; its samples are numbers 4, 5 and 7.
    assert sorted(sequences(arrays, 1)) == [([5, 6, 7, 10, 11], [10, 11], 4), ([5, 6, 7, 20], [20], 5), ([5, 6, 7, 40], [40], 7)]
    learned = arrays["mask"][1] > 0
    assert sorted(arrays["engine_logp"][1][learned]) == [-7, -3, -2, -1]
    assert not arrays["engine_logp"][1][~learned].any()


def test_samples_whose_engine_failed_are_left_out_too() -> None:
    config = tiny_config()
    group = make_group(make_prompt(0), [[10], [20], [30], [40]], [1.0, 0.0, 1.0, 0.0], [[-1], [float("nan")], [-2], [-3]])
    failed = dataclasses.replace(group.completions[2], finish_reason="error")
    group = dataclasses.replace(group, completions=(*group.completions[:2], failed, group.completions[3]))
    # Counted are 1 and 0: mean 1/2, deviation 1/2.
    np.testing.assert_array_equal(batch_advantages(config, [group], 0, np.zeros((4, 4)))[0], [1, 0, 0, -1])
    assert [targets for _, targets, _ in sequences(host_batch(config, [group], shared=False), 0)] == [[10], [40]]


@pytest.mark.parametrize(
    ("aggregation", "weight", "denominator"),
    [
        # Response lengths 2, 1, (3: not graded), 1: four tokens in three sequences; the limit is 12.
        ("token_mean", [1, 1, 0, 1], 4),
        ("sequence_mean", [1 / 2, 1, 0, 1], 3),
        ("dr_grpo", [1, 1, 0, 1], 3 * 12),
    ],
)
def test_weights_and_denominators_by_hand(aggregation: str, weight: list[float], denominator: float) -> None:
    arrays = host_batch(tiny_config(algorithm__aggregation=aggregation), [group_with_errors()], shared=False)
    np.testing.assert_allclose(arrays["weight_PN"], [weight, [0] * 4, [0] * 4, [0] * 4], rtol=1e-7)
    np.testing.assert_array_equal(arrays["denominator"], [denominator, 0])


def test_kl_in_the_reward_is_taken_off_before_the_group_statistics() -> None:
    config = tiny_config(algorithm__kl_placement="reward", algorithm__kl_coefficient=0.5, algorithm__advantage="dr_grpo")
    group = make_group(make_prompt(0), [[10], [20], [30], [40]], [1.0, 0.0, 0.0, 0.0])
    kl_sum_PN = np.zeros((4, 4), np.float32)
    kl_sum_PN[0] = [1.0, 0.0, -1.0, 0.0]
    # Rewards become 1/2, 0, 1/2, 0; their mean is 1/4.
    np.testing.assert_allclose(batch_advantages(config, [group], 0, kl_sum_PN)[0], [0.25, -0.25, 0.25, -0.25])
    config.algorithm.kl_placement = "loss"
    np.testing.assert_allclose(batch_advantages(config, [group], 0, kl_sum_PN)[0], [0.75, -0.25, -0.25, -0.25])


def test_statistics_over_tokens_weigh_answers_by_their_lengths() -> None:
    groups = [make_group(make_prompt(0), [[1] * 3, [2], [3], [4]], [1.0, 0.0, 0.0, 0.0])]
    # x = 3/4, -1/4, -1/4, -1/4 with weights 3, 1, 1, 1: mean 1/4, deviation 1/2. Unweighted they would be 0 and sqrt(3)/4.
    config = tiny_config(algorithm__advantage="reinforce_pp_token")
    np.testing.assert_allclose(batch_advantages(config, groups, 0, np.zeros((4, 4)))[0], [1, -1, -1, -1], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Rewards 1, 1, 0, 1; the limit is 12 tokens and the lengths are 12, 10, 12 and 11. The second answer did not stop, nor the third.
        ({"stopping": "overlong", "penalty": 0.4, "buffer_tokens": 4}, [1 - 0.4, 1 - 0.2, -0.4, 1 - 0.3]),
        ({"stopping": "non_termination", "penalty": 0.25}, [1, 1 - 0.25, -0.25, 1]),
        ({"stopping": "stop_properly", "coefficient": 0.5}, [1, 0.5, 0, 1]),
        # The term is -2 at the limit, and 4 (1 + cos(pi t / 12)) / 2 more below it.
        (
            {"cosine_weight": 0.5, "cosine_minimum": -2.0, "cosine_maximum": 2.0},
            [1 - 1, 1 - 1 + (1 + np.cos(np.pi * 10 / 12)), -1, 1 - 1 + (1 + np.cos(np.pi * 11 / 12))],
        ),
    ],
)
def test_every_shaping_field_reaches_the_rewards(changes: dict[str, object], expected: list[float]) -> None:
    config = tiny_config(**{f"shaping__{field}": value for field, value in changes.items()})
    group = make_group(make_prompt(0), [[1] * 12, [2] * 10, [3] * 12, [4] * 11], [1.0, 1.0, 0.0, 1.0])
    cut = [dataclasses.replace(completion, finish_reason="length") for completion in group.completions]
    completions = (group.completions[0], cut[1], cut[2], group.completions[3])
    reward_PN, _ = shaped(config, [dataclasses.replace(group, completions=completions)], 0)
    np.testing.assert_allclose(reward_PN[0], expected, rtol=1e-12)


@pytest.mark.parametrize(("reason", "stays"), [("stop", True), ("length", True), ("aborted", False), ("error", False)])
def test_only_what_the_policy_or_the_limit_ended_counts(reason: str, stays: bool) -> None:
    config = tiny_config(shaping__stopping="non_termination")
    group = make_group(make_prompt(0), [[1], [2]], [1.0, 0.5])
    ended = dataclasses.replace(group.completions[1], finish_reason=reason)
    reward_PN, mask_PN = shaped(config, [dataclasses.replace(group, completions=(group.completions[0], ended))], 0)
    np.testing.assert_array_equal(mask_PN, [[1, stays]])
    np.testing.assert_array_equal(reward_PN, [[1, {"stop": 0.5, "length": -0.5}.get(reason, 0)]])


def test_shaping_comes_before_the_advantages_and_follows_the_step() -> None:
    config = tiny_config(
        algorithm__advantage="dr_grpo", shaping__cosine_weight=1.0, shaping__cosine_on_steps=2, shaping__cosine_off_steps=3
    )
    group = make_group(make_prompt(0), [[10] * 12, [20] * 6, [30] * 12, [40] * 6], [1.0, 1.0, 1.0, 1.0])
    # The term is 0 at the limit of 12 tokens and 1/2 halfway: rewards 1, 3/2, 1, 3/2.
    on, off = [-0.25, 0.25, -0.25, 0.25], [0.0] * 4
    for step, expected in ((0, on), (1, on), (2, off), (4, off), (5, on)):
        np.testing.assert_allclose(batch_advantages(config, [group], step, np.zeros((4, 4)))[0], expected, atol=1e-7)


@pytest.mark.parametrize(("groups", "updates", "expected"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])])
def test_mini_batches_take_the_groups_in_prompt_order_and_evenly(groups: int, updates: int, expected: list[int]) -> None:
    config = tiny_config(batch__prompts=8, batch__updates=updates)
    made = [make_group(make_prompt(i, [i + 1] * 3), [[40, 41], [42]] * 2, [1, 0, 0, 0]) for i in range(groups)]
    arrays = host_batch(config, made, shared=False)
    found = [sorted({tokens[0] - 1 for tokens, _, _ in sequences(arrays, update)}) for update in range(updates)]
    assert [len(ids) for ids in found] == expected
    assert [i for ids in found for i in ids] == list(range(groups))
    assert [len(sequences(arrays, update)) for update in range(updates)] == [4 * count for count in expected]
    assert [count > 0 for count in arrays["micro_batches"]] == [count > 0 for count in expected]


def test_everything_lies_in_the_micro_batches_that_are_in_use() -> None:
    config = tiny_config(batch__prompts=6, batch__updates=2, batch__micro_batch_rows=2)
    groups = random_groups(6)
    arrays = host_batch(config, groups, shared=False)
    learned = sum(len(completion.token_ids) for group in groups for completion in group.completions)
    assert arrays["mask"].sum() == learned
    for update, used in enumerate(arrays["micro_batches"]):
        filled = arrays["segment_ids"][update].any(axis=(1, 2))
        np.testing.assert_array_equal(filled, np.arange(len(filled)) < used)
    assert (arrays["micro_batches"] < micro_batches_per_update(config, shared=False)).all()  # packing is worth something


def test_without_packing_rows_hold_one_sequence_each_from_their_first_token_on() -> None:
    groups = random_groups(4)
    packed, alone = (host_batch(tiny_config(batch__packing=packing), groups, shared=False) for packing in (True, False))
    assert packed["segment_ids"].max() > 1
    assert alone["segment_ids"].max() == 1
    assert (np.diff(alone["segment_ids"], axis=-1) <= 0).all()  # padding follows
    for update in range(2):
        assert sorted(map(str, sequences(alone, update))) == sorted(map(str, sequences(packed, update)))
        assert alone["micro_batches"][update] == 2  # two groups of four samples, four rows each


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 5])
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_batch_has_the_shapes_and_shardings_that_were_compiled_for(groups: int, strategy: str, shared: bool) -> None:
    config, mesh = tiny_config(batch__prompts=5, batch__updates=2), make_mesh(strategy)
    shapes = batch_shapes(config, mesh, shared)
    arrays = device_batch(config, random_groups(groups), mesh, shared)
    assert arrays.keys() == shapes.keys()
    for name, array in arrays.items():
        assert (array.shape, array.dtype) == (shapes[name].shape, shapes[name].dtype), name
        assert array.sharding.is_equivalent_to(shapes[name].sharding, array.ndim), name
    assert {len(shard.data[0, 0]) for shard in arrays["tokens"].addressable_shards} == {config.batch.micro_batch_rows // 2}


def test_the_longest_possible_sequences_fit() -> None:
    # 5 prompts in 2 updates: 3 groups of 4 samples at most, each in a row of its own, 4 rows per micro-batch: 3 micro-batches.
    config = tiny_config(batch__prompts=5, batch__updates=2, batch__row_tokens=20)
    assert micro_batches_per_update(config, shared=False) == 3
    groups = [make_group(make_prompt(i, [1] * 8), [[2] * 12] * 4, [1, 0, 0, 0]) for i in range(5)]
    arrays = host_batch(config, groups, shared=False)
    np.testing.assert_array_equal(arrays["micro_batches"], [3, 2])
    assert arrays["mask"].sum() == 5 * 4 * 12


def test_samples_of_a_group_share_their_prompt() -> None:
    # Rows of 20 tokens. The first group takes 2 of its prompt and four times 3: 14. One sample of the second fits behind it, with the
    # prompt 5; the other three lie in the next row, with the prompt again: 11.
    config = tiny_config(batch__updates=1, batch__row_tokens=20)
    groups = [make_group(make_prompt(i, [i + 1, i + 2, i + 3]), [[10, 11]] * 4, [1, 0, 0, 0], [[-1, -2]] * 4) for i in range(2)]
    arrays = host_batch(config, groups, shared=True)
    assert arrays["tokens"][0, 0, 0].tolist() == [1, 2, *[3, 10, 11] * 4, 2, 3, 4, 10, 11, 0]
    assert arrays["context_ids"][0, 0, 0].tolist() == [0, 0, *[1] * 12, 0, 0, 6, 6, 6, 0]
    assert arrays["tokens"][0, 0, 1].tolist() == [2, 3, *[4, 10, 11] * 3, *[0] * 9]
    learned = arrays["mask"] > 0
    assert arrays["sequence"][learned].tolist() == [number for number in range(8) for _ in range(2)]
    assert arrays["engine_logp"][learned].tolist() == [-1, -2] * 8
    apart = host_batch(config, groups, shared=False)
    assert ((arrays["segment_ids"] > 0).sum(), (apart["segment_ids"] > 0).sum()) == (14 + 5 + 11, 8 * 5)


def test_the_padding_of_a_step_counts_rows_that_fill_up_a_micro_batch_but_no_unused_micro_batch() -> None:
    config = tiny_config(rollout__samples_per_prompt=2)
    config.batch.update(prompts=3, updates=2, row_tokens=20, micro_batch_rows=2)
    groups = [make_group(make_prompt(i, [1] * 8), [[2] * 12] * 2, [0.0, 1.0]) for i in range(3)]
    # Samples fill their rows. Two groups are four rows, one is two; each of these is one micro-batch of two rows, or two.
    assert packing_metrics(host_batch(config, groups, shared=False)) == {"tokens.padding_share": 0.0}
    short = [*groups[:2], make_group(groups[2].prompt, [[2] * 2, [2] * 5], [0.0, 1.0])]  # 10 + 13 tokens, each in a row of its own
    assert packing_metrics(host_batch(config, short, shared=False))["tokens.padding_share"] == pytest.approx(1 - (80 + 23) / 120)
    config.batch.micro_batch_rows = 4
    assert packing_metrics(host_batch(config, short, shared=False))["tokens.padding_share"] == pytest.approx(1 - (80 + 23) / 160)
    assert packing_metrics(host_batch(config, short[:2], shared=False))["tokens.padding_share"] == pytest.approx(1 - 80 / 160)
    assert packing_metrics(host_batch(config, [], shared=False)) == {}


def skewed(prompts: int, samples: int, updates: int, rows: int, seed: int = 0) -> tuple[ConfigDict, list[Group], np.ndarray]:
    """A config, groups, and their lengths_PN: lognormal, cut at ten times the median, here 20 tokens."""
    changes = {"max_prompt_tokens": 8, "max_response_tokens": 200, "samples_per_prompt": samples}
    config = tiny_config(**{f"rollout__{name}": value for name, value in changes.items()})
    config.batch.update(prompts=prompts, updates=updates, row_tokens=208, micro_batch_rows=rows)
    random = np.random.RandomState(seed)
    lengths_PN = np.clip(np.round(20 * np.exp(0.9 * random.standard_normal((prompts, samples)))), 1, 200).astype(int)
    rewards = [0.0, 1.0] * (samples // 2)
    groups = [make_group(make_prompt(i, [1] * 8), [[2] * size for size in sizes], rewards) for i, sizes in enumerate(lengths_PN)]
    return config, groups, lengths_PN


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_the_share_of_padding_falls_with_larger_mini_batches_and_smaller_micro_batches(shared: bool) -> None:
    """The table of docs/performance.md, in its order."""

    def share(prompts: int, samples: int, updates: int, rows: int) -> float:
        """In percent, the mean of eight draws."""
        made = [skewed(prompts, samples, updates, rows, seed)[:2] for seed in range(8)]
        return 100 * float(np.mean([packing_metrics(host_batch(*each, shared))["tokens.padding_share"] for each in made]))

    cases = [(64, 16, 1, 16), (64, 16, 1, 4), (64, 16, 4, 16), (64, 16, 4, 4), (16, 8, 1, 16), (16, 8, 1, 4), (16, 8, 1, 1)]
    expected = [6.1, 2.1, 19.0, 5.4, 36.0, 12.7, 4.1] if shared else [4.8, 1.4, 9.1, 4.5, 26.1, 6.9, 2.9]
    assert [round(share(*case), 1) for case in cases] == expected


@pytest.mark.parametrize("shared", [False, True])
def test_skewed_lengths_are_packed_with_little_padding(shared: bool) -> None:
    config, groups, lengths_PN = skewed(64, 16, updates=1, rows=16)  # a mini-batch of ProRL
    assert lengths_PN.max() == 200
    arrays = host_batch(config, groups, shared)
    padding = packing_metrics(arrays)["tokens.padding_share"]
    print(f"padding: {padding:.3f}")
    real = (arrays["segment_ids"] > 0).sum()
    if shared:  # a sample brings one token of its prompt, and each row the other seven of a prompt or more
        assert lengths_PN.sum() + 64 * (16 + 7) <= real < lengths_PN.sum() + 64 * 16 * 3
    else:
        assert real == lengths_PN.sum() + 64 * 16 * 8
    assert 0 <= padding <= 0.1
    for name, shape in batch_shapes(config, make_mesh("dp"), shared).items():
        assert arrays[name].shape == shape.shape  # whatever the lengths, the shapes are those that were compiled
