"""What comes before the loop: data, base model, engine, executables, and the state of step 0 or of the last checkpoint."""

import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl import storage, streams
from jaxprorl import watch as watching
from jaxprorl.checkpoint import Checkpoints, Host, newest_sound_step, read_host, require_space, restore_params, restore_state
from jaxprorl.compilation import use_compilation_cache
from jaxprorl.data.domains import choose
from jaxprorl.data.duplicates import lines
from jaxprorl.data.prompts import check_chat_template
from jaxprorl.data.splits import Items, Splits, fingerprint
from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer
from jaxprorl.errors import CheckpointError, ConfigError
from jaxprorl.evaluation.harness import evaluate
from jaxprorl.evaluation.statistics import event_fields, rate_text
from jaxprorl.files import write_atomically
from jaxprorl.grading import check_graders
from jaxprorl.inputs import head_dim, is_run, model_folder, read_inputs, read_prompts, record_findings
from jaxprorl.model_cache import base_model
from jaxprorl.model_folder import check_vocabulary, doubtful_stops
from jaxprorl.models import hf
from jaxprorl.models.compute import choose_compute
from jaxprorl.models.qwen2 import Params, Qwen2Config, declarations, parameter_count
from jaxprorl.monitoring import events
from jaxprorl.monitoring.profile import missed_steps
from jaxprorl.monitoring.progress import Progress
from jaxprorl.monitoring.recorder import NO_LINES, Recorder
from jaxprorl.recipe import longest, never_reached, stage_configs
from jaxprorl.rewards import registry
from jaxprorl.rewards.pool import GraderPool
from jaxprorl.rollout import preflight, surplus
from jaxprorl.rollout.engine import Engine, Sampling, exam_sampling, merge_swaps
from jaxprorl.rollout.engines import make_engine
from jaxprorl.run_folder import RunFolder, accepted
from jaxprorl.setting import Setting, make_settings
from jaxprorl.sharding.mesh import make_mesh, run_devices, set_cpu_devices
from jaxprorl.sizes import with_cpu_devices, with_micro_batch_rows
from jaxprorl.state import RunState, TrainState, abstract_state, start_state, state_shardings
from jaxprorl.types import Group, Prompt

VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "reasoning_gym", "tokenizers")


@dataclass
class Training:
    """Everything that the loop works with. Executables are compiled; `state` and `run` are where it begins.

    Attributes:
        settings: of the stages to come, by number; one for a run without stages.
        setting: of the stage under way.
        exam_engine: evaluates in all stages: the one with the largest response limit.
    """

    settings: dict[int, Setting]
    setting: Setting
    folder: RunFolder
    mesh: Mesh
    tokenizer: Tokenizer
    model_config: Qwen2Config
    splits: Splits
    exam_engine: Engine
    graders: GraderPool
    exam_graders: GraderPool
    checkpoints: Checkpoints
    recorder: Recorder
    state: TrainState
    run: RunState
    surplus: list[Group]
    watch: watching.Watch
    before: dict[str, Any]
    identity: dict[str, str]
    recorded_s: float = 0.0  # clock when the last step's metrics were complete

    @property
    def config(self) -> ConfigDict:
        """The run's, as it is in this stage."""
        return self.setting.config

    def set_weights(self, params: Params, version: int) -> dict[str, float]:
        """Gives all engines new weights. Returns what that took, for the event log."""
        engines = dict.fromkeys([self.exam_engine, *(setting.engine for setting in self.settings.values())])
        return merge_swaps([engine.set_weights(params, version) for engine in engines])


