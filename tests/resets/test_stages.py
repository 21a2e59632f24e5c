"""When stages end, and what is remembered across their boundaries: no run, no JAX."""

import dataclasses
import json
import typing

import pytest
from factories import tiny_config

from configs.base import stage
from jaxprorl import watch as watching
from jaxprorl.monitoring.alarms import AlarmState
from jaxprorl.recipe import stages
from jaxprorl.resets.controller import ControllerState, begin_stage, make_controller
from jaxprorl.resets.stages import RESET, BlindEnd, SightedEnd, StageState, from_json, make_ends, observe, what_resets
from jaxprorl.resets.triggers import Firing, Stagnation, Validation
from jaxprorl.watch import Watch

KL = "kl.k3_median"
# Two blocks of one validation: of 2,000 items with a rate of a half, the gain's interval reaches 1.4 / sqrt(2000) = 0.031 to both sides.
SIGHTED = SightedEnd(BlindEnd(10), Stagnation(patience=1, min_change=0.05, confidence=0.95, drop_only=False))
HALF = Validation(0.5, 2000)
OWN = Firing(8, RESET, "step", "stage two", {"ended_by": "steps"})


def ends(*rows: dict, **changes: object) -> tuple:
    config = tiny_config(stages=rows, **changes)
    return make_ends(stages(config), config.resets.blind)


def test_a_stage_ends_after_its_own_steps_whenever_it_began() -> None:
    (end,) = ends(stage("one", 3))
    for began in (0, 7):
        endings = [observe(end, StageState(), began, step).ending for step in range(began + 1, began + 4)]
        assert endings[:2] == [None, None]
        assert endings[2] == Firing(began + 3, "steps", "step", "after 3 steps", {"steps": 3})


def test_a_person_ends_any_stage_also_one_that_would_end_anyway() -> None:
    for end in ends(stage("one", 3), stage("two", 3, end="manual")):
        assert observe(end, StageState(), 0, 1, command="flat").ending == Firing(1, "manual", "person", "command: flat", {"steps": 1})
        told = observe(end, StageState(), 0, 3, command="flat").ending
        assert told and told.trigger == "manual"
    (_, manual) = ends(stage("one", 3), stage("two", 3, end="manual"))
    late = observe(manual, StageState(), 3, 6).ending
    assert late and late.trigger == "steps", "nobody came: its maximum"


def test_a_plateau_ends_a_stage_when_a_gain_can_be_ruled_out() -> None:
    state = observe(SIGHTED, StageState(), 0, 1, HALF)
    assert (state.memory, state.ending) == ((1000, 2000), None), "nothing to compare with"
    assert observe(SIGHTED, state, 0, 2).memory == state.memory, "no validation after this step"
    flat = observe(SIGHTED, state, 0, 2, HALF).ending
    assert flat and (flat.trigger, flat.reads, flat.statistics["kind"]) == ("plateau", "validation", "plateau")
    assert flat.statistics["change_high"] == pytest.approx(0.031, abs=5e-4)
    assert observe(SIGHTED, state, 0, 2, Validation(0.55, 2000)).ending is None, "0.05 + 0.031: a gain"
    assert observe(SIGHTED, StageState((50, 100)), 0, 2, Validation(0.5, 100)).ending is None, "too few items to tell"
    fallen = observe(SIGHTED, state, 0, 2, Validation(0.3, 2000)).ending
    assert fallen and fallen.statistics["kind"] == "drop"


def test_a_command_is_named_before_a_plateau_and_that_before_the_steps() -> None:
    state = StageState((1000, 2000))
    found = [
        observe(SIGHTED, state, 0, 10, validation, command).ending for validation, command in ((HALF, "now"), (HALF, None), (None, None))
    ]
    assert [ending.trigger for ending in found if ending] == ["manual", "plateau", "steps"]


