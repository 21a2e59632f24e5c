"""Recipes as configs: what stages make of a run's config, and what they may not."""

import json
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import base, prorl_1p5b, prorl_tiny, quickstart
from configs.base import stage
from jaxprorl import config as config_module
from jaxprorl import recipe
from jaxprorl.config import ConfigError
from jaxprorl.recipe import longest, stage_configs

ROOT = Path(__file__).resolve().parent.parent


def experiment(*rows: Any, **changes: Any) -> ConfigDict:
    """The quickstart with these stages; `__` for the dot."""
    c = quickstart.get_config()
    c.stages = rows
    for name, value in changes.items():
        *groups, field = name.split("__")
        section = c
        for group in groups:
            section = section[group]
        section[field] = value
    return c.lock()


def refusal(*rows: Any, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_module.validate(experiment(*rows, **changes))
    return str(caught.value)


def test_without_stages_the_config_is_its_own() -> None:
    config = experiment()
    assert stage_configs(config) == (config,)
    assert stage_configs(config)[0] is config


def test_each_stage_goes_by_its_changes_and_those_before_it() -> None:
    config = experiment(
        stage("z", 5),
        stage("a", 5, {"rollout.samples_per_prompt": 16, "data.mix": ("chain_sum",)}),
        stage("m", 5, {"rollout.samples_per_prompt": 8, "filtering.rules.arithmetic": "accuracy"}),
    )
    seen = [(c.rollout.samples_per_prompt, tuple(c.data.mix), c.filtering.rules.to_dict()) for c in stage_configs(config)]
    assert seen == [(8, (), {}), (16, ("chain_sum",), {}), (8, ("chain_sum",), {"arithmetic": "accuracy"})]
    assert all(c.is_locked for c in stage_configs(config))
    assert config.rollout.samples_per_prompt == 8 and not config.filtering.rules, "the run's own stays"
    config_module.validate(config)


def test_the_order_survives_json() -> None:
    config = experiment(*(stage(name, 5) for name in "zam"))
    back = ConfigDict(json.loads(config_module.to_json(config))).lock()
    assert [row.name for row in recipe.stages(back)] == ["z", "a", "m"]
    assert config_module.to_json(back) == config_module.to_json(config)
    assert [c.to_dict() for c in stage_configs(back)] == [json.loads(config_module.to_json(c)) for c in stage_configs(config)]


def test_what_differs_between_recipes_is_named_field_by_field() -> None:
    old, new = (
        json.loads(config_module.to_json(experiment(stage("one", 5, {"batch.prompts": 16}), *more))) for more in ((), (stage("two", 3),))
    )
    new["stages"][0]["changes"]["batch.prompts"] = 8
    found = [(field, was, is_) for field, was, is_ in config_module.differences(old, new)]
    assert found == [("stages.0.changes.batch.prompts", 16, 8), ("stages.1", None, new["stages"][1])]


def test_what_is_measured_is_measured_with_the_first_of_the_longest_limits() -> None:
    longer = {"rollout.max_response_tokens": 96, "batch.row_tokens": 120}
    configs = stage_configs(experiment(stage("a", 1), stage("b", 1, longer), stage("c", 1, {"batch.prompts": 16})))
    assert longest(configs) is configs[1]


# field, value -> what the message must hold beside stage and field.
FIXED = {
    "seed": (1, "one for the whole run; a stage may change fields of rollout., batch."),
    "steps": (1, "one for the whole run"),
    "model.dtype": ("bfloat16", "one for the whole run"),
    "mesh.strategy": ("fsdp", "one for the whole run"),
    "data.source": ("jsonl:x", "one for the whole run"),
    "alarms.kl_spike.action": ("log", "one for the whole run"),
    "rollout.max_prompt_tokens": (30, "rendered, and measured, once"),
    "rollout.engine": ("vllm", "one for the whole run: workers start once"),
    "rollout.vllm.workers": (2, "one for the whole run: workers start once"),
    "rollout.vllm.dtype": ("bfloat16", "one for the whole run: workers start once"),
    "resets.blind": (False, "blind as a whole or not at all"),
    "resets.manual": (False, "takes commands or takes none"),
    "resets.warmup_updates": (5, "another form"),
    "rollout.made_up": (1, "there is no such field"),
    "rollout.slots.deep": (1, "there is no such field"),
    "resets.kl_spike": ({"on": True}, "there is no such field"),
    "rollout.slots": ("many", " = 'many': must be a whole number, as 256 is"),
    "data.mix": ("chain_sum", " = 'chain_sum': must be a tuple, as () is"),
}


@pytest.mark.parametrize("field", FIXED)
def test_a_stage_may_not_change(field: str) -> None:
    value, words = FIXED[field]
    said = refusal(stage("early", 5), stage("late", 5, {field: value}))
    assert said.startswith(f"stages: stage 'late' changes {field}") and words in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.slots": 251}, "rollout.slots = 251: must divide by the 2 devices"),
        ({"rollout.max_response_tokens": 96}, "batch.row_tokens = 96: a row must hold the longest sequence"),
        ({"algorithm.advantage": "gae"}, "algorithm.advantage = 'gae': choose one of grpo"),
        ({"resets.kl_spike.on": True, "resets.kl_spike.z": 0.0}, "resets.kl_spike.z, above = (0.0, 0.0)"),
        ({"optimizer.learning_rate": -1.0}, "optimizer.learning_rate = -1.0: must be greater than 0"),
    ],
)
def test_the_config_of_every_stage_is_checked(changes: dict[str, Any], words: str) -> None:
    said = refusal(stage("early", 5), stage("late", 5, changes))
    assert said.startswith(f"stages: in stage 'late', {words}")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (stage("one", 5), "stage 'one': every stage needs a name of its own"),
        (stage("", 5), "stage '': every stage needs a name"),
        (stage(" two", 5), "stage ' two': every stage needs a name"),
        (stage("two", 0), "stage 'two': steps = 0: must be a whole number from 1 on"),
        (stage("two", 2.5), "stage 'two': steps = 2.5"),  # type: ignore[arg-type]
        (stage("two", 5, reset_optimizer="some"), "stage 'two': reset_optimizer = 'some': choose one of all"),
        (stage("two", 5, end="never"), "stage 'two': end = 'never': choose one of steps, plateau, manual"),
        ({"name": "two"}, "number 2 is {'name': 'two'}; make it with stage() of configs/base.py"),
        (stage("two", 5) | {"more": 1}, "number 2 is {'name': 'two'"),
        ("two", "number 2 is 'two'"),
        (stage("two", 5) | {"changes": [1]}, "stage 'two': changes = [1]: must be a mapping"),
        (stage("two", 5) | {"changes": "x"}, "stage 'two': changes = 'x': must be a mapping"),
        (stage("two", 5) | {"changes": {3: 3}}, "stage 'two' changes 3: fields are named by text"),
        (stage("two", 5) | {"name": 3}, "stage 3: name = 3: must be a text"),
        (stage("two", 5) | {"steps": True}, "stage 'two': steps = True: must be a whole number"),
        (stage("two", 5) | {"reset_reference": "no"}, "stage 'two': reset_reference = 'no': must be True or False"),
        (stage("two", 5) | {"reset_reference": 1}, "stage 'two': reset_reference = 1: must be True or False"),
        (stage("two", 5) | {"reset_optimizer": None}, "stage 'two': reset_optimizer = None: must be one of all"),
        (stage("two", 5) | {"end": ["steps"]}, "stage 'two': end = ['steps']: must be one of steps"),
        (stage("two", 5) | {"patience": 2.5}, "stage 'two': patience = 2.5: must be a whole number"),
        (stage("two", 5, end="plateau") | {"min_change": "x"}, "stage 'two': min_change = 'x': must be a number"),
        (stage("two", 5) | {"confidence": None}, "stage 'two': confidence = None: must be a number"),
    ],
)
def test_a_stage_that_is_none_is_refused(row: Any, words: str) -> None:
    assert refusal(stage("one", 5), row).startswith(f"stages: {words}")


