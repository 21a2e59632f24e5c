"""Sequences into rows of fixed length, rows into micro-batches: the static shapes that training compiles for.

Position s of a row predicts the token at s + 1 of the same sequence, so everything that belongs to a response token
(mask, advantage, log-probs) sits one place to its left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One sequence to learn from.

    Attributes:
        prompt_ids: int32 [prompt_tokens], context only.
        response_ids: int32 [response_tokens], learned.
        per_token: float32 [response_tokens] arrays by name, packed beside the tokens.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    per_token: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Length of the whole sequence."""
        return len(self.prompt_ids) + len(self.response_ids)


def assign_rows(lengths: Sequence[int], row_tokens: int, packing: bool = True) -> list[list[int]]:
    """Indices of the sequences in each row: first-fit decreasing, or one sequence per row. Depends on lengths and their order alone.

    Raises:
        ValueError: a sequence is longer than a row.
    """
    too_long = [i for i, length in enumerate(lengths) if length > row_tokens]
    if too_long:
        raise ValueError(f"sequence {too_long[0]} has {lengths[too_long[0]]} tokens, a row holds {row_tokens}")
    if not packing:
        return [[index] for index in range(len(lengths))]
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((row for row, space in enumerate(free) if lengths[index] <= space), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[row].append(index)
        free[row] -= lengths[index]
    return rows


def pack(
    samples: Sequence[Sample], layout: Sequence[Sequence[int]], rows: int, row_tokens: int, names: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Packs samples into `rows` rows.

    Args:
        samples: the sequences.
        layout: indices of the samples in each row, as `assign_rows` gives them.
        rows: B, rows of the result; those beyond the layout are padding.
        row_tokens: S.
        names: which `per_token` arrays to pack.

    Returns:
        arrays [B, S]: `tokens`, `targets`, `positions`, `segment_ids` (0 = padding) as int32; `mask` (1 where the target
        is a response token) and `names` as float32.

    Raises:
        ValueError: the layout has more rows, or a sample has no prompt (nothing would predict its first response token).
    """
    if len(layout) > rows:
        raise ValueError(f"{len(samples)} sequences need {len(layout)} rows of {row_tokens} tokens, there are {rows}")
    arrays = {name: np.zeros((rows, row_tokens), np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    arrays |= {name: np.zeros((rows, row_tokens), np.float32) for name in ("mask", *names)}
    for row, members in enumerate(layout):
        start = 0
        for segment, index in enumerate(members, start=1):
            sample = samples[index]
            end, prompt_tokens = start + sample.tokens, len(sample.prompt_ids)
            if not prompt_tokens:
                raise ValueError(f"sequence {index} has no prompt: nothing would predict its first response token")
            ids = np.concatenate([sample.prompt_ids, sample.response_ids])
            arrays["tokens"][row, start:end] = ids
            arrays["targets"][row, start : end - 1] = ids[1:]
            arrays["positions"][row, start:end] = np.arange(sample.tokens)
            arrays["segment_ids"][row, start:end] = segment
            response = slice(start + prompt_tokens - 1, end - 1)
            arrays["mask"][row, response] = 1.0
            for name in names:
                arrays[name][row, response] = sample.per_token[name]
            start = end
    return arrays