def test_blind_ends_cannot_hold_or_be_given_validation_results() -> None:
    blind = ends(stage("one", 3), stage("two", 3, end="manual"))
    assert all(type(end) is BlindEnd for end in blind)
    assert [field.type for field in dataclasses.fields(BlindEnd)] == [int]
    hints = typing.get_type_hints(BlindEnd.observe)
    assert set(hints.values()) == {int, str | None, Firing | None}
    with pytest.raises(TypeError, match="sees no validation"):
        observe(blind[0], StageState(), 0, 1, HALF)
    with pytest.raises(ValueError, match="stage 'one': a blind recipe has no plateaus"):
        ends(stage("one", 30, end="plateau"))
    sighted = ends(stage("one", 3), stage("two", 30, end="plateau", patience=2, min_change=0.1, confidence=0.9), resets__blind=False)
    assert sighted == (BlindEnd(3), SightedEnd(BlindEnd(30), Stagnation(2, 0.1, 0.9, False)))


def test_rules_are_blind_only_if_all_stages_are() -> None:
    flat = stage("two", 200, end="plateau")
    blinds = {
        (): tiny_config(resets__blind=False),
        ("steps",): tiny_config(resets__blind=False, stages=(stage("one", 3), stage("two", 3))),
        ("plateau",): tiny_config(resets__blind=False, stages=(stage("one", 3), flat)),
        ("trigger",): tiny_config(resets__blind=False, stages=(stage("one", 3), stage("two", 3, {"resets.validation.on": True}))),
    }
    told = {name: {rules.blind for rules in watching.make_rules(config)} for name, config in blinds.items()}
    assert told == {(): {True}, ("steps",): {True}, ("plateau",): {False}, ("trigger",): {False}}


def test_what_a_blind_stage_is_shown_of_a_step_holds_no_validation() -> None:
    values = {"validation.solve_rate": 0.5, "validation.items": 2000.0}
    config = tiny_config(stages=(stage("one", 30),))
    rules = watching.make_rules(config)[0]
    assert watching.observe_stage(rules, Watch(), 0, 1, values) == Watch()
    config = tiny_config(resets__blind=False, stages=(stage("one", 30, end="plateau"),))
    assert watching.observe_stage(watching.make_rules(config)[0], Watch(), 0, 1, values).stage.memory == (1000, 2000)
    without = watching.make_rules(tiny_config())[0]
    assert watching.observe_stage(without, Watch(), 0, 10**6, values, "a command that slipped in") == Watch()


def test_through_json_and_back() -> None:
    for state in (StageState(), StageState((3, 10)), StageState((3, 10), OWN, {KL: 0.1 + 0.2})):
        assert from_json(json.loads(json.dumps(dataclasses.asdict(state)))) == state


# --- boundaries ------------------------------------------------------------------------------------------------------------------------

CONFIG = tiny_config(resets__every_steps=4)
CONFIG.resets.kl_spike.on = CONFIG.resets.entropy_collapse.on = True
CONFIG.alarms.kl_spike.action = CONFIG.alarms.mismatch_trend.action = "log"
RULES = make_controller(CONFIG)
REMEMBERED = {"kl_spike": (0.1,), "entropy_collapse": (1.0,)}


def test_a_stage_without_a_reset_leaves_the_triggers_as_they_are_unless_it_changes_something() -> None:
    state = ControllerState(REMEMBERED, 1, 4, None)
    assert begin_stage(RULES, state, 6, False, None, {}, False) == state
    assert begin_stage(RULES, state, 6, True, None, {}, False) == ControllerState({}, 1, 4, None), (
        "what was measured in another setting is void"
    )


def test_a_stages_reset_counts_and_empties_what_resets_empty() -> None:
    after = begin_stage(RULES, ControllerState(REMEMBERED, 1, 4, None), 8, False, OWN, {KL: 0.5}, True)
    assert (after.memories, after.resets, after.last_reset) == ({"entropy_collapse": (1.0,)}, 2, 8)
    decision = after.due(8)
    assert decision and (decision.firing, decision.also, decision.before) == (OWN, (), {KL: 0.5})
    assert begin_stage(RULES, ControllerState(REMEMBERED, 1, 4, None), 8, True, OWN, {}, True).memories == {}
    left = begin_stage(RULES, ControllerState(REMEMBERED, 1, 4, None), 8, False, OWN, {}, False)
    assert left.memories == REMEMBERED, "KL to a reference that stays is what it was"


