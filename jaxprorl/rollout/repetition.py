"""How much a completion repeats itself. Pure functions of token ids."""

from collections.abc import Sequence

import numpy as np

NGRAM = 4  # tokens; long enough that ordinary text seldom repeats one
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: multiplication by it is a bijection modulo 2^64


def unique_token_share(token_ids: Sequence[int] | np.ndarray) -> float:
    """Different tokens over tokens; 1 for an empty completion."""
    ids = np.asarray(token_ids)
    return len(np.unique(ids)) / len(ids) if len(ids) else 1.0


def repeated_ngram_share(token_ids: Sequence[int] | np.ndarray, n: int = NGRAM) -> float:
    """Share of the n-grams that occurred earlier in the same completion; 0 with fewer than n tokens.

    n-grams are compared by 64-bit hashes, so two different ones count as equal with a probability of about 2^-64.
    """
    ids = np.asarray(token_ids).astype(np.uint64)
    count = len(ids) - n + 1
    if count < 1:
        return 0.0
    hashes = np.zeros(count, np.uint64)
    for offset in range(n):
        hashes = (hashes + ids[offset : offset + count] + np.uint64(1)) * _FACTOR
        hashes ^= hashes >> np.uint64(29)
    return 1.0 - len(np.unique(hashes)) / count
