"""A recipe: the stages of a run, each with the config that its steps go by. Nothing here touches JAX (docs/stages.md)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.data.domains import DOMAINS
from jaxprorl.errors import ConfigError
from jaxprorl.schema import default_of, fitting, unknown_field

ENDS = ("steps", "plateau", "manual")
# The sets of resets/optimizer.py, which takes JAX, each with all that those after it have.
OPTIMIZER_RESETS = ("all", "moments_and_bias", "moments", "none")
# What a stage may change: sections, and single fields. Everything else is one for the whole run.
CHANGEABLE = ("rollout.", "batch.", "algorithm.", "shaping.", "filtering.", "optimizer.", "resets.", "data.mix")
FIXED = {
    "rollout.max_prompt_tokens": "the prompts of all stages are rendered, and measured, once",
    "rollout.engine": "workers start once, before the first stage",
    "resets.blind": "a run is blind as a whole or not at all",
    "resets.manual": "a run takes commands or takes none",
    "resets.warmup_updates": "the optimizer's state would take another form",
}
# Of `rollout`: what an engine is told with every call, so that stages which differ in it alone share one.
TOLD = ("samples_per_prompt", "temperature", "max_staleness")


@dataclass(frozen=True)
class Stage:
    """One stage, as `configs.base.stage` makes it.

    Attributes:
        name: in events, metrics and report.
        steps: after so many it ends; with another `end`, at the latest.
        changes: dotted field -> its value from this stage on.
        reset_reference, reset_optimizer: what starts afresh right before its first step, as in `config.resets`; False and "none" = nothing.
        end: "steps", "plateau" (validation is flat, or falls) or "manual" (a person says so).
        patience, min_change, confidence: of the plateau, as in `config.resets.validation`.
    """

    name: str
    steps: int
    changes: Mapping[str, Any]
    reset_reference: bool
    reset_optimizer: str
    end: str
    patience: int
    min_change: float
    confidence: float

    @property
    def resets(self) -> bool:
        """True when something is reset at its start."""
        return self.reset_reference or self.reset_optimizer != "none"


# What each field of a stage has to be. Bounds are checked by `check_stages`.
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "name": ((str,), "a text"),
    "steps": ((int,), "a whole number"),
    "changes": ((Mapping,), "a mapping of fields to their values"),
    "reset_reference": ((bool,), "True or False"),
    "reset_optimizer": ((str,), f"one of {', '.join(OPTIMIZER_RESETS)}"),
    "end": ((str,), f"one of {', '.join(ENDS)}"),
    "patience": ((int,), "a whole number"),
    "min_change": ((int, float), "a number"),
    "confidence": ((int, float), "a number"),
}


def stages(config: ConfigDict) -> tuple[Stage, ...]:
    """The stages of `config`, in order; () = it names none, the whole run is one.

    Raises:
        ConfigError: one of them is not what `configs.base.stage` makes, or a field of it is of another type.
    """
    wanted = {field.name for field in fields(Stage)}
    made = []
    for number, row in enumerate(config.stages, start=1):
        if not isinstance(row, Mapping) or set(row) != wanted:
            raise ConfigError(f"stages: number {number} is {row!r}; make it with stage() of configs/base.py")
        for name, (kinds, remedy) in KINDS.items():
            value = row[name]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ConfigError(f"stages: stage {row['name']!r}: {name} = {value!r}: must be {remedy}")
        if unnamed := [field for field in row["changes"] if not isinstance(field, str)]:
            raise ConfigError(f"stages: stage {row['name']!r} changes {unnamed[0]!r}: fields are named by text, 'group.field'")
        made.append(Stage(**row))
    return tuple(made)


def stage_configs(config: ConfigDict) -> tuple[ConfigDict, ...]:
    """The resolved config of each stage: that of the run with the changes of this stage and of all before it. Without stages: its own.

    Raises:
        ConfigError: a stage changes a field that may not change, or does not exist, or to a value of another type.
    """
    made, latest = [], config
    for stage in stages(config):
        latest = latest.copy_and_resolve_references()
        with latest.unlocked():
            for field, value in stage.changes.items():
                _change(latest, stage.name, field, value)
        made.append(latest)
    return tuple(made) or (config,)


def longest(configs: tuple[ConfigDict, ...]) -> ConfigDict:
    """The first of those with the largest response limit: what is measured is measured with it, so that stages can be compared."""
    return max(configs, key=lambda config: int(config.rollout.max_response_tokens))  # the first one, if several are equal


def engine_fields(config: ConfigDict) -> dict[str, Any]:
    """Dotted fields of `rollout` that an engine is made by: configs that agree in them share one."""
    return {f"rollout.{name}": value for name, value in _flat(config.rollout.to_dict()) if name not in TOLD}


def _flat(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{field}", inner) for field, inner in _flat(value))
        else:
            yield name, value


def check_engines(config: ConfigDict) -> None:
    """Stages that would need several engines at once, one of them vLLM's.

    Raises:
        ConfigError: names the fields in which they differ.
    """
    configs = stage_configs(config)
    first, *others = [engine_fields(stage_config) for stage_config in configs]
    differing = sorted({field for other in others for field in first if other[field] != first[field]})
    if differing and any(stage_config.rollout.engine == "vllm" for stage_config in configs):
        raise ConfigError(
            f"stages, rollout.engine = 'vllm': they differ in {', '.join(differing)}, so each would need workers of its own, all of them "
            "alive together, which is not supported yet; choose rollout.engine = 'jax' for all, or the same values"
        )


def _change(config: ConfigDict, name: str, field: str, value: Any) -> None:
    place = f"stages: stage {name!r} changes {field}"
    *groups, last = field.split(".")
    section: Any = config
    for group in groups:
        section = section[group] if isinstance(section, ConfigDict) and group in section else None
    own_name = field.startswith("filtering.rules.") and len(groups) == 2  # of a domain
    if not isinstance(section, ConfigDict) or not (last in section or own_name):
        _, _, meant = unknown_field(field).partition(": ")
        raise ConfigError(f"{place}: there is no such field{meant and f', {meant}'}; every field is in configs/base.py")
    if field in FIXED:
        raise ConfigError(f"{place}, which is one for the whole run: {FIXED[field]}")
    if field.startswith("rollout.vllm."):
        raise ConfigError(f"{place}, which is one for the whole run: workers start once, before the first stage")
    if not field.startswith(CHANGEABLE):
        raise ConfigError(f"{place}, which is one for the whole run; a stage may change fields of {', '.join(CHANGEABLE)}")
    if last in section and isinstance(section[last], ConfigDict):
        raise ConfigError(
            f"{place}, a group of fields: there is no such field; name those in it, as {field}.{next(iter(section[last]), 'NAME')}"
        )
    try:
        section[last] = fitting(field, value, "" if own_name else default_of(field))
    except ConfigError as error:
        raise ConfigError(f"stages: stage {name!r} changes {error}") from None


def larger(a: tuple[bool, str], b: tuple[bool, str]) -> tuple[bool, str]:
    """All that two resets (reference, what of the optimizer) reset: each named set of the optimizer holds those after it."""
    return a[0] or b[0], min(a[1], b[1], key=OPTIMIZER_RESETS.index)


def check_stages(config: ConfigDict) -> None:
    """Stages that cannot work, each by itself; the configs that they make are checked like any other.

    Raises:
        ConfigError: names the stage and the field.
    """
    made = stages(config)
    names = [stage.name for stage in made]
    for number, stage in enumerate(made):
        place = f"stages: stage {stage.name!r}"
        if not re.fullmatch(r"\S(.*\S)?", stage.name) or names.count(stage.name) > 1:
            raise ConfigError(f"{place}: every stage needs a name of its own")
        if stage.steps < 1:
            raise ConfigError(f"{place}: steps = {stage.steps!r}: must be a whole number from 1 on")
        if number == 0 and stage.resets:
            raise ConfigError(f"{place}: nothing can be reset at the start of the first stage, which is the run's")
        if stage.reset_optimizer not in OPTIMIZER_RESETS:
            raise ConfigError(f"{place}: reset_optimizer = {stage.reset_optimizer!r}: choose one of {', '.join(OPTIMIZER_RESETS)}")
        if stage.end not in ENDS:
            raise ConfigError(f"{place}: end = {stage.end!r}: choose one of {', '.join(ENDS)}")
        if stage.end == "manual" and not config.resets.manual:
            raise ConfigError(f"{place}: end = 'manual': with resets.manual = False the run takes no command that could end it")
        if stage.end == "plateau":
            _check_plateau(config, stage, place)


def _check_plateau(config: ConfigDict, stage: Stage, place: str) -> None:
    if config.resets.blind:
        raise ConfigError(
            f"{place}: end = 'plateau' reads validation results, and what follows would depend on them; with resets.blind = True nothing "
            "may. Set resets.blind = False to say so, or choose 'steps' or 'manual'"
        )
    for name, ok, remedy in (
        ("patience", stage.patience > 0, "must be a whole number from 1 on"),
        ("min_change", 0 <= stage.min_change <= 1, "must lie between 0 and 1"),
        ("confidence", 0 < stage.confidence < 1, "must lie inside 0 and 1"),
    ):
        if not ok:
            raise ConfigError(f"{place}: {name} = {getattr(stage, name)!r}: {remedy}")
    every = config.validation.every_steps
    if not every:
        raise ConfigError(f"{place}: end = 'plateau': there are no validations, validation.every_steps = 0")
    if stage.steps // every < 2 * stage.patience:
        raise ConfigError(
            f"{place}: steps = {stage.steps}: a plateau takes 2 x patience = {2 * stage.patience} validations, {every} steps apart: it "
            f"could never end the stage; allow more than {2 * stage.patience * every} steps, or validate more often"
        )


def never_reached(config: ConfigDict) -> list[str]:
    """What the recipe names and a run of `config.steps` steps does not come to, one line each; more steps, asked later, may."""
    told, begins, configs = [], 0, stage_configs(config)
    for stage in stages(config):
        if begins >= config.steps:
            told.append(f"stages: {stage.name!r} begins after step {begins}, unless one before it ends early")
        begins += stage.steps
    late = sorted({step for stage_config in configs for step in stage_config.resets.at_steps if step > config.steps})
    if late:
        told.append(f"resets.at_steps: {', '.join(map(str, late))}")
    return [f"{line}: never reached with steps = {config.steps}" for line in told]


def check_mixes(config: ConfigDict) -> None:
    """Domains and tasks that training draws from and that are not there, of all stages at once.

    Raises:
        ConfigError: names them. Tasks of a JSONL file are known only once it has been read.
    """
    names = {name for stage_config in stage_configs(config) for name in stage_config.data.mix}
    if unnamed := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(f"data.mix: {unnamed[0]!r} is no name of a domain or task")
    if config.data.source == "reasoning_gym":
        missing = sorted(names - DOMAINS.keys() - set(config.data.tasks))
        if missing:
            raise ConfigError(
                f"data.mix: {', '.join(missing)}: there are no domains of these names that have data and graders "
                f"(there are: {', '.join(sorted(DOMAINS))}), and no such tasks in data.tasks"
            )