def start(config: ConfigDict, folder: RunFolder, stack: ExitStack, items: Items | None = None, mesh: Mesh | None = None) -> Training:
    """Makes or restores everything. What must be closed is entered into `stack`.

    Args:
        items: from `read_inputs`, to save reading them again.
        mesh: from `preview.check_start`; JAX takes the number of host devices once.

    Raises:
        ConfigError, DataError, ModelError, RewardError, CheckpointError: before any long work where that is possible.
    """
    mesh = prepare_devices(config) if mesh is None else mesh
    configs, width = stage_configs(config), head_dim(config)
    computes = [choose_compute(stage_config, width, mesh) for stage_config in configs]
    configs = tuple(with_micro_batch_rows(stage_config, compute) for stage_config, compute in zip(configs, computes, strict=True))
    progress = stack.enter_context(Progress(config.steps, config.monitoring.progress))
    for line in never_reached(config):
        progress.note(f"WARNING: {line}")
    items = read_inputs(config) if items is None else items
    for line in lines(items.findings):
        progress.note(f"WARNING: {line}")
    domains = {item.domain for item in items.train}
    step, damaged = newest_sound_step(folder.checkpoints, config.checkpoint.on_damage)
    for problem in damaged:
        progress.note(f"WARNING: {problem}; going on from the checkpoint of step {step}")
    if step is None:
        check_nothing_was_saved(folder)
        if folder.metrics.is_file() and folder.metrics.stat().st_size:
            progress.note(f"WARNING: {folder.path} was stopped before its first checkpoint; it starts again from step 0")
    checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, config))
    for name in checkpoints.debris:
        progress.note(f"{folder.checkpoints}: removed {name}, left by a save or a removal that was cut short")
    warm_start_s, cached = 0.0, True
    if step is None:
        started_s = time.perf_counter()
        base, cached = base_model(config, mesh, progress, items)
        warm_start_s = time.perf_counter() - started_s
        adopt_tokenizer(base, folder)
    tokenizer = load_tokenizer(folder.base_model)
    for line in doubtful_stops(tokenizer):
        progress.note(f"WARNING: {line}")
    model_config = hf.read_config(folder.base_model)
    check_model(longest(configs), model_config, tokenizer)
    splits = read_prompts(config, tokenizer, items)
    for line in lines(splits.findings[len(items.findings) :]):
        progress.note(f"WARNING: {line}")

    shardings = state_shardings(config, model_config, mesh)
    identity = identify(config, tokenizer, splits)
    abstract = abstract_state(config, abstract_params(model_config, shardings.params), shardings)
    require_space(folder.path, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)))
    if step is not None:
        if step > config.steps:
            raise ConfigError(
                f"steps = {config.steps}: {folder.path} has {step} steps already; ask for more, or choose another --config.run_name"
            )
        host = read_host(folder.checkpoints, step)
        check_identity(config, host.identity, identity)
        state, run, offsets = restore_state(folder.checkpoints, step, abstract), host.run, host.offsets
        check_stage(config, run)
        left = restored_surplus(host, identity, configs[run.stage], splits.train)
        if len(left) < len(host.surplus):
            changed = "config, data, tokenizer or reward"
            progress.note(f"WARNING: {len(host.surplus) - len(left)} surplus groups do not fit the changed {changed}; discarded")
        watch = watching.from_json(host.watch)
        checkpoints.forget_after(step)  # only damaged ones are later
    else:
        params = read_start_params(base, model_config, shardings.params)
        state, run, offsets = start_state(config, params, shardings), RunState(), NO_LINES
        left, watch = [], watching.Watch()
    tasks = {prompt.task for split in (splits.train, splits.validation, splits.held_out) for prompt in split}
    recorder = stack.enter_context(Recorder(config, folder, progress, tasks, domains, run.step, offsets))

    def open_engine(stage_config: ConfigDict) -> Engine:
        engine = make_engine(stage_config, model_config, mesh, tokenizer.stop_ids, folder.path, progress.note)
        stack.callback(engine.close)
        return engine

    settings, exam_engine = make_settings(
        config, configs, run.stage, splits.train, computes, model_config, mesh, open_engine, recorder, state, shardings, fresh=not run.step
    )
    graders = stack.enter_context(grader_pool(config, config.reward, folder))
    exam_graders = stack.enter_context(grader_pool(config, config.evaluation.reward or config.reward, folder))
    training = Training(
        settings, settings[run.stage], folder, mesh, tokenizer, model_config, splits, exam_engine,
        graders=graders, exam_graders=exam_graders,
        checkpoints=checkpoints, recorder=recorder, state=state, run=run,
        surplus=left, watch=watch, before={}, identity=identity,
    )  # fmt: skip
    training.set_weights(state.params, run.policy_version)
    if step is not None:
        warn_of_other_sizes(training)
        told = {"checkpoint_step": run.step, "metrics_offset": offsets["metrics"], "events_offset": offsets["events"]}
        recorder.event(run.step, "resume", **told, **sizes_of(training))
        progress.note(f"{folder.path}: going on from the checkpoint of step {run.step}")
        for missed in missed_steps(config, folder, run.step):
            progress.note(f"WARNING: profile_steps: step {missed} is done already and leaves no trace; the next one is {run.step}")
    else:
        record_start(training, cached)
    training.before = evaluate_before(training, warm_start_s)
    return training


