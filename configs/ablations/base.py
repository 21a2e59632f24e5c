"""Every field of an ablation, with its unit and why it is there (docs/ablations.md). An ablation edits a copy of this."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The base ablation (unlocked, so that an ablation's file can fill `arms`)."""
    c = ConfigDict()
    c.name = "base"  # the ablation lives in ablations_dir/name
    c.ablations_dir = "ablations"  # folder of all ablations
    c.experiment = "configs/quickstart.py"  # what every arm starts from; a config file of launch/train.py
    c.fields = ()  # changes of it that all arms share, as on the command line: "optimizer.learning_rate=1e-4"
    c.arms = ConfigDict()  # arm -> its own changes, the same way; () = none
    c.seeds = (0, 1, 2, 3, 4)  # every arm runs with each of them; arms of a seed share start weights and prompt stream

    # How far every run goes: to the first step boundary at which this is used up. The experiment's `steps` must reach further.
    c.budget = ConfigDict()
    c.budget.kind = "completion_tokens"  # sampled tokens, validations' included; or "updates", "prompts" or "steps"
    c.budget.size = 0  # in that unit

    c.question = "outcome"  # "outcome" compares `metric` over seeds; "speed" the cost of a step, and the losses
    c.metric = "held_out.solve_rate"  # or "held_out.mean_score", "held_out.greedy_solve_rate", "validation.solve_rate" (the last one's)
    c.control = ""  # arm that each other arm is compared with; empty = all pairs
    c.confidence = 0.95  # of intervals, and of the whole family of comparisons once corrected
    c.correction = "holm"  # for several comparisons: "holm", "bonferroni" or "none"
    c.power = 0.8  # chance of finding the minimum detectable difference
    c.paired_sd = 0.03  # standard deviation of paired differences over seeds that the design assumes, in the metric's unit
    return ConfigDict(c.to_dict(), type_safe=False)  # types are checked when all is set, as an experiment's are (jaxprorl/schema.py)
