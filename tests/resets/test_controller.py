import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from factories import tiny_config

from jaxprorl.resets import triggers
from jaxprorl.resets.controller import (
    BlindController,
    ControllerState,
    Decision,
    Gate,
    SightedController,
    from_json,
    make_controller,
)
from jaxprorl.resets.triggers import BlindSignals, EverySteps, Level, Signals, Stagnation, blind_signals
from jaxprorl.watch import control

KL = "kl.k3_median"


def controller(**changes: Any) -> Any:
    """Of the tiny config with changes of `resets`, `__` for the dot."""
    config = tiny_config()
    config.resets.update(_nested(changes))
    return make_controller(config)


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            nested.setdefault(section, {})[field] = value
        else:
            nested[section] = value
    return nested


def play(rules: Any, rows: Sequence[Mapping[str, float]], commands: Mapping[int, str] | None = None) -> list[ControllerState]:
    """The states before steps 1, 2, ... of a run with these metrics of steps 0, 1, ..."""
    states = [ControllerState()]
    for step, row in enumerate(rows, start=1):
        states.append(control(rules, states[-1], step, row, (commands or {}).get(step))[0])
    return states[1:]


def resets(states: Sequence[ControllerState]) -> list[tuple[int, str]]:
    return [(step, found.firing.trigger) for step, state in enumerate(states, start=1) if (found := state.due(step))]


def steps(count: int = 50, **changes: Any) -> list[int]:
    return [step for step, _ in resets(play(controller(**changes), [{}] * count))]


def test_a_reset_comes_every_n_steps_and_never_before_the_first() -> None:
    assert steps(every_steps=10, count=49) == [10, 20, 30, 40]
    assert steps(every_steps=1, count=5) == [1, 2, 3, 4, 5]
    assert steps(every_steps=50, count=49) == []
    assert EverySteps(1).observe((), BlindSignals(0, {})) == ((), None)


def test_nothing_switched_on_never_resets() -> None:
    assert steps() == []


def test_any_trigger_is_enough_and_the_others_are_told() -> None:
    states = play(controller(every_steps=4, at_steps=(3, 8)), [{}] * 9)
    assert resets(states) == [(3, "at_steps"), (4, "every_steps"), (8, "at_steps")]
    eighth = states[7].due(8)
    assert eighth and eighth.also == ("every_steps",)
    assert states[8].due(8) is None and states[8].decision is None, "a decision is of one boundary"


def test_the_cool_down_counts_from_the_last_reset() -> None:
    # 3 resets; 4, 5, 6 and 7 lie within 5 steps of it; 8 does not, and 9 to 12 are held back by it.
    assert steps(every_steps=1, at_steps=(3,), cooldown_steps=5, count=14) == [1, 6, 11]
    assert steps(at_steps=(3, 7, 8, 12, 13), cooldown_steps=5) == [3, 8, 13]