def check_stage(config: ConfigDict, run: RunState) -> None:
    """Refuses a recipe (accepted changes included) that no longer has the stage which the run is in."""
    if run.stage >= max(1, len(config.stages)) or (run.stages_ended and not config.stages):
        raise ConfigError(
            f"stages: {len(config.stages)} are named, and the run is in number {run.stage + 1} ({run.stages_ended} have ended); stages "
            "may be added or changed before they begin, not taken away"
        )


def check_nothing_was_saved(folder: RunFolder) -> None:
    """Refuses to start from zero where checkpoints are lost, not missing.

    Raises:
        CheckpointError: the log tells of checkpoints, and none is there.
    """
    told = [event for event in events.read(folder.events) if event["kind"] == "checkpoint"] if folder.events.is_file() else []
    # A checkpoint is announced before it is saved, and a save waits for the one before it: of three, the first was committed.
    if len(told) > 2:
        raise CheckpointError(
            f"{folder.checkpoints} holds no committed checkpoint, yet {folder.events.name} tells of {len(told)}: they were deleted, or an "
            "older version of jaxprorl wrote them. Restore them with their .commit.json files, or start over with "
            "--config.on_existing=replace"
        )


def identify(config: ConfigDict, tokenizer: Tokenizer, splits: Splits) -> dict[str, str]:
    """Digests of what a run's numbers depend on beside its config. They are stored in checkpoints and compared on resume."""
    texts = [(tokenizer.path / "tokenizer.json").read_bytes(), tokenizer.chat_template.encode(), repr(tokenizer.stop_ids).encode()]
    return {
        "data": fingerprint(splits),
        "tokenizer": hashlib.sha256(b"\0".join(texts)).hexdigest(),
        "reward": registry.reward_version(config.reward),
    }


