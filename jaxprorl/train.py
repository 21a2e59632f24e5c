"""The main job: train(config), from Python and from launch/train.py."""

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxprorl import storage, streams
from jaxprorl import watch as watching
from jaxprorl.batch import batch_advantages, host_batch, packing_metrics, placed
from jaxprorl.budget import is_over, spent
from jaxprorl.caller import left_as_found
from jaxprorl.checkpoint import Host
from jaxprorl.compilation import no_compilation
from jaxprorl.config import validate
from jaxprorl.errors import NonFiniteError
from jaxprorl.evaluation.harness import evaluate, first_per_task
from jaxprorl.evaluation.report import write_report
from jaxprorl.evaluation.statistics import event_fields
from jaxprorl.evaluation.summary import build_summary, peak_memory_bytes, write_summary
from jaxprorl.export import write_model
from jaxprorl.finished import finished, read_only
from jaxprorl.grading import check_graders
from jaxprorl.inputs import read_inputs, with_arguments
from jaxprorl.interrupts import Interrupts
from jaxprorl.model_cache import check_cache
from jaxprorl.monitoring.alarms import AlarmError, Paused
from jaxprorl.monitoring.profile import end_trace, start_trace, stop_trace
from jaxprorl.preemption import Preemption
from jaxprorl.preview import check_start
from jaxprorl.prompt_file import told_by_index, write_prompts
from jaxprorl.resets.commands import Command
from jaxprorl.resets.controller import gauges
from jaxprorl.resets.triggers import Firing
from jaxprorl.result import Result
from jaxprorl.rollout import surplus
from jaxprorl.rollout.collect import Rollout, RolloutBatch
from jaxprorl.rollout.engine import exam_sampling
from jaxprorl.rollout.metrics import rollout_metrics
from jaxprorl.run_folder import RunFolder, as_begun, has_begun, open_run, what_comes_next
from jaxprorl.schema import checked
from jaxprorl.sharding.mesh import cpu_devices_there, set_cpu_devices
from jaxprorl.start import Training, evaluate_held_out, start
from jaxprorl.state import RunState, TrainState
from jaxprorl.transitions import advance, begin_stage, look_ahead, reset_if_due
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


Signals = Interrupts | Preemption


def train(
    config: ConfigDict,
    reward: Any = None,
    prompts: Iterable[Mapping[str, Any]] | None = None,
    *,
    own_process: bool = False,
) -> Result:
    """Runs, or goes on with, the RL training that `config` describes.

    Whichever way it is left, workers, threads, locks and shared memory are gone, and signal handlers, `sys.path` and JAX's settings are the
    caller's again. JAX's devices stay as they are from their first use on.

    Args:
        config: is not changed.
        reward: in place of `config.reward` and `config.evaluation.reward`: a function `(completion_text, prompt)`, its name, or several
            with weights; see `rewards.registry.reward_spec`.
        prompts: questions in place of `config.data.source`, as dicts with the fields of a JSON line (data/jsonl.py).
        own_process: the process is a script's own: signals that come when there is nothing to save, or twice, end it (`preemption`).
            Otherwise they only ever raise, as soon as that is safe (`interrupts`).

    Raises:
        ConfigError, DataError, ModelError, RewardError: bad input, before long work starts.
        CheckpointError: the newest checkpoint is damaged or of something else, or the disk is full.
        StorageError: another file that the run cannot do without cannot be written; what was saved before is sound.
        RunLockedError: another process works in the run's folder.
        GraderError: `grading.max_error_share` was exceeded.
        NonFiniteError: `optimizer.max_skipped_updates` updates in a row had a gradient or a change that is not finite.
        AlarmError: an alarm with the action "stop" rings; the run is saved.
        Paused: one with the action "pause" rings; the run is saved.
        Interrupted: Ctrl-C came; what there was to save is saved. A KeyboardInterrupt.
        Preempted: SIGTERM, SIGUSR1 or SIGHUP came; what there was to save is saved. A SystemExit with `preemption.EXIT_STATUS`.
    """
    started_s = time.perf_counter()
    streams.open_closed()
    config = checked(config)
    questions = None if prompts is None else write_prompts(prompts, Path(config.cache_dir) / "prompts")
    config = with_arguments(config, reward, questions)
    folder = RunFolder(Path(config.runs_dir) / config.run_name)
    with left_as_found(), told_by_index(questions):
        config = as_begun(config, folder, cpu_devices_there())
        validate(config)
        if reason := storage.unwritable(folder.path):
            return Result(read_only(config, folder, reason), folder.path.absolute())
        check_cache(config, folder)
        set_cpu_devices(config.mesh.cpu_devices)
        next_one = partial(what_comes_next, folder)
        with Preemption(config.checkpoint.save_within_s, next_one) if own_process else Interrupts(next_one) as signals:
            return Result(run(config, folder, signals, started_s), folder.path.absolute())


