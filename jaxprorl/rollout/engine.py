"""What a rollout engine is: weights in, prompts in, completions out one by one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ml_collections import ConfigDict

from jaxprorl.types import Completion, Prompt


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        samples: n completions per prompt.
        temperature: logits are divided by it; 0 = greedy (log-probs are then taken at temperature 1).
        seed: together with (step, prompt_id, sample, position) it decides every draw; nothing else does.
        step: RL step, or any number that tells two passes over the same prompts apart.
        top_k: only so many of the likeliest tokens are drawn; 0 = all. Log-probs are then those of what is left. Evaluation only.
        top_p: of those only the fewest that hold this share of the mass. Evaluation only.
    """

    samples: int
    temperature: float
    seed: int
    step: int
    top_k: int = 0
    top_p: float = 1.0

    @property
    def truncated(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1.0


def exam_sampling(config: ConfigDict) -> Sampling:
    """How `config.evaluation` samples."""
    c = config.evaluation
    return Sampling(1, c.temperature, c.seed, step=0, top_k=c.top_k, top_p=c.top_p)


def merge_swaps(swaps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the swaps of several engines, one after the other, took together: the largest of what is a worst case, else the sum."""
    worst = ("probe_nats", "probe_mean_nats", "time_load_s")
    names = dict.fromkeys(name for swap in swaps for name in swap)
    return {name: (max if name in worst else sum)(swap[name] for swap in swaps if name in swap) for name in names}


class Engine(Protocol):
    """Generates completions with the weights of the last swap."""

    def compile(self, params: Any, samples: Sequence[int]) -> Mapping[str, Any]:
        """Compiles everything that the loop will call, for these group sizes. `params` may be shapes with shardings.

        Returns:
            What there is to tell of it, for the event log.
        """

    def set_weights(self, params: Any, version: int) -> Mapping[str, float]:
        """Swaps the policy. Not while a `generate` iterator is unfinished, unless the engine says otherwise.

        Returns:
            What the swap took, for the event log; names of seconds start with `time_`.
        """

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Completion]:
        """Starts at once and yields every completion as it ends, in no particular order.

        The first decode steps are dispatched before the iterator is first advanced.
        """

    def statistics(self) -> Mapping[str, float]:
        """Numbers about what was generated since this was last asked, by the names that follow `rollout.` in the metrics."""

    def close(self) -> None:
        """Frees what the engine holds beside memory of this process."""
