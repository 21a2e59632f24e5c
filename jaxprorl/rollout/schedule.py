"""Which sample decodes in which slot: continuous batching, as plain bookkeeping on the host.

A slot that becomes free takes the next sample at once: of a prompt that is in the cache already, else of the next prompt in line, which
is then to be prefilled. When no prompt is left in line, a shard with free slots takes samples that wait for slots of another one, and
prefills their prompt too. What is drawn does not depend on any of this.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
    held: dict[int, int] = field(default_factory=dict)  # prompt_id -> entry

    @property
    def has_room(self) -> bool:
        """Whether a prompt can come into the cache: in a free entry, or in one that is kept without being read."""
        return bool(self.free_entries) or not all(self.left.values())

    @property
    def too_many(self) -> int:
        """Samples that wait until another one of this shard has ended."""
        return max(0, len(self.open) - len(self.free_slots))

    def take_entry(self, prompt: Prompt) -> int:
        """The lowest free entry, so that few banks are in use; without any, the first that is only kept."""
        if not self.free_entries:
            self._free(next(entry for entry, left in self.left.items() if not left))
        entry = self.held[prompt.prompt_id] = heapq.heappop(self.free_entries)
        return entry

    def leave(self, running: Running, keep: bool) -> None:
        """A sample no longer reads its entry, which is free with the last one, or kept for samples that may still come."""
        self.left[running.entry] -= 1
        if not self.left[running.entry] and not keep:
            self._free(running.entry)

    def _free(self, entry: int) -> None:
        del self.left[entry]
        self.held = {prompt_id: held for prompt_id, held in self.held.items() if held != entry}
        heapq.heappush(self.free_entries, entry)


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
            able = [
                number
                for number, shard in enumerate(self._shards)
                if shard.free_slots and (shard.open or self._can_open(shard) or self._donor(shard))
            ]
            if not able:
                return prefills, started
            number = max(able, key=lambda number: (len(self._shards[number].free_slots) - len(self._shards[number].open), -number))
            shard = self._shards[number]
            if not shard.open:
                prefills += self._open(number) if self._waiting else self._share(number)
            slot = number * self.layout.slots + heapq.heappop(shard.free_slots)
            self.running[slot] = shard.open.popleft()
            started.append(slot)

    def _can_open(self, shard: _Shard) -> bool:
        return bool(self._waiting and shard.has_room)

    def _open(self, number: int) -> list[Prefill]:
        """All samples of the next prompt."""
        shard, prompt = self._shards[number], self._waiting.popleft()
        entry = shard.take_entry(prompt)
        samples = range(self.layout.samples)
        shard.open.extend(Running(prompt, sample, entry, self._limit(prompt.prompt_id, sample)) for sample in samples)
        shard.left[entry] = self.layout.samples
        return [Prefill(prompt, number, entry)]

    def _donor(self, shard: _Shard) -> _Shard | None:
        """Of the shards whose last prompt this one holds or has room for, that with the most samples too many."""
        if self._waiting:
            return None
        donors = [other for other in self._shards if other.too_many and (shard.has_room or other.open[-1].prompt.prompt_id in shard.held)]
        return max(donors, key=lambda other: other.too_many, default=None)

    def _share(self, number: int) -> list[Prefill]:
        """As many of the donor's last samples, all of one prompt, as it has too many and find a free slot here."""
        shard = self._shards[number]
        donor = self._donor(shard)
        assert donor is not None
        prompt, most = donor.open[-1].prompt, min(donor.too_many, len(shard.free_slots))
        taken: list[Running] = []
        while len(taken) < most and donor.open[-1].prompt is prompt:
            taken.append(donor.open.pop())
            donor.leave(taken[-1], keep=False)
        new = prompt.prompt_id not in shard.held
        entry = shard.take_entry(prompt) if new else shard.held[prompt.prompt_id]
        shard.left[entry] = shard.left.get(entry, 0) + len(taken)
        shard.open.extend(replace(running, entry=entry) for running in reversed(taken))
        return [Prefill(prompt, number, entry)] * new

    def end(self, slot: int) -> Running:
        """The sample of a slot has ended: the slot is free, and the prompt's entry with its last sample."""
        running = self.running.pop(slot)
        number, row = divmod(slot, self.layout.slots)
        shard = self._shards[number]
        heapq.heappush(shard.free_slots, row)
        waits = any(other.prompt is running.prompt for each in self._shards if each is not shard for other in each.open)
        shard.leave(running, keep=waits)
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
