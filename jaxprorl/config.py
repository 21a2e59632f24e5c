"""Config files and overrides in, a locked and checked config out. Everything here runs before JAX is touched."""

import contextlib
import io
import json
import math
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxprorl.data import reasoning_gym
from jaxprorl.errors import ConfigError, DataError, RewardError
from jaxprorl.fields import CHOICES, NOT_NEGATIVE, POSITIVE, SHARES, field_value
from jaxprorl.model_sources import what_it_is
from jaxprorl.recipe import check_engines, check_mixes, check_stages, stage_configs, stages
from jaxprorl.rewards import puzzles, registry
from jaxprorl.rollout import preflight
from jaxprorl.schema import ABLATION, EXPERIMENT, Schema, checked, unknown_field, wrong_kind
from jaxprorl.sharding.strategies import AXES, BATCH_AXES, STRATEGIES, mesh_sizes
from jaxprorl.sizes import with_cpu_devices

MAX_NAME_CHARS = 200  # of folders: file systems take 255 bytes, and a run that is moved aside is called NAME.old-K


def load(argv: Sequence[str], schema: Schema = EXPERIMENT) -> ConfigDict:
    """The locked and `checked` config of a command line: `--config=FILE` and any number of `--config.field=value`.

    Raises:
        ConfigError: no such file, unknown field, value of the wrong type, in the file or on the command line; the file fails.
    """
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "experiment file", flag_values=values, lock_config=True, sys_argv=["train", *argv])
    named = [argument for argument in argv if argument.startswith("--config=")]
    if not named:
        raise ConfigError("--config is missing: name an experiment file, e.g. --config=configs/quickstart.py")
    path = named[-1].removeprefix("--config=").split(":")[0]  # FILE:ARGUMENT calls get_config(ARGUMENT)
    if not os.path.isfile(path):
        raise ConfigError(f"--config={path}: no such file; the shipped experiments are in configs/")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            rest = values(["train", *argv])
            config = values.config
            getattr(config, "name", None)  # what stands for a file that raised an OSError raises it now
    except Exception as error:  # the file is a program: it can fail in every way that Python knows
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise ConfigError(f"{_failure(cause, path, argv, schema)}; {schema.hint}") from None
    if len(rest) > 1:
        raise ConfigError(f"unexpected argument {rest[1]!r}: fields are set by --config.FIELD=VALUE")
    other = {EXPERIMENT: ABLATION, ABLATION: EXPERIMENT}.get(schema)
    if other and isinstance(config, ConfigDict) and all(name in config for name in other.make()):
        raise ConfigError(f"--config={path}: no {schema.name} but an {other.name}; {schema.name}s are in {Path(schema.file).parent}/")
    return checked(config, schema, f" in {path}")


def _failure(error: Exception, path: str, argv: Sequence[str], schema: Schema) -> str:
    """What to say of a config that could not be made: by flag, by field, or by line of its file."""
    flag = re.match(r"flag --config\.(?P<field>[\w.]+)=(?P<value>.*?): ", str(error), re.DOTALL)
    if flag and isinstance(error, flags.IllegalFlagValueError):
        said = wrong_kind(flag["field"], flag["value"], schema)
        return f"{said} ({flag[0].removeprefix('flag ').removesuffix(': ')})" if said else str(error)
    text = str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == Path(path).resolve()]
    place = f" in {path}, line {lines[-1]}" if lines else ""
    # ml_collections on an unknown field, with nested quotes and a listing of the whole config.
    found = re.match(r"""(?:[\\'"]|Key )+(\w+)[\\'"](?! object)""", text)
    if found and isinstance(error, KeyError | AttributeError):
        close = re.search(r'Did you mean "(\w+)', text)
        given = [argument for argument in argv if found[1] in re.split("[.=]", argument)]
        if given and not lines:
            names = given[0].removeprefix("--config.").partition("=")[0].split(".")
            group = "".join(f"{name}." for name in names[: names.index(found[1])])
            return unknown_field(f"{group}{found[1]}", schema, f" in {given[0]}", f"{group}{close[1]}" if close else "")
        return f"unknown field {found[1]!r}{place}{f': did you mean {close[1]!r}?' if close else ''}"
    if isinstance(error, flags.Error):
        return text
    if not lines:
        return f"--config={path} and the fields behind it cannot be read: {type(error).__name__}: {' '.join(text.split())}"
    return f"the config file raises {type(error).__name__}: {' '.join(text.split())}{place}"


