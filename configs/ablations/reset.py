"""Is it the reference or the optimizer that a reset should take? No publication separates the two (docs/resets.md); this does, at toy size.

    python launch/ablate.py --config configs/ablations/reset.py           # 32 runs, about two hours of two CPU cores
    python launch/ablate.py --config configs/ablations/reset.py:small     # 8 short runs, to see how it works; far too few for an answer

Four arms on the quickstart, every combination of the two: never, the reference alone (ProRL v2), the optimizer alone, both (v1). All six
pairs are compared, since the question is in those between the arms that reset as much as in those with the arm that does not.

The time is computed: three quickstarts took 1.3 to 2.1 s a step and 12,700 sampled tokens in each, 20 to 40 s around them, and 140 to 180 s
for the start model. So a run of 80 steps takes 2 to 3.5 minutes, 32 of them and 8 start models 1.4 to 2.3 hours.
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
        "resets.every_steps=10",  # seven times in a run: once, as in the quickstart, would be felt little
        "resets.manual=False",
        "optimizer.learning_rate=1e-4",  # a third of the quickstart's, whose validation is flat after twenty steps
        # A reset of "all" would begin the warm-up again, and the arms that have it would train a fifth of their updates at a lower rate.
        # Without a warm-up, at a constant rate, "all" and "moments_and_bias" are the same thing, so that one arm stands for both.
        "optimizer.warmup_updates=0",
        # The quickstart reaches a KL of 0.07 nats per token, a log-ratio of about sqrt(2 x 0.07) = 0.37; times this it pulls with 0.07
        # of a unit advantage. The papers' 1e-4 would not be felt in eighty steps, and a reset of the reference would be no arm at all.
        "algorithm.kl_coefficient=0.2",
    )
    c.arms.never = ("resets.every_steps=0",)
    c.arms.reference = ("resets.reference=True", "resets.optimizer=none")
    c.arms.optimizer = ("resets.reference=False", "resets.optimizer=all")
    c.arms.reference_and_optimizer = ("resets.reference=True", "resets.optimizer=all")
    c.seeds = tuple(range(8))
    c.budget.size = 1_000_000  # about eighty steps
    # The quickstart's three seeds end at 90.0, 87.8 and 91.8 %: a standard deviation of 2.0 points, of a difference of two at most 2.8
    # (less, where seeds go up and down together). Seeds include the start model, which is most of it. Six comparisons over eight seeds
    # then find a difference of 4.6 points.
    c.paired_sd = 0.028
    if size == "small":
        c.seeds = (0, 1)
        c.budget.size = 60_000
        c.fields = (*c.fields, "resets.every_steps=2", "data.held_out_per_task=100", "validation.every_steps=3")
    return c
