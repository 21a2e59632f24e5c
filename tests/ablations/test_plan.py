"""What may be planned, and that a plan stays what it was."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import tiny_ablation
from places import small_disk

from jaxprorl.ablations.analysis import minimum_detectable
from jaxprorl.ablations.plan import make_plan, without, write_plan
from jaxprorl.errors import ConfigError, StorageError

ROOT = Path(__file__).resolve().parents[2]


def settings(**changes: Any) -> dict[str, Any]:
    """The tiny ablation's, changed; `a__b` is the field b of a."""
    found: dict[str, Any] = tiny_ablation.get_config().to_dict()
    for name, value in changes.items():
        group, _, field = name.partition("__")
        if field:
            found[group][field] = value
        else:
            found[name] = value
    return found


def test_a_plan_says_who_is_compared_by_what_and_what_it_can_find() -> None:
    plan = make_plan(settings())
    assert list(plan.arms) == ["never", "broken", "often"], "the control first"
    assert plan.comparisons == [["broken", "never"], ["often", "never"]]
    assert plan.configs["often"]["resets"]["every_steps"] == 1
    assert plan.configs["never"]["checkpoint"]["every_steps"] == 1, "fields are for all arms"
    assert not {"seed", "steps", "run_name", "budget"} & set(plan.configs["never"])
    assert plan.minimum_detectable == pytest.approx(minimum_detectable(0.1, 2, 0.05 / 2, 0.8))
    uncorrected = make_plan(settings(correction="none"))
    assert uncorrected.minimum_detectable == pytest.approx(minimum_detectable(0.1, 2, 0.05, 0.8))
    assert make_plan(settings(control="")).comparisons == [["never", "broken"], ["often", "broken"], ["often", "never"]]
    assert make_plan(settings(seeds=(0,))).minimum_detectable is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "a/b"}, "name = 'a/b'"),
        ({"arms": {"never": ()}}, "at least two arms"),
        ({"arms": {"never": (), "same": ("resets.every_steps=0",)}}, "is the same experiment as arm never"),
        ({"arms__often": "resets.every_steps=1"}, "arms.often = 'resets.every_steps=1': use a tuple"),
        ({"arms__often": ("resets.every_stepz=1",)}, "arms.often: unknown field 'resets.every_stepz'"),
        ({"arms__often": ("resets.every_steps=x",)}, "arms.often: "),
        ({"arms__often": ("seed=3",)}, "seed: set for every run by the harness"),
        ({"arms__often": ("budget.updates=3",)}, "budget.updates: set for every run by the harness"),
        ({"arms__often": ("evaluation.temperature=0.5",)}, "measured by the same evaluation"),
        ({"arms__often": ("data.train_per_task=30",)}, "on the same data"),
        ({"arms__often": ("rollout.max_response_tokens=24",)}, "measured by the same evaluation"),
        ({"arms__often": ("model.hidden_size=64",)}, "share their start weights"),
        ({"arms__often": ("stages=()",)}, "stages: arms must share one prompt stream"),
        ({"experiment": "configs/prorl_tiny.py"}, "stages = ['"),
        ({"experiment": "tests/tiny_run.py:stages"}, "stages = ['one task', 'both', 'longer']: arms must share one prompt stream"),
        ({"arms__often": ("resets.optimizer=banana",)}, "arms.often: resets.optimizer = 'banana': choose one of"),
        ({"arms__often": ("resets.validation.on=True",)}, "arms.often: resets.validation.on = True: with resets.blind = True"),
        ({"fields": ("optimizer.b1=2.0",)}, "arms.never: optimizer.b1 = 2.0"),
        ({"fields": ("run_name=x",)}, "fields = 'run_name=x'"),
        ({"fields": ("evaluation.reward=",), "arms__often": ("reward=jaxprorl.rewards.puzzles:exact",)}, "set evaluation.reward in fields"),
        ({"control": "nobody"}, "no such arm"),
        ({"seeds": ()}, "seeds = ()"),
        ({"seeds": (1, 1)}, "seeds = (1, 1)"),
        ({"budget__kind": "seconds"}, "choose one of completion_tokens, updates, prompts, steps"),
        ({"budget__size": 0}, "budget.size = 0"),
        ({"metric": "reward"}, "metric = 'reward'"),
        ({"metric": "validation.solve_rate", "fields": ("validation.every_steps=0",)}, "validation.every_steps is 0"),
        ({"confidence": 95.0}, "confidence = 95.0"),
        ({"power": 0.01}, "must be above 1 - confidence = 0.05"),
        ({"paired_sd": 0.0}, "paired_sd = 0.0"),
        ({"experiment": "nowhere.py"}, "nowhere.py: no such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_at_once(changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        make_plan(settings(**changes))
    assert words in str(caught.value)


def test_a_staged_experiment_may_be_used_without_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = make_plan(settings(experiment="configs/prorl_tiny.py", fields=("stages=()", "resets.every_steps=0")))
    assert plan.configs["often"]["stages"] == []


def test_a_reward_may_be_an_arm_where_the_evaluation_has_its_own() -> None:
    plan = make_plan(settings(arms__often=("reward=jaxprorl.rewards.puzzles:exact",)))
    assert plan.configs["often"]["reward"].endswith(":exact")


@pytest.mark.parametrize("name", ["reset", "reset:small", "sharding", "sharding:2"])
def test_shipped_ablations_can_be_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from configs.ablations import reset, sharding

    monkeypatch.chdir(ROOT)
    file, _, argument = name.partition(":")
    module = {"reset": reset, "sharding": sharding}[file]
    get_config = module.get_config
    config = get_config(argument) if argument else get_config()
    plan = make_plan(config.to_dict())
    assert len(plan.arms) >= 4
    if name == "reset":
        assert len(plan.seeds) >= 5
        assert plan.minimum_detectable == pytest.approx(0.046, abs=5e-4), "the file says so"
    if module is reset:
        assert {arm: what_is_reset(config) for arm, config in plan.configs.items()} == {
            "never": (), "reference": ("reference",), "optimizer": ("optimizer",), "reference_and_optimizer": ("reference", "optimizer"),
        }  # fmt: skip
        assert {frozenset(pair) for pair in plan.comparisons} == {frozenset(pair) for pair in combinations(plan.arms, 2)}
        rates = [
            (c["optimizer"]["warmup_updates"], c["resets"]["warmup_updates"], c["optimizer"]["schedule"]) for c in plan.configs.values()
        ]
        assert rates == [(0, 0, "constant")] * 4, "no arm is also one of another learning rate"


def what_is_reset(config: dict[str, Any]) -> tuple[str, ...]:
    resets = config["resets"]
    taken = ("reference",) * resets["reference"] + ("optimizer",) * (resets["optimizer"] in ("all", "moments_and_bias"))
    assert resets["optimizer"] != "moments", "docs/resets.md: bias correction would believe in moments that are not there"
    return taken if resets["every_steps"] else ()


def test_a_plan_may_change_before_the_first_run_and_after_it_only_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "new/plan.json"
    first, second = make_plan(settings()), make_plan(settings(seeds=(0, 1, 2), metric="held_out.solve_rate"))
    assert first.digest != second.digest and first.digest == make_plan(settings()).digest
    assert write_plan(path, second, begun=False) == []
    assert write_plan(path, first, begun=False) == []
    stored = json.loads(path.read_text())
    assert stored["digest"] == first.digest and stored["plan"]["seeds"] == [0, 1]
    assert write_plan(path, first, begun=True) == []

    with pytest.raises(ConfigError, match=r"another plan .*metric was 'held_out.mean_score', now .*seeds was \[0, 1\], now \[0, 1, 2\]"):
        write_plan(path, second, begun=True)
    assert json.loads(path.read_text()) == stored, "untouched"
    (change,) = write_plan(path, second, begun=True, why="more seeds")
    assert change["why"] == "more seeds" and change["digest"] == first.digest
    assert any(field.startswith("seeds was") for field in change["fields"])
    assert write_plan(path, second, begun=True) == [change], "it is remembered"


def test_a_plan_that_a_full_disk_cannot_hold_is_one_line_with_what_is_free(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        (disk / "filler").write_bytes(bytes(2**20 - 4096))  # what is left takes the folder's own page, and no more
        with pytest.raises(StorageError, match=r"plan\.json cannot be written \(No space left on device\): .* needed, .* free there; make"):
            write_plan(disk / "plan.json", make_plan(settings()), begun=False)


def test_without_leaves_out_fields_and_groups() -> None:
    assert without({"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 4}}, ("a", "b.c", "e.")) == {"b": {"d": 3}}


@pytest.mark.parametrize("field", ["mesh.cpu_devices", "batch.micro_batch_rows"])
def test_sizes_that_a_rule_would_choose_for_each_arm_are_refused(field: str) -> None:
    changed = settings()
    changed["fields"] = (*changed["fields"], f"{field}=0")
    with pytest.raises(ConfigError, match=rf"arms\.never: {field} = 0: name a number"):
        make_plan(changed)
