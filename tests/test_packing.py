import dataclasses

import numpy as np
import pytest
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.packing import Sample, assign_rows, assign_shared_rows, most_rows, pack


def sample(prompt: list[int], response: list[int]) -> Sample:
    return Sample(np.array(prompt, np.int32), np.array(response, np.int32), {"value": np.array(response, np.float32) / 10})


def test_a_drawn_example() -> None:
    # Two sequences in the first row, one in the second, a third row of padding.
    samples = [sample([1, 2], [3, 4, 5]), sample([6], [7, 8]), sample([9, 10, 11], [12])]
    arrays = pack(samples, [[0, 1], [2]], rows=3, row_tokens=9, names=["value"])
    expected = {
        "tokens":      [[1, 2, 3, 4, 5, 6, 7, 8, 0], [9, 10, 11, 12, 0, 0, 0, 0, 0], [0] * 9],
        "targets":     [[2, 3, 4, 5, 0, 7, 8, 0, 0], [10, 11, 12, 0, 0, 0, 0, 0, 0], [0] * 9],
        "positions":   [[0, 1, 2, 3, 4, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0, 0, 0, 0], [0] * 9],
        "segment_ids": [[1, 1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0], [0] * 9],
        "mask":        [[0, 1, 1, 1, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0], [0] * 9],
        "value":       [[0, 0.3, 0.4, 0.5, 0, 0.7, 0.8, 0, 0], [0, 0, 1.2, 0, 0, 0, 0, 0, 0], [0] * 9],
    }  # fmt: skip
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(arrays[name], np.array(value, arrays[name].dtype), err_msg=name)
        assert arrays[name].dtype == ("float32" if name in ("mask", "value") else "int32")


def test_rows_are_filled_longest_first() -> None:
    # 6 opens row 0 (4 left), 5 opens row 1 (5 left), 4 fills row 0, 3 goes to row 1 (2 left), 2 fills it, 1 opens row 2.
    assert assign_rows([1, 2, 3, 4, 5, 6], 10) == [[5, 3], [4, 2, 1], [0]]
    assert assign_rows([2, 2, 2], 4) == [[0, 1], [2]]  # equal lengths keep their order
    assert assign_rows([], 4) == []


def test_without_packing_every_sequence_has_a_row_of_its_own() -> None:
    assert assign_rows([1, 4, 2], 4, packing=False) == [[0], [1], [2]]
    assert assign_rows([], 4, packing=False) == []
    with pytest.raises(ValueError, match="sequence 1 has 5 tokens, a row holds 4"):
        assign_rows([1, 5], 4, packing=False)


def test_a_sequence_longer_than_a_row_is_refused_with_its_length() -> None:
    assert assign_rows([10], 10) == [[0]]
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, a row holds 10"):
        assign_rows([3, 11, 12], 10)


def test_more_rows_than_there_are_is_refused() -> None:
    samples = [sample([1], [2])] * 3
    with pytest.raises(ValueError, match="3 sequences need 2 rows of 4 tokens, there are 1"):
        pack(samples, assign_rows([2, 2, 2], 4), rows=1, row_tokens=4)


def test_a_sample_without_a_prompt_is_refused() -> None:
    # Its first response token would have no place to its left: in the row's last column, or in its neighbour's segment.
    with pytest.raises(ValueError, match="sequence 0 has no prompt"):
        pack([sample([], [2, 3])], [[0]], rows=1, row_tokens=4)


def test_the_mask_goes_by_lengths_so_a_stop_token_that_is_also_the_padding_is_learned() -> None:
    arrays = pack([sample([5, 0], [7, 0])], [[0]], rows=1, row_tokens=6)  # 0 fills the row, ends the response and lies in the prompt
    assert arrays["tokens"].tolist() == [[5, 0, 7, 0, 0, 0]]
    assert arrays["targets"].tolist() == [[0, 7, 0, 0, 0, 0]]
    assert arrays["mask"].tolist() == [[0, 1, 1, 0, 0, 0]]


def test_a_drawn_example_of_shared_prompts() -> None:
    # The prompt 1 2 3 once without its 3, which begins both samples; then another group; in the second row the prompt again.
    one, other = [sample([1, 2, 3], [4, 5]), sample([1, 2, 3], [6])], [sample([7], [8])]
    samples = [*(dataclasses.replace(s, group=1) for s in one), *(dataclasses.replace(s, group=0) for s in other)]
    arrays = pack([*samples, samples[1]], [[0, 1, 2], [3]], rows=2, row_tokens=10, shared=True)
    expected = {
        "tokens":      [[1, 2, 3, 4, 5, 3, 6, 7, 8, 0], [1, 2, 3, 6, 0, 0, 0, 0, 0, 0]],
        "targets":     [[0, 0, 4, 5, 0, 6, 0, 8, 0, 0], [0, 0, 6, 0, 0, 0, 0, 0, 0, 0]],
        "positions":   [[0, 1, 2, 3, 4, 2, 3, 0, 1, 0], [0, 1, 2, 3, 0, 0, 0, 0, 0, 0]],
        "segment_ids": [[1, 1, 2, 2, 2, 3, 3, 5, 5, 0], [1, 1, 2, 2, 0, 0, 0, 0, 0, 0]],  # 4 is a prompt without a token
        "context_ids": [[0, 0, 1, 1, 1, 1, 1, 4, 4, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]],
        "mask":        [[0, 0, 1, 1, 0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]],
    }  # fmt: skip
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(arrays[name], np.array(value, arrays[name].dtype), err_msg=name)


