"""Is it the reference or the optimizer that a reset should take? No publication separates the two (docs/resets.md); this does, at toy size.

    python launch/ablate.py --config configs/ablations/reset.py           # 32 runs
    python launch/ablate.py --config configs/ablations/reset.py:small     # 8 short runs, to see how it works; far too few for an answer

Four arms on the quickstart: no resets, resets of the reference alone (ProRL v2), with the moments, with the whole optimizer (v1).
"""

from ml_collections import ConfigDict

from configs.ablations import base


def get_config(size: str = "full") -> ConfigDict:
    """`size`: "full" or "small"."""
    c = base.get_config()
    c.name = "reset" if size == "full" else f"reset_{size}"
    c.experiment = "configs/quickstart.py"
    c.fields = (
        "steps=1000",  # beyond the budget
        "resets.every_steps=20",  # five times in a run: once, as in the quickstart, would be felt little
        "resets.manual=False",
        # The papers' 1e-4 pulls over thousands of steps. In a hundred it is not felt, and a reset of the reference would be no arm at all.
        "algorithm.kl_coefficient=0.02",
    )
    c.arms.never = ("resets.every_steps=0",)
    c.arms.reference = ("resets.optimizer=none",)
    c.arms.reference_moments = ("resets.optimizer=moments",)
    c.arms.reference_all = ("resets.optimizer=all",)
    c.control = "never"
    c.seeds = tuple(range(8))
    c.budget.size = 1_000_000  # about a hundred steps
    # The quickstart's three seeds end at 90.0, 87.8 and 91.8 %: a standard deviation of 2.0 points, of a difference of two at most 2.8
    # (less, where seeds go up and down together). Seeds include the start model, which is most of it.
    c.paired_sd = 0.028
    if size == "small":
        c.seeds = (0, 1)
        c.budget.size = 60_000
        c.fields = (*c.fields, "resets.every_steps=2", "data.held_out_per_task=100", "validation.every_steps=3")
    return c