def validate(config: ConfigDict, schema: Schema = EXPERIMENT) -> None:
    """Checks names, types, values and combinations, of whatever way the config came.

    Raises:
        ConfigError: the first field that cannot work, and the stage that has it.
    """
    config = checked(config, schema)
    check_stages(config)
    check_mixes(config)
    config = with_cpu_devices(config)
    # Quick ones first; the last four look at what no stage may change.
    of_a_stage = (_check_numbers, _check_choices, _check_objective, check_resets, _check_shapes, _check_workers)
    for check in (*of_a_stage, _check_warm_start, _check_engine, _check_rewards, _check_tasks):
        check(config)
    for stage, stage_config in zip(stages(config), stage_configs(config), strict=False):
        try:
            for check in of_a_stage:
                check(stage_config)
        except ConfigError as error:
            raise ConfigError(f"stages: in stage {stage.name!r}, {error}") from None


def to_json(config: ConfigDict) -> str:
    """The resolved config as JSON with sorted keys, as stored in `config.json`."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, value in a, value in b) of every field that differs."""
    for name in sorted(a.keys() | b.keys()):
        left, right = a.get(name), b.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from differences(left, right, f"{prefix}{name}.")
        elif _has_rows(left) and _has_rows(right):
            yield from differences(_numbered(left), _numbered(right), f"{prefix}{name}.")
        elif left != right:
            yield f"{prefix}{name}", left, right


def _has_rows(value: Any) -> bool:
    """True for a list of dicts, like `stages`."""
    return isinstance(value, list | tuple) and any(isinstance(row, dict) for row in value)


def _numbered(rows: Any) -> dict[str, Any]:
    return {str(number): row for number, row in enumerate(rows)}