LASTING = {  # changes of `resets`, the metric, a value in order, a value that is not
    "entropy_collapse": (
        {"entropy_collapse__on": True, "entropy_collapse__floor": 0.2, "entropy_collapse__fall": 0.0},
        "entropy",
        1.0,
        0.15,
    ),
    "length": ({"length__on": True, "length__window": 5}, "response_tokens.mean", 10.0, 30.0),
    "repetition": ({"repetition__on": True}, "repetition.ngram_share", 0.1, 0.9),
    "stop_collapse": ({"stop_collapse__on": True}, "response.stop_share", 1.0, 0.2),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_level_that_lasts_is_one_reset_and_the_next_comes_once_it_has_been_left(name: str) -> None:
    changes, metric, good, bad = LASTING[name]
    rules = controller(**changes)

    def when(values: Sequence[float | None]) -> list[int]:
        return [step for step, _ in resets(play(rules, [{} if value is None else {metric: value} for value in values]))]

    assert when([good] * 100) == []
    assert when([good] * 30 + [bad] * 71) == [31]
    assert when([good] * 30 + [bad] * 3 + [None] * 2 + [bad] + [good] * 8 + [bad] * 3) == [31, 45], "what is absent leaves no level"


def test_a_level_that_begins_while_it_is_held_back_is_lost_until_it_begins_again() -> None:
    rules = controller(at_steps=(1,), cooldown_steps=5, repetition__on=True)
    rows = [{"repetition.ngram_share": share} for share in (0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.1, 0.9)]
    assert resets(play(rules, rows)) == [(1, "at_steps"), (10, "repetition")]


def test_a_reset_that_empties_a_baseline_makes_its_trigger_ready_again() -> None:
    rules = controller(at_steps=(4,), kl_spike__on=True, kl_spike__above=1.0, kl_spike__z=0.0)
    assert resets(play(rules, [{KL: value} for value in (0.1, 2.0, 0.1, 0.1, 2.0)])) == [(2, "kl_spike"), (4, "at_steps"), (5, "kl_spike")]


def test_the_maximum_holds_back_triggers_and_no_person() -> None:
    rules = controller(every_steps=2, max_resets=2, cooldown_steps=1)
    assert resets(play(rules, [{}] * 10)) == [(2, "every_steps"), (4, "every_steps")]
    assert resets(play(rules, [{}] * 10, {7: "why not"})) == [(2, "every_steps"), (4, "every_steps"), (7, "manual")]


def test_a_person_passes_the_cool_down_and_starts_it_anew() -> None:
    states = play(controller(every_steps=4, cooldown_steps=4), [{}] * 12, {5: "looks odd"})
    assert resets(states) == [(4, "every_steps"), (5, "manual"), (12, "every_steps")]
    decision = states[4].due(5)
    assert decision and (decision.firing.reads, decision.firing.reason) == ("person", "command: looks odd")


def test_a_decision_tells_what_it_saw_and_how_things_were() -> None:
    rows = [{KL: 0.1, "entropy": 1.0}] * 5 + [{KL: 2.0, "entropy": 0.5, "grad_norm": 3.0, "reward.mean": 0.1}]
    (decision,) = [s.decision for s in play(controller(kl_spike__on=True, kl_spike__above=1.0), rows) if s.decision]
    assert decision.firing.step == 6 and decision.firing.trigger == "kl_spike" and decision.firing.reads == "training"
    assert decision.firing.statistics == {
        "metric": KL,
        "value": 2.0,
        "median": None,
        "z": None,
        "observations": 5,
        "above": 1.0,
        "z_above": 6.0,
    }
    assert decision.before == {KL: 2.0, "entropy": 0.5, "grad_norm": 3.0}


def test_a_reset_empties_the_baselines_that_it_makes_void() -> None:
    rules = controller(at_steps=(4,), kl_spike__on=True, entropy_collapse__on=True)
    states = play(rules, [{KL: 0.1, "entropy": 1.0}] * 5)
    assert states[2].memories == {"at_steps": (), "kl_spike": (0.0, *[0.1] * 3), "entropy_collapse": (0.0, *[1.0] * 3)}
    assert states[3].memories == {"at_steps": (), "kl_spike": (), "entropy_collapse": (0.0, *[1.0] * 4)}
    assert states[4].memories["kl_spike"] == (0.0, 0.1)


def test_a_reset_that_leaves_the_reference_leaves_what_was_measured_against_it() -> None:
    rules = controller(reference=False, at_steps=(4,), kl_spike__on=True, blind=False, validation__on=True)
    rows = [{KL: 0.1, "validation.solve_rate": 0.5, "validation.items": 10}] * 4
    states = play(rules, rows)
    assert states[3].due(4) and states[3].memories["kl_spike"] == (0.0, *[0.1] * 4)
    assert states[2].memories["validation"] == (5, 10) * 3 and states[3].memories["validation"] == ()


def test_a_state_that_went_through_json_in_the_middle_goes_on_as_if_nothing_had_happened() -> None:
    rules = controller(
        every_steps=11, cooldown_steps=3, blind=False, validation__on=True, validation__patience=1,
        kl_spike__on=True, kl_spike__window=5, entropy_collapse__on=True, entropy_collapse__window=4, length__on=True, length__window=3,
    )  # fmt: skip
    rows = [
        {KL: 0.1 + 0.01 * (7 * i % 5) + (i == 28), "entropy": 1 / (20 + i), "response_tokens.mean": 10.0 + 30 * (i == 8)}
        | ({"validation.solve_rate": 0.9 - 0.02 * i, "validation.items": 1000} if i % 5 == 4 else {})
        for i in range(40)
    ]
    uninterrupted = play(rules, rows)
    assert {name for _, name in resets(uninterrupted)} == {"every_steps", "kl_spike", "length", "validation"}
    state = ControllerState()
    for step, row in enumerate(rows, start=1):
        state = from_json(json.loads(json.dumps(dataclasses.asdict(control(rules, state, step, row)[0]))))
        assert state == uninterrupted[step - 1] or _plain(state) == _plain(uninterrupted[step - 1])


def _plain(state: ControllerState) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(state)))


