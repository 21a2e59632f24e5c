"""Sequences into rows of fixed length, rows into micro-batches: the static shapes that training compiles for.

Position s of a row predicts the token at s + 1 of the same sequence, so everything that belongs to a response token
(mask, advantage, log-probs) sits one place to its left.

A row may hold a prompt once for all of its group's samples in that row. It then stands right before them and without its last token:
that begins every sample, since what comes next differs between them.
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
        per_token: [response_tokens] arrays by name, packed beside the tokens.
        group: samples of the same number have the same prompt.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    per_token: dict[str, np.ndarray] = field(default_factory=dict)
    group: int = 0

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


def assign_shared_rows(samples: Sequence[Sample], row_tokens: int) -> list[list[int]]:
    """Indices of the samples in each row, a group's next to each other, its prompt counting once per row.

    Groups are placed one after the other, those of most tokens first, their samples longest first: where the prompt is already, else
    in the first row with room for both, else in a new one. Depends on lengths, groups and order alone.

    Raises:
        ValueError: a sample is longer than a row.
    """
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
        if sample.tokens > row_tokens:
            raise ValueError(f"sequence {index} has {sample.tokens} tokens, a row holds {row_tokens}")
    rows: list[list[int]] = []
    free = np.zeros(len(samples), np.int64)  # of each row
    for members in sorted(groups.values(), key=lambda members: -sum(samples[i].tokens for i in members)):
        prompt = len(samples[members[0]].prompt_ids) - 1
        needs = np.full(len(samples), prompt)  # of a row for this prompt: nothing where it is already
        for index in sorted(members, key=lambda i: -samples[i].tokens):
            own = samples[index].tokens - prompt
            fits = free[: len(rows)] >= own + needs[: len(rows)]
            row = next((int(np.argmax(kind)) for kind in (fits & (needs[: len(rows)] == 0), fits) if kind.any()), len(rows))
            if row == len(rows):
                rows.append([])
                free[row] = row_tokens
            rows[row].append(index)
            free[row] -= own + needs[row]
            needs[row] = 0
    return rows


def most_rows(groups: int, samples: int, prompt_tokens: int, response_tokens: int, row_tokens: int, shared: bool) -> int:
    """Rows that `assign_shared_rows` or `assign_rows` need at most for `groups` prompts of `samples` samples each.

    Lengths are the longest. A sample opens a row only if it fits into no other. Shared: all rows that its group has opened are full
    then, and each began with the prompt and as many samples as always fit. Else every row but the last has as many as always fit.
    """
    if shared:
        return groups * -(-samples // ((row_tokens - prompt_tokens + 1) // (response_tokens + 1)))
    return -(-groups * samples // (row_tokens // (prompt_tokens + response_tokens)))


def pack(
    samples: Sequence[Sample],
    layout: Sequence[Sequence[int]],
    rows: int,
    row_tokens: int,
    names: Sequence[str] = (),
    shared: bool = False,
) -> dict[str, np.ndarray]:
    """Packs samples into `rows` rows.

    Args:
        samples: the sequences.
        layout: indices of the samples in each row, as `assign_rows` or, if shared, `assign_shared_rows` gives them.
        rows: B, rows of the result; those beyond the layout are padding.
        row_tokens: S.
        names: which `per_token` arrays to pack, as float32.
        shared: a prompt is there once per row.

    Returns:
        arrays [B, S]: `tokens`, `targets`, `positions`, `segment_ids` (0 = padding) as int32; `mask` (1 where the target
        is a response token) and `names` as float32. If shared also `context_ids`: at the tokens of a sample the segment of its prompt,
        which they read beside their own; 0 elsewhere.

    Raises:
        ValueError: the layout has more rows, or a sample has no prompt (nothing would predict its first response token).
    """
    if len(layout) > rows:
        raise ValueError(f"{len(samples)} sequences need {len(layout)} rows of {row_tokens} tokens, there are {rows}")
    whole = ("tokens", "targets", "positions", "segment_ids", *(("context_ids",) if shared else ()))
    arrays = {name: np.zeros((rows, row_tokens), np.int32) for name in whole}
    arrays |= {name: np.zeros((rows, row_tokens), np.float32) for name in ("mask", *names)}
    for row, members in enumerate(layout):
        start, segment, context, group = 0, 0, 0, None
        for index in members:
            sample = samples[index]
            if not len(sample.prompt_ids):
                raise ValueError(f"sequence {index} has no prompt: nothing would predict its first response token")
            ids, before = np.concatenate([sample.prompt_ids, sample.response_ids]), 0  # before: tokens that its context holds
            if shared:
                before = len(sample.prompt_ids) - 1
                if sample.group != group:
                    segment, group = segment + 1, sample.group
                    context, end = segment, start + before
                    arrays["tokens"][row, start:end] = ids[:before]
                    arrays["positions"][row, start:end] = np.arange(before)
                    arrays["segment_ids"][row, start:end] = segment
                    start = end
                arrays["context_ids"][row, start : start + sample.tokens - before] = context
            segment, end = segment + 1, start + sample.tokens - before
            arrays["tokens"][row, start:end] = ids[before:]
            arrays["targets"][row, start : end - 1] = ids[before + 1 :]
            arrays["positions"][row, start:end] = np.arange(before, sample.tokens)
            arrays["segment_ids"][row, start:end] = segment
            response = slice(end - 1 - len(sample.response_ids), end - 1)
            arrays["mask"][row, response] = 1.0
            for name in names:
                arrays[name][row, response] = sample.per_token[name]
            start = end
    return arrays
