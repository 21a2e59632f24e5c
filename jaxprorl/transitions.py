"""What happens between two steps of the loop: bookkeeping, the end of a stage and the beginning of the next one, resets."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ml_collections import ConfigDict

from jaxprorl import watch as watching
from jaxprorl.budget import is_over
from jaxprorl.resets.commands import Command, take_command
from jaxprorl.resets.optimizer import what_is_reset
from jaxprorl.resets.stages import RESET, what_resets
from jaxprorl.resets.triggers import Firing
from jaxprorl.rollout import surplus
from jaxprorl.rollout.collect import RolloutBatch
from jaxprorl.rollout.metrics import tokens_of
from jaxprorl.start import Training
from jaxprorl.state import RunState, TrainState


def look_ahead(training: Training, run: RunState, validation: Mapping[str, float]) -> tuple[RunState, Command | None]:
    """What is known before the next rollout begins: whether the stage ends here, and what a person asks for."""
    observe = partial(watching.observe_stage, training.setting.rules, training.watch, run.stage_step, run.step, validation)
    training.watch, command = observe(), None
    run = stages_counted(training, run)
    if training.config.resets.manual and not is_over(training.config, run):  # after the last step it goes on waiting
        command = take_command(training.folder.path, run.step, training.recorder.progress.note)
    if command and command.kind == "next_stage":
        training.watch = observe(command.reason)
        run = stages_counted(training, run)
    return run, command


def stages_counted(training: Training, run: RunState) -> RunState:
    """`run` with the stage under way counted among those that have ended, if it has."""
    return replace(run, stages_ended=run.stage + bool(training.watch.stage.ending))


def begin_stage(training: Training) -> None:
    """Goes on to the next stage. What ended the last one is in the checkpoint of that moment, which holds the state before all this."""
    run, ending, recorder = training.run, training.watch.stage.ending, training.recorder
    before, setting = training.setting, training.settings[run.stage + 1]
    stage = setting.stage
    assert ending and stage
    left = surplus.usable(training.surplus, setting.config, setting.prompts, run.policy_version, before.config.rollout.temperature)
    dropped = [group for group in training.surplus if all(group is not kept for kept in left)]
    told = {"number": run.stage + 2, "name": stage.name, "changes": dict(stage.changes), "reason": ending.reason}
    told["micro_batch_rows"] = setting.config.batch.micro_batch_rows
    recorder.event(run.step, "stage", **told, surplus_dropped=len(dropped), tokens_wasted=tokens_of(dropped))
    recorder.progress.note(f"step {run.step}: stage {stage.name} ({ending.reason})")
    own = Firing(run.step, RESET, ending.reads, f"stage {stage.name}", {"ended_by": ending.trigger} | dict(ending.statistics))
    training.watch = watching.begin_stage(
        setting.rules, training.watch, bool(stage.changes), own if stage.resets else None, stage.reset_reference
    )
    training.run = replace(run, stage=run.stage + 1, stage_step=run.step, stage_prompts=run.prompts_consumed)
    training.setting, training.surplus = setting, left


def reset_if_due(training: Training, step: int, state: TrainState, run: RunState) -> tuple[TrainState, RunState]:
    """Does the reset that was decided on after the step before, if any; it is in the checkpoint of that moment too."""
    decision = training.watch.control.due(step)
    if decision is None:
        return state, run
    setting, config, firing, recorder = training.setting, training.config, decision.firing, training.recorder
    reference, optimizer = what_resets(decision, config, setting.stage)
    state = setting.compiled.reset(state, (reference, optimizer))
    recorder.event(
        step, "reset", reference=reference, optimizer=optimizer, reason=firing.reason, trigger=firing.trigger, statistics=firing.statistics,
        signals=firing.reads, blind=setting.rules.blind, also=decision.also, before=decision.before,
    )  # fmt: skip
    recorder.progress.note(f"step {step}: reset of {what_is_reset(reference, optimizer)} ({firing.reason})")
    return state, replace(run, resets=run.resets + 1, reference_step=step if reference else run.reference_step)


def advance(config: ConfigDict, run: RunState, batch: RolloutBatch) -> RunState:
    """The bookkeeping after one rollout batch and its updates."""
    at_cap = len(batch.trained) < config.batch.prompts
    tokens = sum(len(completion.token_ids) for group in batch.groups for completion in group.completions)
    return replace(
        run,
        step=run.step + 1,
        prompts_consumed=run.prompts_consumed + batch.positions,
        policy_version=run.policy_version + 1,
        completion_tokens=run.completion_tokens + tokens,
        updates=run.updates + min(len(batch.trained), config.batch.updates),  # a group is never divided
        rollout_s=run.rollout_s + batch.rollout_s,
        cap_steps=run.cap_steps + 1 if at_cap else 0,
    )