def check_identity(config: ConfigDict, stored: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuses to go on with other data, another tokenizer or another reward.

    Raises:
        CheckpointError: names what differs and the field that accepts it.
    """
    changed = [name for name in sorted(now) if stored.get(name) != now[name] and name not in accepted(config)]
    if changed:
        details = "; ".join(f"{name} was {stored.get(name)}, is {now[name]}" for name in changed)
        raise CheckpointError(
            f"the checkpoint was made with other {' and '.join(changed)} ({details}). Go back to what it was, or say "
            f"--config.checkpoint.accept={','.join(changed)} to go on all the same"
        )


def restored_surplus(host: Host, identity: Mapping[str, str], config: ConfigDict, train: Sequence[Prompt]) -> list[Group]:
    """Groups of a checkpoint that the steps to come may train on; see `surplus.usable`.

    None are left where other data, another tokenizer or another reward was accepted: prompts, ids and scores would mean other things.
    """
    if host.identity != identity:
        return []
    groups, prompts = surplus.decode(host.surplus, train), choose(train, config.data.mix)
    return surplus.usable(groups, config, prompts, host.run.policy_version, host.surplus_temperature)


def read_start_params(base: Path, model_config: Qwen2Config, shardings: dict[str, Any]) -> Params:
    """The start model's parameters: of a Hugging Face folder, or of the newest checkpoint of another run."""
    if not is_run(base):
        return hf.read_params(base, model_config, shardings)
    command = f"launch/export_hf.py --run {quote(str(base))} --output FOLDER"
    remedy = f"export the newest undamaged one ({command}) and start from it (model.path=FOLDER)"
    step, _ = newest_sound_step(RunFolder(base).checkpoints, "stop", remedy)
    if step is None:
        raise CheckpointError(f"model.path = {str(base)!r}: this run has no checkpoint yet")
    return restore_params(RunFolder(base).checkpoints, step, abstract_params(model_config, shardings))


def prepare_devices(config: ConfigDict) -> Mesh:
    """The mesh, with host devices and the compilation cache set up."""
    count = with_cpu_devices(config).mesh.cpu_devices
    set_cpu_devices(count)
    for line in use_compilation_cache(Path(config.cache_dir) / "xla"):
        streams.say(line)
    sizes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor, "context": config.mesh.context}
    try:
        return make_mesh(config.mesh.strategy, run_devices(count), sizes)
    except ValueError as error:
        raise ConfigError(f"mesh.{error}") from None


def check_model(config: ConfigDict, model_config: Qwen2Config, tokenizer: Tokenizer) -> None:
    """Refuses a model whose context or vocabulary is too small: JAX would clamp the indices and say nothing."""
    context = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if context > model_config.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {context}: the model's context holds "
            f"{model_config.max_position_embeddings} tokens (max_position_embeddings); lower one of them"
        )
    check_vocabulary(model_config, tokenizer)
    if config.rollout.engine == "vllm":
        preflight.check_model(config, model_config)


def adopt_tokenizer(base: Path, folder: RunFolder) -> None:
    """Copies the start model's small files into the run, so that it can be resumed and sampled from without the model's folder.

    Raises:
        DataError: the tokenizer or its chat template is not usable.
    """
    base = model_folder(base)
    check_chat_template(load_tokenizer(base))  # before anything is copied: errors name the folder that the user gave
    named = [file for file in sorted(base.iterdir()) if file.suffix in (".json", ".jinja", ".txt")]
    files = [file for file in named if file.is_file() and not file.name.endswith(".index.json")]
    with storage.writing(folder.base_model, sum(file.stat().st_size for file in files)):
        shutil.rmtree(folder.base_model, ignore_errors=True)
        folder.base_model.mkdir(parents=True)
        for file in files:
            shutil.copy(file, folder.base_model / file.name)
        warm_start = folder.base_model / "warm_start.json"
        if warm_start.is_file():
            warm_start.rename(folder.path / "warm_start.json")


