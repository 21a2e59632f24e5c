"""The smallest ablations of the tiny run: resets with one arm that cannot start, or two strategies. Also an ablation file of its own."""

from pathlib import Path

from ml_collections import ConfigDict

from configs.ablations import base

EXPERIMENT = Path(__file__).resolve().parents[1] / "tiny_run.py"
REWARD = "tiny_run:brevity"
BUDGET = 6000  # about four steps


def get_config(kind: str = "resets") -> ConfigDict:
    """`resets`: never against after every step; `strategies`: dp against fsdp on two devices."""
    c = base.get_config()
    c.name = kind
    c.experiment = str(EXPERIMENT)
    c.fields = ("steps=50", "checkpoint.every_steps=1", "validation.every_steps=2", "resets.every_steps=0", f"evaluation.reward={REWARD}")
    c.arms.never = ()
    if kind == "resets":
        c.arms.often = ("resets.every_steps=1", "resets.optimizer=none")
        c.arms.broken = ("mesh.strategy=tp",)  # the model has one head
        c.control = "never"
        c.seeds = (0, 1)
        c.metric = "held_out.mean_score"  # the tiny model solves nothing, but is more or less brief
        c.budget.size = BUDGET
        c.paired_sd = 0.1
    else:
        c.arms.fsdp = ("mesh.strategy=fsdp",)
        c.seeds = (0,)
        c.question = "speed"
        c.budget.kind = "steps"
        c.budget.size = 3
    return c