def run(config: ConfigDict, folder: RunFolder, signals: Signals, started_s: float) -> dict[str, Any]:
    """The run from its folder to its summary, which it returns."""
    # The stack is inside of `signals`: it closes (and waits for the last save) while they and the time limit still count.
    with ExitStack() as stack:
        # Of a run that is new: refused, it leaves no folder behind, and moves none aside.
        new = config.on_existing == "replace" or not has_begun(folder)
        items = read_inputs(config) if new else None
        mesh = check_start(config, items) if items else None
        open_run(config, stack)
        summary = finished(config, folder)
        if summary:
            return summary
        stack.callback(end_trace)
        training = start(config, folder, stack, items, mesh)
        if isinstance(signals, Preemption):
            signals.saving = training.checkpoints.saving
        with no_compilation(), signals.guarded():
            loop(training, signals)
        return finish(config, training, started_s)


def loop(training: Training, signals: Signals) -> None:
    """The stages of a run (docs/stages.md), one after the other, until it `is_over`; without stages it is one."""
    training.recorded_s = time.perf_counter()
    while not is_over(training.config, training.run):
        if training.watch.stage.ending:
            begin_stage(training)
        run_stage(training, signals)
        if signals.requested:
            break
    if signals.requested:  # after the checkpoint: a resumed run's log continues as if nothing had happened
        step, recorder = training.run.step, training.recorder
        recorder.event(step, "interrupted", signal=signals.requested)
        recorder.progress.note(f"{signals.requested}: saved after step {step}; the same command goes on from there")


def run_stage(training: Training, signals: Signals) -> None:
    """Sample, grade, filter, advantages, K updates, swap, record: until the stage or the run is over (README, "The road")."""
    setting, config, recorder = training.setting, training.config, training.recorder
    state, run, left = training.state, training.run, training.surplus
    done: Step | None = None
    while not is_over(config, run) and not training.watch.stage.ending and not (done and signals.requested):
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
        check_batch(training, step, batch)
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
        rate, ungraded = done.validation.get("validation.solve_rate"), int(done.validation.get("validation.ungraded", 0))
        training.checkpoints.save(state, host, rate, reset_boundary, ungraded)
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
        raise Paused(f"step {number}: alarm {alarm.reason}. The run is saved; the same call goes on")
    raise AlarmError(
        f"step {number}: alarm {alarm.reason}. The run is saved; to go on all the same, change the fields of alarms.{alarm.trigger} and "
        "name them in checkpoint.accept"
    )


def check_batch(training: Training, step: int, batch: RolloutBatch) -> None:
    """Logs grader errors, warns at the cap, and stops the run when too many samples have no score."""
    config, recorder = training.config, training.recorder
    scores = [score for group in batch.groups for score in group.scores]
    check_graders(recorder, step, "step", config.grading.max_error_share, scores)
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
    check = partial(check_graders, training.recorder, step, "validation", config.grading.max_error_share)
    result = evaluate(training.exam_engine, training.exam_graders, prompts, exam_sampling(config), check)
    training.recorder.event(step, "validation", **event_fields(result))
    shown = {name: result[name] for name in ("solve_rate", "mean_score", "ungraded", "completion_tokens")} | {"items": result["n"]}
    shown |= {task: row["solve_rate"] for task, row in result["per_task"].items()}
    return {f"validation.{name}": value for name, value in shown.items() if value is not None}  # metrics are numbers: no rate, no entry


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
