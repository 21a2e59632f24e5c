"""What an ablation will do and how it will be judged: written to `plan.json`, with its digest, before the first run."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxprorl import storage
from jaxprorl.ablations.analysis import CORRECTIONS, first_level, minimum_detectable
from jaxprorl.config import MAX_NAME_CHARS, differences, load, to_json, validate
from jaxprorl.errors import ConfigError
from jaxprorl.files import write_atomically

QUESTIONS = ("outcome", "speed")
BUDGETS = ("completion_tokens", "updates", "prompts", "steps")
METRICS = ("held_out.solve_rate", "held_out.mean_score", "held_out.greedy_solve_rate", "validation.solve_rate")
# Fields that belong to the runs' bookkeeping: the harness sets some, none changes what a step computes.
OWN_FIELDS = ("run_name", "runs_dir", "seed", "steps", "budget.", "on_existing", "checkpoint.accept")
OWN = "set for every run by the harness; use name, ablations_dir, seeds and budget"
STAGED = "arms must share one prompt stream, and every stage begins an order of its own, after other numbers of prompts in other arms"
EVALUATION_FIELDS = ("data.", "evaluation.", "validation.items_per_task", "rollout.max_prompt_tokens", "rollout.max_response_tokens")
START_FIELDS = (
    "model.path", "model.hidden_size", "model.intermediate_size", "model.num_hidden_layers", "model.num_attention_heads",
    "model.num_key_value_heads", "model.head_dim", "model.rope_theta", "model.max_position_embeddings", "warmstart.",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """JSON types only, so that two plans can be compared field by field.

    Attributes:
        arms: name -> changes of the experiment, beside `fields`.
        comparisons: (arm, control), in the order of the report.
        minimum_detectable: mean difference of the metric that the design finds with probability `power` if paired differences have the
            standard deviation `paired_sd`, at the strictest level of the correction; None for "speed", or with one seed.
        configs: arm -> the resolved config, without OWN_FIELDS.
    """

    name: str
    experiment: str
    fields: list[str]
    arms: dict[str, list[str]]
    seeds: list[int]
    budget: dict[str, Any]
    question: str
    metric: str
    comparisons: list[list[str]]
    confidence: float
    correction: str
    power: float
    paired_sd: float
    minimum_detectable: float | None
    configs: dict[str, dict[str, Any]]

    @property
    def digest(self) -> str:
        """Hex sha256 of all of it."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()


def make_plan(settings: Mapping[str, Any]) -> Plan:
    """The plan of an ablation's config (`configs/ablations/base.py`, as a dict).

    Raises:
        ConfigError: the first field that cannot work.
    """
    _check(settings)
    _check_changes(settings)
    arms = {name: list(settings["arms"][name]) for name in sorted(settings["arms"], key=lambda name: (name != settings["control"], name))}
    configs = {name: _resolved(settings, f"arms.{name}", changes) for name, changes in arms.items()}
    _check_arms(settings, configs)
    names, control = list(arms), settings["control"]
    pairs = [[name, control] for name in names if name != control] if control else [[b, a] for a, b in combinations(names, 2)]
    seeds, correction = list(settings["seeds"]), settings["correction"]
    detectable = None
    if settings["question"] == "outcome" and len(seeds) > 1:
        level = first_level(len(pairs), 1 - settings["confidence"], correction)
        detectable = minimum_detectable(settings["paired_sd"], len(seeds), level, settings["power"])
    return Plan(
        name=settings["name"],
        experiment=settings["experiment"],
        fields=list(settings["fields"]),
        arms=arms,
        seeds=seeds,
        budget=dict(settings["budget"]),
        question=settings["question"],
        metric=settings["metric"],
        comparisons=pairs,
        confidence=settings["confidence"],
        correction=correction,
        power=settings["power"],
        paired_sd=settings["paired_sd"],
        minimum_detectable=detectable,
        configs=configs,
    )


def resolve(experiment: str, changes: Sequence[str], place: str) -> dict[str, Any]:
    """The experiment's config with changes, as `config.json` will hold it. `place` begins the message of an error.

    Raises:
        ConfigError: no such file or field, or a value of the wrong type.
    """
    return _as_json(_loaded(experiment, changes, place))