def test_a_stages_reset_and_a_triggers_at_the_same_boundary_are_one() -> None:
    before, _ = watching.control(RULES, ControllerState(REMEMBERED, 1, 4, None), 8, {KL: 0.2})
    assert before.due(8) and before.resets == 2
    after = begin_stage(RULES, before, 8, True, OWN, {KL: 0.2}, True)
    decision = after.due(8)
    assert decision and (decision.firing.trigger, decision.also) == (RESET, ("every_steps",))
    assert after.resets == 2, "it is one reset"
    kept = begin_stage(RULES, before, 8, True, None, {}, False).due(8)
    assert kept and kept.firing.trigger == "every_steps", "without one of its own, the stage begins with the trigger's"


@pytest.mark.parametrize(
    ("own", "asked", "both"),
    [
        ((True, "none"), (True, "all"), (True, "all")),
        ((True, "all"), (False, "moments"), (True, "all")),
        ((True, "none"), (False, "moments_and_bias"), (True, "moments_and_bias")),
        ((False, "moments"), (True, "none"), (True, "moments")),
    ],
)
@pytest.mark.parametrize("trigger", ["manual", "every_steps"])
def test_a_reset_that_joins_a_stages_is_not_lost(
    own: tuple[bool, str], asked: tuple[bool, str], both: tuple[bool, str], trigger: str
) -> None:
    declared = stage("one", 8), stage("two", 8, reset_reference=own[0], reset_optimizer=own[1])
    config = tiny_config(
        stages=declared, resets__every_steps=8 if trigger == "every_steps" else 0, resets__reference=asked[0], resets__optimizer=asked[1]
    )
    rules, two = watching.make_rules(config)[1], stages(config)[1]
    watch = watching.observe_stage(rules, Watch(), 0, 8, {})
    alone = watching.begin_stage(rules, watch, False, OWN, own[0]).control.due(8)
    assert alone and what_resets(alone, config, two) == own
    watch, _ = watching.observe(rules, watch, 8, {}, "odd" if trigger == "manual" else None)
    decided = watch.control.due(8)
    assert decided and decided.firing.trigger == trigger and what_resets(decided, config, stages(config)[0]) == asked
    joined = watching.begin_stage(rules, watch, False, OWN, own[0]).control.due(8)
    assert joined and joined.firing.trigger == RESET and joined.also == (trigger,)
    assert what_resets(joined, config, two) == both


def test_alarms_forget_what_is_void_and_go_on_ringing() -> None:
    rules = watching.make_rules(CONFIG)[0]
    alarms = AlarmState({"kl_spike": (0.1,), "mismatch_trend": (0.2,)}, ("kl_spike",))
    ended = Watch(ControllerState(), alarms, StageState((1.0, 2.0), Firing(8, "steps", "step", "", {}), {KL: 0.1}))

    def after(changed: bool, reset: Firing | None, reference: bool = False) -> AlarmState:
        return watching.begin_stage(rules, ended, changed, reset, reference).alarms

    assert after(False, None) == alarms
    assert after(False, OWN) == alarms
    assert after(False, OWN, True) == AlarmState({"mismatch_trend": (0.2,)}, ("kl_spike",))
    assert after(True, None) == AlarmState({}, ("kl_spike",))
    assert watching.begin_stage(rules, ended, True, None).stage == StageState()


def test_the_gauges_of_the_last_step_wait_with_the_end_of_a_stage() -> None:
    rules = watching.make_rules(tiny_config(stages=(stage("one", 2), stage("two", 2))))[0]
    state = watching.observe_stage(rules, Watch(), 0, 2, {})
    state, _ = watching.observe(rules, state, 2, {KL: 0.5, "reward.mean": 1.0})
    assert state.stage.ending and state.stage.before == {KL: 0.5}
    assert watching.from_json(json.loads(json.dumps(watching.to_json(state)))) == state
