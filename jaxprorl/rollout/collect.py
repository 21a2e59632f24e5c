"""One rollout batch: draw, sample, grade, drop groups without spread, refill, until the batch is full or the cap is reached.

A batch is the first K kept groups in prompt order. Nothing depends on which completion or grade came first.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from ml_collections import ConfigDict

from jaxprorl.algorithms.filtering import has_spread
from jaxprorl.data.mixture import prompt_index
from jaxprorl.rewards.pool import GraderPool
from jaxprorl.rollout.engine import Engine, Sampling
from jaxprorl.types import Completion, Group, Prompt


@dataclass
class RolloutBatch:
    """What one step sampled.

    Attributes:
        groups: every drawn group, in prompt order.
        kept: for each of them, whether it is trained on; at most `batch.prompts` are.
        has_spread: for each of them, whether it carries a signal; `has_spread & ~kept` is surplus.
        refills: prompts drawn in each refill round.
        first_position: position of the first drawn prompt in the prompt order.
        positions: places of the prompt order used up.
        rollout_s: seconds from the end of the last update to the last score.
        grading_wait_s: of those, waiting for graders while the engine was idle.
    """

    groups: list[Group] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    has_spread: list[bool] = field(default_factory=list)
    refills: list[int] = field(default_factory=list)
    first_position: int = 0
    positions: int = 0
    rollout_s: float = 0.0
    grading_wait_s: float = 0.0

    @property
    def trained(self) -> list[Group]:
        """The groups of the batch."""
        return [group for group, kept in zip(self.groups, self.kept, strict=True) if kept]


class Rollout:
    """A rollout under way: made, it has dispatched the first decode steps; `finish` blocks for the batch."""

    def __init__(self, config: ConfigDict, engine: Engine, graders: GraderPool, prompts: tuple[Prompt, ...], position: int, step: int):
        self._config, self._engine, self._graders, self._prompts = config, engine, graders, prompts
        self._sampling = Sampling(config.rollout.samples_per_prompt, config.rollout.temperature, config.seed, step)
        self._batch = RolloutBatch(first_position=position)
        self._drawn, self._stream = self._draw(config.batch.prompts)

    def _draw(self, count: int) -> tuple[list[Prompt], Iterator[Completion]]:
        """The next `count` prompts in order, and their completions, already being sampled.

        A prompt that is in the step already (its epoch ended just now, or there are few) is passed over: its draws would be the same.
        """
        seen = {group.prompt.prompt_id for group in self._batch.groups}
        drawn: list[Prompt] = []
        while len(drawn) < count and len(seen) < len(self._prompts):
            position = self._batch.first_position + self._batch.positions
            prompt = self._prompts[prompt_index(self._config.seed, position, len(self._prompts))]
            self._batch.positions += 1
            if prompt.prompt_id not in seen:
                seen.add(prompt.prompt_id)
                drawn.append(prompt)
        return drawn, self._engine.generate(drawn, self._sampling)

    def finish(self) -> RolloutBatch:
        """Waits for the completions, and refills while groups are missing and the cap allows."""
        started_s = time.perf_counter()
        batch, wanted = self._batch, self._config.batch.prompts
        cap = int(wanted * self._config.batch.max_drawn_factor)
        while True:
            self._take()
            missing = wanted - sum(batch.has_spread)
            refill = min(self._config.batch.refill_prompts, cap - len(batch.groups), len(self._prompts) - len(batch.groups))
            if missing <= 0 or refill <= 0:
                break
            batch.refills.append(refill)
            self._drawn, self._stream = self._draw(refill)
        rank = np.cumsum(batch.has_spread)
        batch.kept = [bool(spread and place <= wanted) for spread, place in zip(batch.has_spread, rank, strict=True)]
        batch.rollout_s = time.perf_counter() - started_s
        return batch

    def _take(self) -> None:
        """Grades completions as they end, then forms the groups of this draw."""
        by_id = {prompt.prompt_id: prompt for prompt in self._drawn}
        completions: dict[tuple[int, int], Completion] = {}
        for completion in self._stream:
            completions[completion.prompt_id, completion.sample] = completion
            self._graders.submit(by_id[completion.prompt_id], [completion])
        waited_s = time.perf_counter()
        scores = self._graders.collect()
        self._batch.grading_wait_s += time.perf_counter() - waited_s
        samples = range(self._sampling.samples)
        for prompt in self._drawn:
            keys = [(prompt.prompt_id, sample) for sample in samples]
            group = Group(prompt, tuple(completions[key] for key in keys), tuple(scores[key] for key in keys))
            self._batch.groups.append(group)
            self._batch.has_spread.append(bool(has_spread(*rewards([group]), self._config.algorithm.zero_spread_tolerance)[0]))


def rewards(groups: list[Group]) -> tuple[np.ndarray, np.ndarray]:
    """reward_PN and mask_PN (0 where the grader failed) of groups of the same size."""
    reward_PN = np.array([[score.value for score in group.scores] for group in groups], np.float64)
    mask_PN = np.array([[score.outcome == "scored" for score in group.scores] for group in groups], np.float64)
    return reward_PN, mask_PN
