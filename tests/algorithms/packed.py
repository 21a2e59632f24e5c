"""Random packed rows for tests: several sequences per row, prompts between them, padding at the end."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rows:
    """Rows [B, S] and, for each sequence, the row and the columns of its response tokens."""

    segment_ids_BS: np.ndarray
    mask_BS: np.ndarray
    responses: list[tuple[int, list[int]]]

    def numbers(self, random: np.random.RandomState, scale: float = 1.0) -> np.ndarray:
        return scale * random.standard_normal(self.mask_BS.shape)


def random_rows(seed: int, rows: int = 3, row_tokens: int = 40, longest: int = 12) -> Rows:
    random = np.random.RandomState(seed)
    segment_ids_BS, mask_BS = np.zeros((rows, row_tokens), np.int32), np.zeros((rows, row_tokens), np.float32)
    responses = []
    for row in range(rows):
        start, segment = 0, 1
        while True:
            prompt, response = random.randint(1, 5), random.randint(1, longest + 1)
            end = start + prompt + response
            if end > row_tokens or random.uniform() < 0.1:
                break
            segment_ids_BS[row, start:end] = segment
            columns = list(range(start + prompt - 1, end - 1))  # position s predicts the token at s + 1
            mask_BS[row, columns] = 1
            responses.append((row, columns))
            start, segment = end, segment + 1
    return Rows(segment_ids_BS, mask_BS, responses)
