"""The main job: train(config)."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxprorl import storage
from jaxprorl import watch as watching
from jaxprorl.batch import batch_advantages, host_batch, packing_metrics, placed
from jaxprorl.budget import is_over, spent
from jaxprorl.checkpoint import Host
from jaxprorl.compilation import no_compilation
from jaxprorl.config import validate
from jaxprorl.errors import GraderError, NonFiniteError
from jaxprorl.evaluation.harness import evaluate, first_per_task
from jaxprorl.evaluation.report import write_report
from jaxprorl.evaluation.summary import build_summary, peak_memory_bytes, write_summary
from jaxprorl.export import write_model
from jaxprorl.finished import finished, read_only
from jaxprorl.inputs import read_inputs
from jaxprorl.model_cache import check_cache
from jaxprorl.monitoring.alarms import AlarmError, Paused
from jaxprorl.monitoring.profile import start_trace, stop_trace
from jaxprorl.preemption import Preemption
from jaxprorl.resets.commands import Command, take_command
from jaxprorl.resets.controller import gauges
from jaxprorl.resets.optimizer import what_is_reset
from jaxprorl.resets.stages import RESET, what_resets
from jaxprorl.resets.triggers import Firing
from jaxprorl.rewards.pool import error_share
from jaxprorl.rollout import surplus
from jaxprorl.rollout.collect import Rollout, RolloutBatch
from jaxprorl.rollout.engine import exam_sampling
from jaxprorl.rollout.metrics import rollout_metrics, tokens_of
from jaxprorl.run_folder import RunFolder, as_begun, has_begun, open_run, what_comes_next
from jaxprorl.start import Training, evaluate_held_out, start
from jaxprorl.state import RunState, TrainState
from jaxprorl.types import Group
from jaxprorl.update import Metrics, host_metrics, skipped_in_a_row


@dataclass
class Step:
    """A step whose update is on its way: what is recorded once the next rollout has been dispatched."""

    number: int
    batch: RolloutBatch
    advantage_PN: np.ndarray
    packing: dict[str, float]
    metrics: Metrics
    validation: dict[str, float]
    dispatched_s: float
    command: Command | None = None


def train(config: ConfigDict) -> dict[str, Any]:
    """Runs, or goes on with, the RL training that `config` describes.

    Returns:
        The content of `summary.json`.

    Raises:
        ConfigError, DataError, ModelError, RewardError: bad input, before long work starts.
        CheckpointError: the newest checkpoint is damaged or of something else, or the disk is full.
        StorageError: another file that the run cannot do without cannot be written; what was saved before is sound.
        RunLockedError: another process works in the run's folder.
        GraderError: `grading.max_error_share` was exceeded.
        NonFiniteError: `optimizer.max_skipped_updates` updates in a row had a gradient or a change that is not finite.
        AlarmError: an alarm with the action "stop" rings; the run is saved.
        Paused: one with the action "pause" rings; the run is saved (a SystemExit with `preemption.EXIT_STATUS`).
        Preempted: SIGTERM or SIGUSR1 came in the loop; the run is saved (a SystemExit with `preemption.EXIT_STATUS`). Anywhere else they
            end the process, as Ctrl-C does everywhere.
    """
    started_s = time.perf_counter()
    folder = RunFolder(Path(config.runs_dir) / config.run_name)
    config = as_begun(config, folder)
    validate(config)
    if reason := storage.unwritable(folder.path):
        return read_only(config, folder, reason)
    check_cache(config, folder)
    # The stack is the inner one: it closes (and waits for the last save) while signals and the time limit still count.
    with Preemption(config.checkpoint.save_within_s, partial(what_comes_next, folder)) as preemption, ExitStack() as stack:
        # Of a run that is new: refused, it leaves no folder behind, and moves none aside.
        items = read_inputs(config) if config.on_existing == "replace" or not has_begun(folder) else None
        open_run(config, stack)
        summary = finished(config, folder)
        if summary:
            return summary
        training = start(config, folder, stack, items)
        preemption.saving = training.checkpoints.saving
        with no_compilation(), preemption.guarded():
            loop(training, preemption)
        return finish(config, training, started_s)


def loop(training: Training, preemption: Preemption) -> None:
    """The stages of a run (docs/stages.md), one after the other, until it `is_over`; without stages it is one."""
    training.recorded_s = time.perf_counter()
    while not is_over(training.config, training.run):
        if training.watch.stage.ending:
            begin_stage(training)
        run_stage(training, preemption)
        if preemption.requested:
            break
    if preemption.requested:  # after the checkpoint: a resumed run's log continues as if nothing had happened
        step, recorder = training.run.step, training.recorder
        recorder.event(step, "interrupted", signal=preemption.requested)
        recorder.progress.note(f"{preemption.requested}: saved after step {step}; the same command goes on from there")


def run_stage(training: Training, preemption: Preemption) -> None:
    """Sample, grade, filter, advantages, K updates, swap, record: until the stage or the run is over (README, "The road")."""
    setting, config, recorder = training.setting, training.config, training.recorder
    state, run, left = training.state, training.run, training.surplus
    done: Step | None = None
    while not is_over(config, run) and not training.watch.stage.ending and not (done and preemption.requested):
        step = run.step
        tracing = start_trace(config, training.folder, step, state, recorder)
        # Made, the rollout has dispatched its first decode steps; only then is the last update's result read.
        rollout = Rollout(
            config, setting.engine, training.graders, setting.prompts, run.prompts_consumed - run.stage_prompts, step, left,
            run.policy_version, run.stage,
        )  # fmt: skip
        run = record(training, done, state, run, left)
        state, run = reset_if_due(training, step, state, run)

        batch = rollout.finish()
        check_graders(training, step, batch)
        dispatched_s = time.perf_counter()
        shared = setting.compute.shared_prompts
        packed = host_batch(config, batch.trained, shared)
        arrays = placed(config, packed, training.mesh, shared)
        fixed, kl_sum_PN = setting.compiled.log_probs(state, arrays)
        advantage_PN = batch_advantages(config, batch.trained, step, kl_sum_PN)
        state, metrics = setting.compiled.train_step(state, arrays, fixed, advantage_PN)
        run, left = advance(config, run, batch), batch.surplus
        swap = training.set_weights(state.params, run.policy_version)

        recorder.rollout(step, batch, advantage_PN, training.tokenizer)
        recorder.event(step, "swap", policy_version=run.policy_version, **swap)
        done = Step(step, batch, advantage_PN, packing_metrics(packed), metrics, validate_policy(training, step), dispatched_s)
        run = replace(run, validation_tokens=run.validation_tokens + int(done.validation.get("validation.completion_tokens", 0)))
        if tracing:
            stop_trace(step, state, recorder)
        run, done.command = look_ahead(training, run, done.validation)
    training.state, training.surplus = state, left
    training.run = record(training, done, state, run, left, leaving=True)


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


def record(training: Training, done: Step | None, state: TrainState, run: RunState, left: list[Group], leaving: bool = False) -> RunState:
    """Writes the metrics of the last step (waiting for its update), decides by them, and saves when due. Returns `run` with its clock.

    Raises:
        AlarmError, Paused: an alarm says so; the run is saved.
    """
    if done is None:
        return run
    update = host_metrics(done.metrics)
    now_s = time.perf_counter()
    values = rollout_metrics(done.batch, done.advantage_PN, run.policy_version - 1) | done.packing | update | done.validation
    values |= {
        "groups.cap_steps": run.cap_steps,
        "policy.version": run.policy_version - 1,
        "reference.age_steps": done.number - run.reference_step,
        "time.update_s": now_s - done.dispatched_s,
        "time.step_s": now_s - training.recorded_s,
    }
    stage, ending = training.setting.stage, training.watch.stage.ending
    if stage:
        values["stage"] = run.stage + 1
    training.recorded_s = now_s
    training.recorder.step(done.number, values)
    run = replace(run, rl_s=run.rl_s + values["time.step_s"], skipped_in_a_row=skipped_in_a_row(run.skipped_in_a_row, done.metrics))
    check_updates(training, done, run)
    over = is_over(training.config, run)
    alarms = decide(training, done, values)
    if stage and ending:
        told = {"trigger": ending.trigger, "reason": ending.reason, "signals": ending.reads, "statistics": ending.statistics}
        training.recorder.event(done.number, "stage_end", number=run.stage + 1, name=stage.name, steps=run.step - run.stage_step, **told)
    following = training.settings[run.stage + 1].stage if ending and not over else None
    reset_boundary = training.watch.control.due(run.step) is not None or (following is not None and following.resets)
    due = over or bool(ending) or reset_boundary or run.step % training.config.checkpoint.every_steps == 0
    due |= any(alarm.reads != "clock" for alarm in alarms)
    if due:  # one that a signal or the clock asked for is no event: the log of the uninterrupted run has none there
        training.recorder.event(done.number, "checkpoint", checkpoint_step=run.step)
    if due or leaving or alarms:
        temperature = float(training.config.rollout.temperature)
        host = Host(
            run, training.recorder.offsets(), training.identity, surplus.encode(left), watching.to_json(training.watch), temperature
        )
        training.checkpoints.save(state, host, done.validation.get("validation.solve_rate"), reset_boundary)
    if alarms:
        end(training, done.number, alarms[0])
    return run


def decide(training: Training, done: Step, values: Mapping[str, float]) -> list[Firing]:
    """Shows the metrics of a step to reset triggers and alarms; `training.watch` then holds what comes right before the next step.

    Returns:
        Alarms that end the process, those that stop it first.
    """
    rules, recorder, number = training.setting.rules, training.recorder, done.number
    last = training.watch.control.due(number)
    if last:
        recorder.event(number, "reset_effect", trigger=last.firing.trigger, before=last.before, after=gauges(values))
    command = done.command.reason if done.command and done.command.kind == "reset" else None
    training.watch, firings = watching.observe(rules, training.watch, number + 1, values, command)
    actions = {firing.trigger: rules.alarms[firing.trigger].action for firing in firings}
    for firing in firings:
        action = actions[firing.trigger]
        statistics = "time_statistics" if firing.reads == "clock" else "statistics"
        recorder.event(number, "alarm", alarm=firing.trigger, action=action, reason=firing.reason, **{statistics: firing.statistics})
        recorder.progress.note(f"ALARM: step {number}: {firing.reason} ({action})")
    ending = [firing for firing in firings if actions[firing.trigger] in ("pause", "stop")]
    return sorted(ending, key=lambda firing: actions[firing.trigger], reverse=True)


def end(training: Training, number: int, alarm: Firing) -> NoReturn:
    """Ends the process, which is saved, as the alarm's action says."""
    if training.setting.rules.alarms[alarm.trigger].action == "pause":
        raise Paused
    raise AlarmError(
        f"step {number}: alarm {alarm.reason}. The run is saved; to go on all the same, change the fields of alarms.{alarm.trigger} and "
        "name them in checkpoint.accept"
    )