def test_what_a_run_does_not_come_to_is_told() -> None:
    assert recipe.never_reached(experiment(steps=5)) == []
    rows = stage("one", 5), stage("two", 5, {"resets.at_steps": (4, 6)})
    assert recipe.never_reached(experiment(*rows, steps=6)) == []
    assert recipe.never_reached(experiment(*rows, steps=5)) == [
        "stages: 'two' begins after step 5, unless one before it ends early: never reached with steps = 5",
        "resets.at_steps: 6: never reached with steps = 5",
    ]


def test_a_mix_holds_names() -> None:
    assert "data.mix: 3 is no name of a domain or task" in refusal(stage("one", 5, {"data.mix": ("chain_sum", 3)}))
    assert "data.mix: 3 is no name of a domain or task" in refusal(data__mix=(3,))


def test_nothing_is_reset_at_the_start_of_a_run() -> None:
    assert "nothing can be reset at the start of the first stage" in refusal(stage("one", 5, reset_reference=True))


def test_a_plateau_is_refused_while_the_run_is_blind_or_could_not_come() -> None:
    flat = stage("flat", 200, end="plateau")
    assert "with resets.blind = True nothing may. Set resets.blind = False" in refusal(flat)
    sighted = {"resets__blind": False}
    config_module.validate(experiment(flat, **sighted))
    assert "there are no validations" in refusal(flat, validation__every_steps=0, **sighted)
    assert "patience = 0: must be a whole number" in refusal(flat | {"patience": 0}, **sighted)
    assert "confidence = 1.0: must lie inside 0 and 1" in refusal(flat | {"confidence": 1.0}, **sighted)
    assert "min_change = -0.1: must lie between" in refusal(flat | {"min_change": -0.1}, **sighted)
    assert "2 x patience = 6 validations, 20 steps apart" in refusal(flat | {"steps": 119}, **sighted)
    config_module.validate(experiment(flat | {"steps": 120}, **sighted))