def test_groups_are_placed_where_their_prompt_is() -> None:
    # Prompts of 4 (3 shared tokens). Group 0: 5, 2, 1 response tokens, group 1: 4, 3. Rows of 12.
    # Group 0 has more tokens: its longest opens row 0 with 3 + 6 tokens, 3 are left: the one of 2 fits (3), that of 1 does not.
    # It opens row 1: 3 + 2 used, 7 left. Group 1: 3 + 5 opens row 2, 4 left; the one of 3 needs 4 there.
    samples = [dataclasses.replace(sample([9] * 4, [1] * size), group=group) for group, size in ((0, 5), (0, 2), (1, 4), (0, 1), (1, 3))]
    assert assign_shared_rows(samples, 12) == [[0, 1], [3], [2, 4]]
    assert assign_shared_rows([], 12) == []
    with pytest.raises(ValueError, match="sequence 0 has 9 tokens, a row holds 8"):
        assign_shared_rows(samples, 8)


lengths = st.tuples(st.integers(1, 6), st.integers(0, 7))


@PROPERTY
@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 7), min_size=1, max_size=6)), max_size=8), st.integers(13, 40))
def test_shared_rows_hold_every_sample_beside_its_prompt(groups: list[tuple[int, list[int]]], row_tokens: int) -> None:
    ids = iter(range(1, 1000))
    prompts = [[next(ids) for _ in range(size)] for size, _ in groups]
    samples = [
        dataclasses.replace(sample(prompts[group], [next(ids) for _ in range(size)]), group=group)
        for group, (_, sizes) in enumerate(groups)
        for size in sizes
    ]
    layout = assign_shared_rows(samples, row_tokens)
    assert sorted(index for row in layout for index in row) == list(range(len(samples)))
    arrays = pack(samples, layout, len(layout), row_tokens, ["value"], shared=True)
    for row, members in enumerate(layout):
        segments, contexts, learned = (arrays[name][row] for name in ("segment_ids", "context_ids", "mask"))
        own = [segment for segment in range(1, segments.max() + 1) if contexts[segments == segment].any()]
        assert len(own) == len(members)
        for segment, index in zip(own, members, strict=True):
            here = segments == segment
            (context,) = set(contexts[here].tolist())
            seen = here | (segments == context)
            assert arrays["tokens"][row][seen].tolist() == [*samples[index].prompt_ids, *samples[index].response_ids]
            assert arrays["positions"][row][seen].tolist() == list(range(samples[index].tokens))
            np.testing.assert_array_equal(arrays["targets"][row][here & (learned > 0)], samples[index].response_ids)
            np.testing.assert_array_equal(arrays["value"][row][here & (learned > 0)], samples[index].per_token["value"])


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 30), st.data())
def test_no_lengths_need_more_rows_than_are_kept_ready(
    groups: int, count: int, prompt: int, response: int, more: int, data: st.DataObject
) -> None:
    row_tokens = prompt + response + more
    sizes = st.lists(st.integers(1, response), min_size=count, max_size=count)
    samples = [
        dataclasses.replace(sample([1] * size, [1] * length), group=group)
        for group in range(groups)
        for size in [data.draw(st.integers(1, prompt))]
        for length in data.draw(sizes)
    ]
    assert len(assign_shared_rows(samples, row_tokens)) <= most_rows(groups, count, prompt, response, row_tokens, True)
    assert len(assign_rows([s.tokens for s in samples], row_tokens)) <= most_rows(groups, count, prompt, response, row_tokens, False)


@PROPERTY
@given(st.lists(lengths, max_size=20), st.integers(13, 30))
def test_every_token_is_placed_once_and_predicts_its_successor(sizes: list[tuple[int, int]], row_tokens: int) -> None:
    ids = iter(range(1, 1000))  # every token of its own kind
    samples = [sample([next(ids) for _ in range(p)], [next(ids) for _ in range(r)]) for p, r in sizes]
    layout = assign_rows([s.tokens for s in samples], row_tokens)
    assert sorted(index for row in layout for index in row) == list(range(len(samples)))
    assert all(0 < sum(samples[index].tokens for index in row) <= row_tokens for row in layout)
    arrays = pack(samples, layout, len(layout) + 1, row_tokens, ["value"])

    tokens, segments = arrays["tokens"], arrays["segment_ids"]
    assert sorted(tokens[segments > 0]) == list(range(1, next(ids)))
    assert not any(value[segments == 0].any() for value in arrays.values())
    assert arrays["mask"].sum() == sum(r for _, r in sizes)
    for row in range(len(layout)):
        for segment in range(1, segments[row].max() + 1):
            here = np.flatnonzero(segments[row] == segment)
            one = samples[layout[row][segment - 1]]
            np.testing.assert_array_equal(here, np.arange(here[0], here[0] + one.tokens))  # in one piece
            np.testing.assert_array_equal(tokens[row, here], [*one.prompt_ids, *one.response_ids])
            np.testing.assert_array_equal(arrays["positions"][row, here], np.arange(one.tokens))
            np.testing.assert_array_equal(arrays["targets"][row, here], [*tokens[row, here[1:]], 0])
            learned = arrays["mask"][row, here] > 0
            np.testing.assert_array_equal(arrays["targets"][row, here][learned], one.response_ids)
            np.testing.assert_array_equal(arrays["value"][row, here][learned], one.per_token["value"])
            assert not arrays["value"][row, here][~learned].any()