def check_graders(training: Training, step: int, batch: RolloutBatch) -> None:
    """Logs grader errors, warns at the cap, and stops the run when too many samples have no score."""
    config, recorder = training.config, training.recorder
    scores = [score for group in batch.groups for score in group.scores]
    share = error_share(scores)
    if share:
        failed = [score for score in scores if score.outcome == "grader_error"]
        recorder.event(step, "grader_errors", count=len(failed), share=share, examples=[score.detail for score in failed[:3]])
        if share > config.grading.max_error_share:
            raise GraderError(
                f"step {step}: {len(failed)} of {len(scores)} samples could not be graded (first: {failed[0].detail}), more than "
                f"grading.max_error_share = {config.grading.max_error_share}; mend the reward, or raise the field"
            )
    kept = len(batch.trained)
    if kept < config.batch.prompts:
        recorder.event(step, "cap_reached", drawn=len(batch.groups), kept=kept, wanted=config.batch.prompts)
        recorder.progress.note(
            f"WARNING: step {step}: {len(batch.groups)} prompts drawn (batch.max_drawn_factor) and only {kept} of "
            f"{config.batch.prompts} groups carry a signal; training on those"
        )


def check_updates(training: Training, done: Step, run: RunState) -> None:
    """Logs and warns of skipped updates, and stops the run when there are too many in a row.

    Raises:
        NonFiniteError: the parameters are those before the first of them; the checkpoints before it are sound.
    """
    skipped, limit = int(np.sum(jax.device_get(done.metrics["updates.skipped"]))), training.config.optimizer.max_skipped_updates
    if not skipped:
        return
    training.recorder.event(done.number, "skipped_updates", count=skipped, in_a_row=run.skipped_in_a_row)
    training.recorder.progress.note(f"WARNING: step {done.number}: {skipped} updates skipped, their gradient or change is not finite")
    if run.skipped_in_a_row >= limit:
        raise NonFiniteError(
            f"step {done.number}: {run.skipped_in_a_row} updates in a row had a gradient or a change that is not finite and were skipped "
            f"(optimizer.max_skipped_updates = {limit}). Lower optimizer.learning_rate or go on from an earlier checkpoint"
        )