def without(config: Mapping[str, Any], fields: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """A nested config without some fields; a name that ends in a dot takes all below it."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        if path in fields or f"{path}." in fields:
            continue
        kept[name] = without(value, fields, f"{path}.") if isinstance(value, dict) else value
    return kept


def write_plan(path: Path, plan: Plan, begun: bool, why: str = "") -> list[dict[str, Any]]:
    """Writes the plan, or holds it against the one that is there.

    Args:
        begun: there are runs already; then the plan must be the same, unless `why` says why it is changed.

    Returns:
        The changes made since the first run: {"why", "fields", "digest" (of the plan before)}.

    Raises:
        ConfigError: names the fields that differ.
        StorageError: the plan cannot be written.
    """
    changes: list[dict[str, Any]] = []
    new = dataclasses.asdict(plan)
    if path.is_file():
        stored = json.loads(path.read_text())
        changes = stored["changes"]
        changed = [f"{field} was {old!r}, now {now!r}" for field, old, now in differences(stored["plan"], json.loads(json.dumps(new)))]
        if changed and begun:
            if not why:
                shown = "; ".join(change if len(change) < 200 else f"{change[:200]}…" for change in changed[:4])
                raise ConfigError(
                    f"{path}: the runs of this ablation were made under another plan ({shown}{' …' if len(changed) > 4 else ''}). "
                    "Go back to it, choose another --config.name, or say --changed='WHY' to go on: the report will tell of it"
                )
            changes.append({"why": why, "fields": changed, "digest": stored["digest"]})
    content = {"plan": new, "digest": plan.digest, "changes": changes}
    text = json.dumps(content, indent=2) + "\n"
    with storage.writing(path, len(text), "then give the same command again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return changes


def _resolved(settings: Mapping[str, Any], place: str, changes: Sequence[str]) -> dict[str, Any]:
    """An arm's config, as `Plan.configs` has it, after the checks that every run of it begins with."""
    config = _loaded(settings["experiment"], [*settings["fields"], *changes], place)
    try:
        validate(config)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    for field, value in (("mesh.cpu_devices", config.mesh.cpu_devices), ("batch.micro_batch_rows", config.batch.micro_batch_rows)):
        _require(value > 0, f"{place}: {field}", value, "name a number: a rule may choose another one for each arm and machine")
    return without(_as_json(config), OWN_FIELDS)


def _loaded(experiment: str, changes: Sequence[str], place: str) -> ConfigDict:
    try:
        return load([f"--config={experiment}", *(f"--config.{change}" for change in changes)])
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _as_json(config: ConfigDict) -> dict[str, Any]:
    resolved: dict[str, Any] = json.loads(to_json(config))
    return resolved


def _require(ok: bool, field: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{field} = {value!r}: {remedy}")


def _check(settings: Mapping[str, Any]) -> None:
    """Values that need no config of an arm."""
    name, arms, seeds = settings["name"], settings["arms"], tuple(settings["seeds"])
    for field, value in (("name", name), *((f"arms.{arm}", arm) for arm in arms)):
        _require(bool(re.fullmatch(r"[A-Za-z0-9][\w.]*", value)), field, value, "use letters, digits, '.' and '_' (it names a folder)")
        _require(len(value) <= MAX_NAME_CHARS // 2, field, value, f"use {MAX_NAME_CHARS // 2} characters at most (it names a folder)")
    _require(len(arms) >= 2, "arms", list(arms), "name at least two arms to compare")
    for arm, changes in (("fields", settings["fields"]), *((f"arms.{arm}", changes) for arm, changes in arms.items())):
        texts = isinstance(changes, list | tuple) and all(isinstance(change, str) and "=" in change for change in changes)
        _require(texts, arm, changes, 'use a tuple of changes, ("resets.every_steps=20",); () changes nothing')
    whole = all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    _require(bool(seeds) and whole and len(set(seeds)) == len(seeds), "seeds", seeds, "use different whole numbers from 0 to 2^32 - 1")
    budget = settings["budget"]
    _require(budget["kind"] in BUDGETS, "budget.kind", budget["kind"], f"choose one of {', '.join(BUDGETS)}")
    _require(budget["size"] > 0, "budget.size", budget["size"], f"must be greater than 0 ({budget['kind']})")
    for field, choices in (("question", QUESTIONS), ("metric", METRICS), ("correction", CORRECTIONS)):
        _require(settings[field] in choices, field, settings[field], f"choose one of {', '.join(choices)}")
    _require(settings["control"] in ("", *arms), "control", settings["control"], f"no such arm; there are {', '.join(arms)}")
    for field in ("confidence", "power"):
        _require(0 < settings[field] < 1, field, settings[field], "must lie inside 0 and 1")
    level = 1 - settings["confidence"]
    _require(settings["power"] > level, "power", settings["power"], f"must be above 1 - confidence = {level:.3g}")
    _require(settings["paired_sd"] > 0, "paired_sd", settings["paired_sd"], "must be greater than 0")


def _check_changes(settings: Mapping[str, Any]) -> None:
    """Changes that would take away what arms must share, by their fields' names."""
    for arm, changes in settings["arms"].items():
        for change in changes:
            field = change.split("=")[0]
            for group, why in (
                (OWN_FIELDS, OWN),
                ("stages", STAGED),
                (EVALUATION_FIELDS, "arms must be measured by the same evaluation on the same data"),
                (START_FIELDS, "arms must share their start weights; change it for all of them in fields"),
            ):
                _require(not field.startswith(group), f"arms.{arm}", change, f"{field}: {why}")
    for change in settings["fields"]:
        field = change.split("=")[0]
        ours = field.startswith(OWN_FIELDS) and field != "steps"
        _require(not ours, "fields", change, f"{field}: {OWN}")


def _check_arms(settings: Mapping[str, Any], configs: Mapping[str, dict[str, Any]]) -> None:
    """What only the configs tell: stages, the evaluation's reward, arms that are the same."""
    names = list(configs)
    for arm in names:
        named = [stage["name"] for stage in configs[arm]["stages"]]
        _require(not named, "stages", named, f'{STAGED}; take the experiment of one stage, or set "stages=()" in fields')
        for change in settings["arms"][arm]:
            set_apart = change.split("=")[0] != "reward" or bool(configs[arm]["evaluation"]["reward"])
            _require(set_apart, f"arms.{arm}", change, "set evaluation.reward in fields: evaluations must not use the arm's own reward")
    for a, b in combinations(names, 2):
        _require(configs[a] != configs[b], f"arms.{b}", list(settings["arms"][b]), f"is the same experiment as arm {a}")
    validated = all(config["validation"]["every_steps"] > 0 for config in configs.values())
    _require(validated or settings["metric"] != "validation.solve_rate", "metric", settings["metric"], "validation.every_steps is 0")
