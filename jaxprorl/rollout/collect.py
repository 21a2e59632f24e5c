"""One rollout batch: draw, sample, grade, drop groups without a signal, refill, until the batch is full or the cap is reached.

A batch is the first K groups with a signal in prompt order, those left over from earlier steps first. Nothing depends on which
completion or grade came first.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from ml_collections import ConfigDict

from jaxprorl.data.mixture import prompt_index
from jaxprorl.rewards.pool import GraderPool
from jaxprorl.rollout.engine import Engine, Sampling
from jaxprorl.rollout.groups import has_signal
from jaxprorl.rollout.surplus import staleness
from jaxprorl.types import Completion, Group, Prompt


@dataclass
class RolloutBatch:
    """What one step sampled.

    Attributes:
        groups: every drawn group, in prompt order.
        kept: for each of them, whether it is trained on.
        has_signal: for each of them, whether dynamic sampling keeps it; `has_signal & ~kept` is surplus.
        carried: surplus of earlier steps that this one trains on.
        surplus: groups with a signal that the next step may still train on within `rollout.max_staleness`.
        expired: surplus of earlier steps that became too old, or had no room again.
        refills: prompts drawn in each refill round.
        first_position: position of the first drawn prompt in the prompt order.
        positions: places of the prompt order used up.
        rollout_s: seconds from the end of the last update to the last score.
        grading_wait_s: of those, waiting for graders while the engine was idle.
        engine: what the engine tells of itself, by the names that follow `rollout.` in the metrics.
    """

    groups: list[Group] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    has_signal: list[bool] = field(default_factory=list)
    carried: list[Group] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    expired: list[Group] = field(default_factory=list)
    refills: list[int] = field(default_factory=list)
    first_position: int = 0
    positions: int = 0
    rollout_s: float = 0.0
    grading_wait_s: float = 0.0
    engine: Mapping[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> list[Group]:
        """The groups of the batch."""
        return self.carried + [group for group, kept in zip(self.groups, self.kept, strict=True) if kept]


class Rollout:
    """A rollout under way: made, it has dispatched the first decode steps; `finish` blocks for the batch."""

    def __init__(
        self,
        config: ConfigDict,
        engine: Engine,
        graders: GraderPool,
        prompts: tuple[Prompt, ...],
        position: int,
        step: int,
        surplus: Sequence[Group] = (),
        policy_version: int = 0,
        stage: int = 0,
    ):
        """`position` is that in the order of `stage`; `surplus` is that of the last step, `policy_version` the engine's."""
        self._config, self._engine, self._graders, self._prompts = config, engine, graders, prompts
        self._version, self._stage = policy_version, stage
        self._sampling = Sampling(config.rollout.samples_per_prompt, config.rollout.temperature, config.seed, step)
        self._batch = RolloutBatch(first_position=position)
        self._seen = {group.prompt.prompt_id for group in surplus}  # ids of the prompts in this step
        self._left = list(surplus[config.batch.prompts :])
        self._batch.carried = list(surplus[: config.batch.prompts])
        engine.statistics()  # what came before, as an evaluation, is not this rollout's
        self._drawn, self._stream = self._draw(config.batch.prompts - len(self._batch.carried))

    def _draw(self, count: int) -> tuple[list[Prompt], Iterator[Completion]]:
        """The next `count` prompts in order, and their completions, already being sampled.

        A prompt that is in the step already (its epoch ended just now, or there are few) is passed over: its draws would be the same.
        """
        batch = self._batch
        drawn: list[Prompt] = []
        while len(drawn) < count and len(self._seen) < len(self._prompts):
            position = batch.first_position + batch.positions
            prompt = self._prompts[prompt_index(self._config.seed, position, len(self._prompts), self._stage)]
            batch.positions += 1
            if prompt.prompt_id not in self._seen:
                self._seen.add(prompt.prompt_id)
                drawn.append(prompt)
        return drawn, self._engine.generate(drawn, self._sampling)

    def finish(self) -> RolloutBatch:
        """Waits for the completions, and refills while groups are missing and the cap allows."""
        started_s = time.perf_counter()
        batch, wanted = self._batch, self._config.batch.prompts - len(self._batch.carried)
        cap = int(self._config.batch.prompts * self._config.batch.max_drawn_factor)
        while True:
            self._take()
            missing = wanted - sum(batch.has_signal)
            refill = min(self._config.batch.refill_prompts, cap - len(batch.groups), len(self._prompts) - len(self._seen))
            if missing <= 0 or refill <= 0:
                break
            batch.refills.append(refill)
            self._drawn, self._stream = self._draw(refill)
        rank = np.cumsum(batch.has_signal)
        batch.kept = [bool(signal and place <= wanted) for signal, place in zip(batch.has_signal, rank, strict=True)]
        drawn = [g for g, signal, kept in zip(batch.groups, batch.has_signal, batch.kept, strict=True) if signal and not kept]
        # The next step's weights are one version further.
        fresh = [staleness(group, self._version + 1) <= self._config.rollout.max_staleness for group in self._left + drawn]
        batch.surplus = [group for group, keep in zip(self._left + drawn, fresh, strict=True) if keep]
        batch.expired = [group for group, keep in zip(self._left, fresh, strict=False) if not keep]
        batch.engine = self._engine.statistics()
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
            self._batch.has_signal.append(has_signal(self._config, group))