def abstract_params(model_config: Qwen2Config, shardings: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the parameters with their shardings."""
    return {
        name: jax.ShapeDtypeStruct(declaration.shape, declaration.dtype, sharding=shardings[name])
        for name, declaration in declarations(model_config).items()
    }


def grader_pool(config: ConfigDict, reward: str, folder: RunFolder) -> GraderPool:
    """Grader processes for one reward."""
    return GraderPool(reward, folder.base_model, config.grading.workers, config.grading.timeout_s, config.grading.solved_from)


def params_digest(params: Params) -> str:
    """Hex sha256 of names, dtypes, shapes and bytes, whatever the sharding."""
    digest = hashlib.sha256()
    for name in sorted(params):
        value = np.asarray(jax.device_get(params[name]))  # one at a time: the host need not hold them all
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode() + value.tobytes())
    return digest.hexdigest()


def sizes_of(training: Training) -> dict[str, int]:
    """What the order of sums, and with it the last bits of all numbers, depends on."""
    return {"devices": training.mesh.size, "micro_batch_rows": training.config.batch.micro_batch_rows}


def warn_of_other_sizes(training: Training) -> None:
    """Says when a run goes on with other sizes than it had in this stage so far: it does not equal the uninterrupted one."""
    now, had = sizes_of(training), dict[str, int]()
    for event in events.read(training.folder.events):
        had |= {name: event[name] for name in now if name in event}
    if had and had != now:
        was, new = (", ".join(f"{name} {value}" for name, value in each.items()) for each in (had, {name: now[name] for name in had}))
        training.recorder.progress.note(f"WARNING: {training.folder.path} goes on with {new}; it had {was}, so sums are in another order")


def record_start(training: Training, cached: bool) -> None:
    """The first events of a run."""
    config, recorder, splits, compute = training.config, training.recorder, training.splits, training.setting.compute
    recorder.event(
        0, "run_start", seed=config.seed, steps=config.steps, parameters=parameter_count(training.model_config), **sizes_of(training),
        attention=compute.attention, remat=compute.remat, shared_prompts=compute.shared_prompts, identity=training.identity,
        start_digest=params_digest(training.state.params),
        versions={name: importlib.metadata.version(name) for name in VERSIONS},
    )  # fmt: skip
    counts = {name: len(getattr(splits, name)) for name in ("train", "validation", "held_out")}
    removed = sum(count["duplicates"] + count["in_other_split"] for count in splits.counts.values())
    found = record_findings(splits.findings, training.folder)
    recorder.event(0, "data", **counts, duplicates_removed=removed, fingerprint=fingerprint(splits), **found)
    warm_start = training.folder.path / "warm_start.json"
    if warm_start.is_file():
        facts = json.loads(warm_start.read_text())
        kept = {name: facts[name] for name in ("skill_updates", "careless_updates", "solve_rate", "fingerprint")}
        recorder.event(0, "warm_start", cached=cached, **kept)
    if training.setting.stage:
        told = {"number": 1, "name": training.setting.stage.name, "changes": dict(training.setting.stage.changes)}
        recorder.event(
            0, "stage", **told, reason="start", micro_batch_rows=config.batch.micro_batch_rows, surplus_dropped=0, tokens_wasted=0
        )


def evaluate_held_out(training: Training, when: str) -> dict[str, Any]:
    """Sampled and greedy results on the held-out split: {"sampled", "greedy", "time_s"}."""
    config, recorder = training.config, training.recorder
    started_s = time.perf_counter()
    results: dict[str, Any] = {}
    for name, sampling in (("sampled", exam_sampling(config)), ("greedy", Sampling(1, 0.0, config.evaluation.seed, step=0))):
        phase = f"evaluation {when} ({name})"
        show = partial(recorder.progress.phase, phase)
        prompts = training.splits.held_out
        check = partial(check_graders, recorder, training.run.step, phase, config.grading.max_error_share)
        results[name] = evaluate(training.exam_engine, training.exam_graders, prompts, sampling, check, show)
        recorder.event(training.run.step, "evaluation", when=when, temperature=sampling.temperature, **event_fields(results[name]))
        recorder.progress.note(f"{phase}: solve rate {rate_text(results[name])}")
    return results | {"time_s": time.perf_counter() - started_s}


def evaluate_before(training: Training, warm_start_s: float) -> dict[str, Any]:
    """The start model's result, measured once per run and kept in `evaluation_before.json`."""
    path = training.folder.before
    if training.run.step and path.is_file():
        before: dict[str, Any] = json.loads(path.read_text())
        return before
    before = evaluate_held_out(training, "before") | {"time_warm_start_s": warm_start_s}
    text = json.dumps(before, indent=2) + "\n"
    with storage.writing(path, len(text)):
        write_atomically(path, text)
    return before
