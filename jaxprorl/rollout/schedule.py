"""Which sample decodes in which slot: continuous batching, as plain bookkeeping on the host.

A slot that becomes free takes the next sample at once: of a prompt that is in the cache already, else of the next prompt in line, which
is then to be prefilled. What is drawn does not depend on any of this.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxprorl.rollout.cache import Layout
from jaxprorl.types import Prompt


@dataclass
class Running:
    """A sample in a slot, with what it has so far. `entry` is its prompt's place in the shard's cache; `limit` its most tokens."""

    prompt: Prompt
    sample: int
    entry: int
    limit: int
    made: int = 0
    token_ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class Prefill:
    """A prompt that goes into an entry of a shard's cache."""

    prompt: Prompt
    shard: int
    entry: int


@dataclass
class _Shard:
    free_slots: list[int]
    free_entries: list[int]
    open: deque[Running] = field(default_factory=deque)  # samples of prompts in the cache, not started
    left: dict[int, int] = field(default_factory=dict)  # entry -> samples that have not ended


class Schedule:
    """The samples of one `generate` call."""

    def __init__(self, layout: Layout, prompts: Sequence[Prompt], limit: Callable[[int, int], int]):
        """`limit(prompt_id, sample)` is the most tokens of a sample."""
        self.layout, self._limit = layout, limit
        self._waiting = deque(prompts)
        self.running: dict[int, Running] = {}  # by slot, counted over all shards
        self._shards = [_Shard(list(range(layout.slots)), list(range(layout.entries))) for _ in range(layout.shards)]

    @property
    def unfinished(self) -> bool:
        """Whether some sample has not ended."""
        return bool(self.running or self._waiting or any(shard.open for shard in self._shards))

    def admit(self) -> tuple[list[Prefill], list[int]]:
        """Fills free slots. Returns the prompts to prefill, and the slots whose sample is new."""
        prefills: list[Prefill] = []
        started: list[int] = []
        while True:
            able = [number for number, shard in enumerate(self._shards) if shard.free_slots and (shard.open or self._can_open(shard))]
            if not able:
                return prefills, started
            number = max(able, key=lambda number: (len(self._shards[number].free_slots) - len(self._shards[number].open), -number))
            shard = self._shards[number]
            if not shard.open:
                prefills.append(self._open(number))
            slot = number * self.layout.slots + heapq.heappop(shard.free_slots)
            self.running[slot] = shard.open.popleft()
            started.append(slot)

    def _can_open(self, shard: _Shard) -> bool:
        return bool(self._waiting and shard.free_entries)

    def _open(self, number: int) -> Prefill:
        """The next prompt takes the lowest free entry, so that few banks are in use."""
        shard, prompt = self._shards[number], self._waiting.popleft()
        entry = heapq.heappop(shard.free_entries)
        samples = range(self.layout.samples)
        shard.open.extend(Running(prompt, sample, entry, self._limit(prompt.prompt_id, sample)) for sample in samples)
        shard.left[entry] = self.layout.samples
        return Prefill(prompt, number, entry)

    def end(self, slot: int) -> Running:
        """The sample of a slot has ended: the slot is free, and the prompt's entry with its last sample."""
        running = self.running.pop(slot)
        number, row = divmod(slot, self.layout.slots)
        shard = self._shards[number]
        heapq.heappush(shard.free_slots, row)
        shard.left[running.entry] -= 1
        if not shard.left[running.entry]:
            del shard.left[running.entry]
            heapq.heappush(shard.free_entries, running.entry)
        return running

    def reach(self, steps: int) -> np.ndarray:
        """Columns in use in each shard, int32 [shards, banks + 1]: of the prompts of each bank, and of responses after `steps` more."""
        layout = self.layout
        reach = np.zeros((layout.shards, layout.banks + 1), np.int32)
        for slot, running in self.running.items():
            shard, bank = slot // layout.slots, running.entry // layout.bank_entries
            reach[shard, bank] = max(reach[shard, bank], len(running.prompt.token_ids))
            reach[shard, -1] = max(reach[shard, -1], min(running.made + steps, running.limit))
        return reach