def _require(ok: bool, field: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{field} = {value!r}: {remedy}")


def check_triggers(config: ConfigDict) -> None:
    """All that can be said of `config.resets` by itself.

    Raises:
        ConfigError: names the field.
    """
    _check_ranges(config, "resets.")
    _check_names(config, "resets.")
    check_resets(config)


def _check_ranges(config: ConfigDict, prefix: str = "") -> None:
    for fields, passes, remedy in (
        (POSITIVE, lambda value: 0 < value < math.inf, "must be greater than 0"),
        (NOT_NEGATIVE, lambda value: 0 <= value < math.inf, "must be 0 or more"),
        (SHARES, lambda value: 0 <= value <= 1, "must lie between 0 and 1"),
    ):
        for field in fields:
            if field.startswith(prefix):
                value = field_value(config, field)
                _require(passes(value), field, value, remedy)


def _check_names(config: ConfigDict, prefix: str = "") -> None:
    for field, choices in CHOICES.items():
        if field.startswith(prefix):
            value = field_value(config, field)
            _require(value in choices, field, value, f"choose one of {', '.join(choices)}")


def _check_numbers(config: ConfigDict) -> None:
    _check_ranges(config)
    top_p = config.evaluation.top_p
    _require(0 < top_p <= 1, "evaluation.top_p", top_p, "must be above 0 and at most 1 (1 = all tokens)")
    for field in ("seed", "evaluation.seed"):
        value = field_value(config, field)
        _require(value < 2**32, field, value, "must be below 2^32")
    _require(config.algorithm.clip_high > 0, "algorithm.clip_high", config.algorithm.clip_high, "must be greater than 0")
    _require(
        config.optimizer.b1 < 1 and config.optimizer.b2 < 1,
        "optimizer.b1, b2",
        (config.optimizer.b1, config.optimizer.b2),
        "must be below 1",
    )
    _require(
        1 <= config.batch.max_drawn_factor < float("inf"),
        "batch.max_drawn_factor",
        config.batch.max_drawn_factor,
        "must be 1 or more (1 = no refill)",
    )
    steps = tuple(config.profile_steps)
    _require(
        all(type(step) is int and 0 <= step < config.steps for step in steps), "profile_steps", steps,
        f"whole numbers from 0 to steps - 1 = {config.steps - 1}",
    )  # fmt: skip
    planned, most = config.warmstart.skill_updates, config.warmstart.max_skill_updates
    _require(most >= planned, "warmstart.max_skill_updates", most, f"must not be below warmstart.skill_updates = {planned}")
    _require(math.isfinite(config.grading.solved_from), "grading.solved_from", config.grading.solved_from, "must be a finite number")
    n = config.rollout.samples_per_prompt
    _require(n >= 2, "rollout.samples_per_prompt", n, "group-relative advantages need at least 2 samples per prompt")


def _check_choices(config: ConfigDict) -> None:
    _check_names(config)
    name = config.run_name
    _require(
        bool(re.fullmatch(r"[A-Za-z0-9][\w.\-]*", name)), "run_name", name, "use letters, digits, '.', '_' and '-' (it names a folder)"
    )
    _require(len(name) <= MAX_NAME_CHARS, "run_name", name, f"has {len(name)} characters, use {MAX_NAME_CHARS} at most (it names a folder)")
    path = config.model.path
    _require(
        not path or os.path.isdir(path),
        "model.path",
        path,
        f"{what_it_is(Path(path)) or 'no such folder'}; name a Hugging Face model folder, or leave it empty for a warm start",
    )
    source = config.data.source
    jsonl = source.startswith("jsonl:")
    _require(source == "reasoning_gym" or jsonl, "data.source", source, "use 'reasoning_gym' or 'jsonl:PATH'")
    _require(not jsonl or os.path.exists(source[6:]), "data.source", source, "no such file; the path starts at the current directory")
    _require(
        bool(config.data.tasks) or (jsonl and bool(path)),
        "data.tasks",
        {},
        "name at least one reasoning-gym task (for the data or the warm start)",
    )


def _check_objective(config: ConfigDict) -> None:
    """Combinations of the objective that contradict each other, or would do nothing."""
    c, shaping, optimizer = config.algorithm, config.shaping, config.optimizer
    low, high = c.correction_low, c.correction_high
    _require(low <= 1, "algorithm.correction_low", low, "must not be above 1, the weight of tokens on which trainer and engine agree")
    _require(high >= 1, "algorithm.correction_high", high, "must not be below 1, the weight of tokens on which trainer and engine agree")
    _require(
        c.correction == "off" or c.old_logp == "trainer",
        "algorithm.correction",
        c.correction,
        "with algorithm.old_logp = 'engine' the ratio itself starts at the engine's log-probs, and there is nothing left to correct: 'off'",
    )
    for domain, rule in config.filtering.rules.items():
        rules = CHOICES["filtering.rule"]
        _require(rule in rules, f"filtering.rules.{domain}", rule, f"choose one of {', '.join(rules)}")
    buffer, limit = shaping.buffer_tokens, config.rollout.max_response_tokens
    _require(buffer <= limit, "shaping.buffer_tokens", buffer, f"must not be more than rollout.max_response_tokens = {limit}")
    least, most = shaping.cosine_minimum, shaping.cosine_maximum
    _require(least <= most, "shaping.cosine_minimum", least, f"must not be above shaping.cosine_maximum = {most}")
    updates, warmup = optimizer.cosine_updates, optimizer.warmup_updates
    _require(
        optimizer.schedule != "cosine" or updates > warmup,
        "optimizer.cosine_updates",
        updates,
        f"a cosine needs its length in updates, more than optimizer.warmup_updates = {warmup}",
    )
    resets = config.resets
    _require(
        resets.reference or resets.optimizer != "none",
        "resets.optimizer",
        resets.optimizer,
        "with resets.reference = False a reset would reset nothing; name one of the two (a run without resets needs no field of them)",
    )


def check_resets(config: ConfigDict) -> None:
    """Triggers and alarms that could not fire, or contradict each other.

    Raises:
        ConfigError: names the field.
    """
    r, a = config.resets, config.alarms
    steps = tuple(r.at_steps)
    _require(all(type(step) is int and step > 0 for step in steps), "resets.at_steps", steps, "whole numbers from 1 on; 0 is the start")
    _require(
        not (r.blind and r.validation.on), "resets.validation.on", True,
        "with resets.blind = True no trigger may read validation results; switch one of them",
    )  # fmt: skip
    _require(
        not r.validation.on or config.validation.every_steps > 0, "resets.validation.on", True,
        "there are no validations, validation.every_steps = 0",
    )  # fmt: skip
    _require(0 < r.validation.confidence < 1, "resets.validation.confidence", r.validation.confidence, "must lie inside 0 and 1")
    _require(r.length.factor > 1, "resets.length.factor", r.length.factor, "must be above 1")
    kl, entropy = r.kl_spike, r.entropy_collapse
    for field, spike, on in (("resets.kl_spike", kl, kl.on), ("alarms.kl_spike", a.kl_spike, a.kl_spike.action != "off")):
        _require(not on or spike.z > 0 or spike.above > 0, f"{field}.z, above", (spike.z, spike.above), "at least one must be above 0")
        _require(not spike.z or spike.window >= 5, f"{field}.window", spike.window, "a robust z-score needs 5 steps or more")
    _require(
        not kl.both or (kl.z > 0 and kl.above > 0), "resets.kl_spike.both", True,
        f"then z and above must both be asked, they are {kl.z:g} and {kl.above:g}",
    )  # fmt: skip
    _require(
        not entropy.on or entropy.floor > 0 or entropy.fall > 0, "resets.entropy_collapse.floor, fall", (entropy.floor, entropy.fall),
        "at least one must be above 0",
    )  # fmt: skip
    _require(
        entropy.floor > 0 or not entropy.on or entropy.fall < 1, "resets.entropy_collapse.fall", entropy.fall,
        "entropy is never below 0: with floor = 0 it must be below 1 to fire",
    )  # fmt: skip
    _require(not r.repetition.on or r.repetition.above < 1, "resets.repetition.above", r.repetition.above, "a share is never above 1")
    _require(not r.stop_collapse.on or r.stop_collapse.below > 0, "resets.stop_collapse.below", r.stop_collapse.below, "never below 0")
    for name, field in (
        ("zero_spread", "above"),
        ("repetition", "above"),
        ("grader_errors", "above"),
        ("entropy_collapse", "floor"),
        ("unique_tokens", "below"),
        ("stalled_engine", "share"),
    ):
        value = a[name][field]
        can_ring = value < 1 if field == "above" else value > 0
        _require(
            a[name].action == "off" or can_ring, f"alarms.{name}.{field}", value,
            f"it could never ring; {'below 1' if field == 'above' else 'above 0'}, or alarms.{name}.action = 'off'",
        )  # fmt: skip
    window = a.mismatch_trend.window
    _require(window >= 5, "alarms.mismatch_trend.window", window, "a trend needs 5 steps or more")


def _check_workers(config: ConfigDict) -> None:
    if config.rollout.engine == "vllm":
        preflight.check_shares(config)


def _check_engine(config: ConfigDict) -> None:
    check_engines(config)
    config = stage_configs(config)[0]
    if config.rollout.engine == "vllm":
        preflight.check_settings(config)
        if not config.model.path:  # else start reads it from the folder
            preflight.check_model(config, config.model)


def _check_rewards(config: ConfigDict) -> None:
    for field in ("reward", "evaluation.reward"):
        spec = config.reward if field == "reward" else config.evaluation.reward or config.reward
        try:
            registry.load_parts(spec)
        except RewardError as error:
            raise ConfigError(str(error) if field == "reward" else f"evaluation.reward: {error}") from None


def _check_tasks(config: ConfigDict) -> None:
    for task in config.data.tasks:
        try:
            next(reasoning_gym.items(task, config.data.tasks[task].to_dict(), config.data.train_seed))
            puzzles.check_task(task)
        except DataError as error:
            raise ConfigError(str(error)) from None
        except ValueError as error:
            raise ConfigError(f"data.tasks.{task}: {error}") from None


def _row_devices(config: ConfigDict) -> int:
    """Devices that share the rows of a batch, of those that a CPU run has."""
    mesh = config.mesh
    sizes = {axis: max(1, mesh[axis]) for axis in AXES}
    rest = max(1, mesh.cpu_devices // math.prod(sizes.values()))
    return sizes["data"] * sizes["fsdp"] * (rest if STRATEGIES[mesh.strategy].fills in BATCH_AXES else 1)


def _check_warm_start(config: ConfigDict) -> None:
    if config.model.path:
        return
    context, row_tokens = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens, config.warmstart.row_tokens
    _require(
        row_tokens >= context, "warmstart.row_tokens", row_tokens,
        f"a row must hold the longest demonstration, rollout.max_prompt_tokens + rollout.max_response_tokens = {context}",
    )  # fmt: skip
    devices, rows = _row_devices(config), config.warmstart.rows
    _require(rows % devices == 0, "warmstart.rows", rows, f"must divide by the {devices} devices that share the rows")


def _check_shapes(config: ConfigDict) -> None:
    rollout, batch, model, mesh = config.rollout, config.batch, config.model, config.mesh
    sizes = {axis: mesh[axis] for axis in AXES}
    try:
        mesh_sizes(
            mesh.strategy, sizes, math.prod(size or 1 for size in sizes.values())
        )  # how many devices there are is known only at start
    except ValueError as error:
        raise ConfigError(f"mesh.{error}") from None
    devices = _row_devices(config)
    context = rollout.max_prompt_tokens + rollout.max_response_tokens
    together = f"rollout.max_prompt_tokens + rollout.max_response_tokens = {context}"
    _require(batch.row_tokens >= context, "batch.row_tokens", batch.row_tokens, f"a row must hold the longest sequence, {together}")
    if not model.path:
        _require(
            model.max_position_embeddings >= context, "model.max_position_embeddings", model.max_position_embeddings,
            f"the context must hold {together}",
        )  # fmt: skip
        _require(model.head_dim % 2 == 0, "model.head_dim", model.head_dim, "rotary embeddings need an even width")
        heads, groups = model.num_attention_heads, model.num_key_value_heads
        _require(heads % groups == 0, "model.num_key_value_heads", groups, f"must divide model.num_attention_heads = {heads}")
    _require(
        rollout.slots % devices == 0, "rollout.slots", rollout.slots,
        f"must divide by the {devices} devices that share rows, e.g. {-(-rollout.slots // devices) * devices}",
    )  # fmt: skip
    least, most = rollout.min_response_tokens, rollout.max_response_tokens
    _require(least <= most, "rollout.min_response_tokens", least, f"must not be more than rollout.max_response_tokens = {most}")
    rows = batch.micro_batch_rows
    _require(rows % devices == 0, "batch.micro_batch_rows", rows, f"must divide by the {devices} devices that share the rows")
    _require(batch.prompts >= batch.updates, "batch.updates", batch.updates, f"each update needs a group, batch.prompts = {batch.prompts}")