def validate_policy(training: Training, step: int) -> dict[str, float]:
    """The periodic validation after step `step`, as metrics; empty when none is due."""
    config = training.config
    if not config.validation.every_steps or (step + 1) % config.validation.every_steps:
        return {}
    prompts = first_per_task(training.splits.validation, config.validation.items_per_task)
    result = evaluate(training.exam_engine, training.exam_graders, prompts, exam_sampling(config))
    rates = {task: row["solve_rate"] for task, row in result["per_task"].items()}
    training.recorder.event(step, "validation", solve_rate=result["solve_rate"], mean_score=result["mean_score"], per_task=rates)
    shown = {f"validation.{name}": result[name] for name in ("solve_rate", "mean_score", "completion_tokens")}
    shown["validation.items"] = result["n"]
    return shown | {f"validation.{task}": rate for task, rate in rates.items()}


def finish(config: ConfigDict, training: Training, started_s: float) -> dict[str, Any]:
    """Final evaluation, model folder, summary and report."""
    folder, run, before, recorder = training.folder, training.run, training.before, training.recorder
    after = evaluate_held_out(training, "after")
    peaks = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    if peaks:
        recorder.event(run.step, "device_memory", peak_bytes=peaks)
    recorder.event(run.step, "run_end", steps=run.step, resets=run.resets, spent=spent(run))
    scores = {"before": before["sampled"], "after": after["sampled"]}
    write_model(folder.model, folder, config, training.model_config, training.state.params, training.tokenizer, run, scores)
    training.checkpoints.wait()
    evaluation_s = before["time_s"] + after["time_s"]
    earlier_s = before["time_warm_start_s"] + before["time_s"] + run.rl_s
    summary = build_summary(
        before=before["sampled"],
        after=after["sampled"],
        greedy_before=before["greedy"],
        greedy_after=after["greedy"],
        steps=run.step,
        resets=run.resets,
        completion_tokens_per_s=run.completion_tokens / run.rollout_s,
        # The total of a resumed run is what its parts took in all processes, or this process's own time if that is more.
        seconds={
            "warm_start": before["time_warm_start_s"],
            "rl": run.rl_s,
            "evaluation": evaluation_s,
            "total": max(time.perf_counter() - started_s, earlier_s + after["time_s"]),
        },
        peak_memory_bytes=peak_memory_bytes(),
        seed=config.seed,
    )
    recorder.view(run.step, "report", partial(folder.report.unlink, missing_ok=True))  # of fewer steps
    with storage.writing(folder.summary, len(json.dumps(summary))):
        write_summary(folder.path, summary)
    recorder.view(run.step, "report", write_report, folder.path)
    return summary
