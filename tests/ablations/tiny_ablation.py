"""The smallest ablation: two arms and two seeds of the tiny run, from one start model."""

from ml_collections import ConfigDict

from configs.ablations import base


def get_config(kind: str = "resets") -> ConfigDict:
    """`resets`: never against after every step. `strategies`: dp against fsdp on two devices."""
    c = base.get_config()
    c.name = kind
    c.experiment = "tests/tiny_run.py"
    c.fields = ("checkpoint.every_steps=1", "validation.every_steps=2", "steps=20", "resets.every_steps=0")
    c.seeds = (0, 1)
    if kind == "resets":
        c.arms.never = ()
        c.arms.often = ("resets.every_steps=1",)
        c.control = "never"
        c.metric = "held_out.mean_score"  # the tiny model solves nothing
        c.budget.size = 6000
        c.paired_sd = 0.1
    else:
        c.arms.dp = ()
        c.arms.fsdp = ("mesh.strategy=fsdp",)
        c.arms.tp = ("mesh.strategy=tp",)
        c.seeds = (0,)
        c.question = "speed"
        c.budget.kind = "steps"
        c.budget.size = 3
    return c
