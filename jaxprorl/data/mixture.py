"""The order of training prompts, as a pure function: position -> prompt. The only state is integers: the stage, and what was consumed."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from jaxprorl.types import Prompt


def prompt_index(seed: int, position: int, size: int, stage: int = 0) -> int:
    """Index of the prompt at `position` of the endless stream of a stage over `size` prompts.

    Every epoch (`size` consecutive positions) is a permutation that depends on (seed, stage, epoch, size) alone.

    Raises:
        ValueError: a negative seed, position or stage, or no prompts.
    """
    if size < 1 or min(position, seed, stage) < 0:
        raise ValueError(f"need size >= 1 and the rest >= 0, got size={size}, position={position}, seed={seed}, stage={stage}")
    return int(_permutation(seed, stage, position // size, size)[position % size])


def draw(prompts: Sequence[Prompt], seed: int, start: int, count: int) -> tuple[Prompt, ...]:
    """The `count` prompts at positions start, start + 1, ..."""
    return tuple(prompts[prompt_index(seed, position, len(prompts))] for position in range(start, start + count))


@lru_cache(maxsize=4)
def _permutation(seed: int, stage: int, epoch: int, size: int) -> np.ndarray:
    # Ranks of raw Philox words: numpy promises that bit streams stay the same over versions, not that `permutation` does.
    words = np.random.Philox(np.random.SeedSequence([seed, epoch, *([stage] if stage else [])])).random_raw(size)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order
