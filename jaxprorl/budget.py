"""When a run is over: after its steps, with its last stage, or at the first step boundary at which a budget is used up.

Runs can be matched by a budget.
"""

from ml_collections import ConfigDict

from jaxprorl.state import RunState


def spent(run: RunState) -> dict[str, int]:
    """What a run has used so far, by field of `config.budget`; every number is exact after a resume."""
    return {"completion_tokens": run.completion_tokens + run.validation_tokens, "updates": run.updates, "prompts": run.prompts_consumed}


def is_over(config: ConfigDict, run: RunState) -> bool:
    """Whether no further step is to be done."""
    budget, used = config.budget, spent(run)
    return (
        run.step >= config.steps
        or 0 < len(config.stages) <= run.stages_ended
        or 0 < budget.completion_tokens <= used["completion_tokens"]
        or 0 < budget.updates <= used["updates"]
        or 0 < budget.prompts <= used["prompts"]
    )