# --- blindness


def test_by_types_a_blind_controller_has_no_way_in_for_validation_results() -> None:
    assert typing.get_type_hints(BlindController.observe)["signals"] is BlindSignals
    assert not issubclass(Signals, BlindSignals)
    hints = typing.get_type_hints(BlindController)
    assert hints == {"triggers": Mapping[str, triggers.BlindTrigger], "gate": Gate, "reference": bool}
    for kind in typing.get_args(triggers.BlindTrigger):
        assert typing.get_type_hints(kind.observe)["signals"] is BlindSignals
        assert kind.reads in ("step", "training")
    assert Stagnation not in typing.get_args(triggers.BlindTrigger)
    for kind in (BlindController, BlindSignals, ControllerState, Decision, Gate, Level, Stagnation):
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name", ["validation.solve_rate", "validation.mean_score", "validation.items", "validation.chain_sum", "time.step_s"]
)
def test_blind_signals_cannot_be_made_with_a_validation_result_or_the_clock(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BlindSignals(3, {KL: 0.1, name: 0.5})
    assert blind_signals(3, {KL: 0.1, name: 0.5}) == BlindSignals(3, {KL: 0.1})


def test_a_blind_controller_refuses_other_signals_and_its_triggers_other_metrics() -> None:
    rules = controller(every_steps=2)
    with pytest.raises(TypeError, match="sees BlindSignals, not Signals"):
        rules.observe(ControllerState(), Signals(BlindSignals(1, {}), None))
    # A rule over a validation metric can be written down; it never finds one.
    poisoned = BlindController({"sly": Level("validation.solve_rate", above=0.0)}, Gate())
    assert resets(play(poisoned, [{"validation.solve_rate": 1.0}] * 5)) == []


def test_poisoned_validation_results_change_nothing_that_a_blind_controller_does() -> None:
    rules = controller(
        every_steps=7, kl_spike__on=True, kl_spike__above=1.0, entropy_collapse__on=True, length__on=True, repetition__on=True,
        stop_collapse__on=True, validation__on=True,
    )  # fmt: skip
    assert isinstance(rules, BlindController), "resets.blind builds no other, whatever else is on"
    rows = [{KL: 0.1 + (i == 9), "entropy": 1.0, "response_tokens.mean": 5.0 + i, "response.stop_share": 1.0} for i in range(20)]
    clean = play(rules, rows)
    assert resets(clean) == [(7, "every_steps"), (10, "kl_spike"), (14, "every_steps")]
    for poison in (0.0, 1.0, float("nan"), 1e300):
        results = {"validation.solve_rate": poison, "validation.mean_score": poison, "validation.items": 50, "validation.chain_sum": poison}
        assert play(rules, [row | results for row in rows]) == clean


def test_one_that_may_see_validation_does() -> None:
    rules = controller(blind=False, validation__on=True, validation__patience=1)
    assert isinstance(rules, SightedController)
    rows = [{"validation.solve_rate": rate, "validation.items": 1000} for rate in (0.5, 0.3, 0.3, 0.1)]
    states = play(rules, rows)
    # The first reset starts both blocks afresh: the validation after it is a new first one.
    assert resets(states) == [(2, "validation"), (4, "validation")]
    decision = states[1].due(2)
    assert decision and decision.firing.reads == "validation"
    assert resets(play(rules, [dict.fromkeys(row, 0.0) for row in rows])) == []  # no items, no validation
