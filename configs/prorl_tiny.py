"""The eight stages of ProRL (configs/prorl_1p5b.py) on two CPU cores, with the quickstart's model and puzzles.

    python launch/train.py --config=configs/prorl_tiny.py

It shows what a recipe of stages does, not what ProRL reaches: every stage is some ten steps long. One run took 628 s on two cores that
other work shared, and went from 29.8 (an earlier warm start) to 89.4 % of held-out items, most of it in the first stage (docs/stages.md).
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import quickstart
from configs.base import stage

THREE_TASKS = ("chain_sum", "spell_backward", "number_filtering")


def begun_by_a_reset(name: str, steps: int, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A stage that begins with a reset of reference and optimizer."""
    return stage(name, steps, changes, reset_reference=True, reset_optimizer="all")


def get_config() -> ConfigDict:
    """The quickstart in eight stages, each what the run of its number is in prorl_1p5b.py."""
    c = quickstart.get_config()
    c.run_name = "prorl_tiny"
    c.validation.every_steps = 5
    c.resets.every_steps = 0  # at the boundaries of stages, and there alone
    c.stages = (
        stage("run 1", 20, {"data.mix": THREE_TASKS}),
        begun_by_a_reset("run 2", 15),
        begun_by_a_reset("run 3", 15, {"data.mix": (*THREE_TASKS, "complex_arithmetic")}),
        begun_by_a_reset("run 4", 10, {"shaping.stopping": "non_termination"}),
        begun_by_a_reset("run 5", 10),
        begun_by_a_reset("run 6", 10, {"rollout.samples_per_prompt": 16}),
        begun_by_a_reset("run 7", 10),
        begun_by_a_reset("run 8", 10, {"rollout.samples_per_prompt": 8, "rollout.max_response_tokens": 96, "batch.row_tokens": 120}),
    )
    c.steps = sum(row["steps"] for row in c.stages)
    return c
