from collections import Counter

import numpy as np
import pytest
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.rollout.repetition import repeated_ngram_share, unique_token_share


@pytest.mark.parametrize(
    ("ids", "unique", "repeated"),
    [
        ([], 1.0, 0.0),
        ([5], 1.0, 0.0),
        ([5, 5, 5], 1 / 3, 0.0),  # no 4-gram in it
        ([1, 2, 3, 4], 1.0, 0.0),
        ([7] * 10, 0.1, 6 / 7),  # seven 4-grams, all the same
        ([1, 2, 3, 4, 1, 2, 3, 4], 0.5, 1 / 5),  # 1234 2341 3412 4123 1234
        ([1, 2, 3, 4, 4, 3, 2, 1], 0.5, 0.0),
    ],
)
def test_shares_by_hand(ids: list[int], unique: float, repeated: float) -> None:
    for kind in (list, lambda x: np.array(x, np.int32)):
        assert unique_token_share(kind(ids)) == pytest.approx(unique)
        assert repeated_ngram_share(kind(ids)) == pytest.approx(repeated)


@PROPERTY
@given(st.lists(st.one_of(st.integers(0, 2), st.integers(0, 2**31 - 1)), max_size=60), st.integers(1, 5))
def test_hashes_count_as_tuples_do(ids: list[int], n: int) -> None:
    ngrams = Counter(zip(*(ids[offset:] for offset in range(n)), strict=False))
    total = sum(ngrams.values())
    assert repeated_ngram_share(np.array(ids, np.int64), n) == pytest.approx(1 - len(ngrams) / total if total else 0.0)