def test_a_stage_that_waits_for_a_person_is_refused_where_none_is_heard() -> None:
    assert "with resets.manual = False the run takes no command" in refusal(stage("one", 5, end="manual"), resets__manual=False)


def test_domains_and_tasks_that_are_not_there_are_named_for_all_stages_at_once() -> None:
    said = refusal(stage("one", 5, {"data.mix": ("math", "chain_sum")}), stage("two", 5, {"data.mix": ("logic", "law")}))
    assert said.startswith("data.mix: law, math: there are no domains of these names that have data and graders (there are: logic)")


def test_the_eight_runs_are_refused_by_the_domains_they_lack_and_by_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    c = prorl_1p5b.get_config().lock()
    with pytest.raises(ConfigError, match=r"^data\.mix: code, instructions, math, stem: there are no domains"):
        config_module.validate(c)
    named = {name: lambda question: True for name in ("math", "code", "stem", "logic", "instructions")}
    monkeypatch.setattr(recipe, "DOMAINS", named)  # as if they were there
    with pytest.raises(ConfigError, match=r"^model\.path"):
        config_module.validate(c)
    c.model.path = str(tmp_path)
    config_module.validate(c)


def test_the_small_recipe_changes_what_the_large_one_does() -> None:
    large, small = prorl_1p5b.get_config(), prorl_tiny.get_config()
    assert [row["name"] for row in small.stages] == [row["name"] for row in large.stages] == [f"run {number}" for number in range(1, 9)]
    for before, after in zip(large.stages, small.stages, strict=True):
        assert before["changes"].keys() - {"rollout.slots", "batch.micro_batch_rows"} == after["changes"].keys()
        assert [before[name] for name in ("reset_reference", "reset_optimizer")] == [
            after[name] for name in ("reset_reference", "reset_optimizer")
        ]
    samples = [[c.rollout.samples_per_prompt for c in stage_configs(config)] for config in (large, small)]
    assert samples == [[16] * 5 + [32, 32, 16], [8] * 5 + [16, 16, 8]]
    assert large.steps == 2020 and small.steps == 100


def test_stages_are_left_out_by_an_override() -> None:
    config = config_module.load([f"--config={ROOT / 'configs/prorl_tiny.py'}", "--config.stages=()"])
    config_module.validate(config)
    assert recipe.stages(config) == ()
    assert base.get_config().stages == ()


def test_stages_that_would_need_several_sets_of_workers_are_refused() -> None:
    rows = stage("a", 2), stage("b", 2, {"rollout.max_response_tokens": 40}), stage("c", 2, {"rollout.slots": 64})
    told = refusal(*rows, rollout__engine="vllm")
    assert "stages, rollout.engine = 'vllm': they differ in rollout.max_response_tokens, rollout.slots, so each" in told
    recipe.check_engines(experiment(*rows))


def test_stages_share_workers_if_they_differ_in_what_an_engine_is_told() -> None:
    changes = {"rollout.samples_per_prompt": 4, "rollout.temperature": 1.0, "rollout.max_staleness": 1, "optimizer.learning_rate": 1e-6}
    recipe.check_engines(experiment(stage("a", 2), stage("b", 2, changes), rollout__engine="vllm"))
    recipe.check_engines(experiment(rollout__engine="vllm"))


def test_the_engine_of_the_first_stage_is_checked() -> None:
    """A stage may change fields of `rollout`, also the first one: then the run's own engine is never made."""
    row = stage("a", 2, {"rollout.min_response_tokens": 4})
    assert "rollout.min_response_tokens = 4 with rollout.engine = 'vllm'" in refusal(row, rollout__engine="vllm")
    row = stage("a", 2, {"rollout.slots": 250})
    assert "rollout.vllm.workers = 4: must divide rollout.slots = 250" in refusal(row, rollout__engine="vllm", rollout__vllm__workers=4)
