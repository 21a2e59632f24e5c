import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from factories import tiny_config

from jaxprorl.config import validate
from jaxprorl.errors import ConfigError
from jaxprorl.fields import ALARMS
from jaxprorl.monitoring.alarms import AlarmState, from_json, make_alarms, observe
from jaxprorl.resets.controller import ControllerState, make_controller
from jaxprorl.resets.triggers import blind_signals
from jaxprorl.watch import control

KL = "kl.k3_median"
SPEED = "time.completion_tokens_per_s"


def config(**alarms: Any) -> Any:
    changed = tiny_config()
    changed.alarms.update(alarms)
    return changed


def acted(settings: Any, rows: Sequence[Mapping[str, float]]) -> list[tuple[int, str]]:
    """(step whose metrics they are, alarm); the state goes through JSON after every step."""
    state, found = AlarmState(), []
    for step, row in enumerate(rows):
        speed = row.get("time.completion_tokens_per_s")
        state, firings = observe(make_alarms(settings), state, blind_signals(step + 1, row), speed=speed)
        state = from_json(json.loads(json.dumps(dataclasses.asdict(state))))
        found += [(step, firing.trigger) for firing in firings]
    return found


def test_all_are_off_unless_switched_on_and_their_names_are_known() -> None:
    assert make_alarms(config()) == {}
    everything = config(**{name: {"action": "log"} for name in ALARMS})
    assert tuple(make_alarms(everything)) == ALARMS
    assert set(everything.alarms) == set(ALARMS)


@pytest.mark.parametrize(
    ("name", "fields", "rows", "expected"),
    [
        ("kl_spike", {"z": 0.0, "above": 0.5}, [{KL: 0.4}, {KL: 0.6}], [1]),
        ("kl_spike", {"window": 5}, [{KL: x} for x in (1, 2, 3, 4, 5, 6, 12, 30)], [7]),  # z of 12 is 8 / 1.4826
        ("entropy_collapse", {}, [{"entropy": x} for x in (0.06, 0.05, 0.04)], [2]),
        ("skipped_updates", {}, [{"updates.skipped": x} for x in (0, 0, 1)], [2]),
        ("zero_spread", {}, [{"groups.zero_spread_share": x} for x in (0.9, 1.0)], [1]),
        ("repetition", {}, [{"repetition.ngram_share": x} for x in (0.1, 0.9)], [1]),
        ("unique_tokens", {}, [{"repetition.unique_share": x} for x in (0.9, 0.2, 0.19, 0.1, 0.5, 0.1)], [2, 5]),
        ("unique_tokens", {}, [{"repetition.unique_share": x} for x in (0.9, 0.5, 0.2)], []),
        ("stalled_engine", {"window": 3}, [{SPEED: x} for x in (100, 1, 100, 100, 51, 49, 40, 100, 20)], [5, 8]),
        ("stalled_engine", {"window": 3}, [{SPEED: x} for x in (100, 90, 80, 70, 60, 50)], []),
        ("grader_errors", {}, [{"grader.error_share": x} for x in (0.0, 0.01, 0.02)], [2]),
        ("mismatch_trend", {"window": 5, "z": 2.0, "slope": 0.5}, [{"mismatch.mean": x} for x in (1, 2, 3, 4, 5)], [4]),
        ("mismatch_trend", {"window": 5, "z": 2.0, "slope": 0.5}, [{"mismatch.mean": x} for x in (1, 1, 1, 1, 50)], []),
    ],
)
def test_each_alarm_by_hand(name: str, fields: dict[str, Any], rows: list[dict[str, float]], expected: list[int]) -> None:
    assert acted(config(**{name: {"action": "log"} | fields}), rows) == [(step, name) for step in expected]


@pytest.mark.parametrize("action", ["log", "pause", "reset"])
def test_an_alarm_that_goes_on_ringing_acts_once(action: str) -> None:
    rows = [{"entropy": x} for x in (1.0, 0.01, 0.02, 0.03)] + [{}] + [{"entropy": x} for x in (0.01, 1.0, 0.01)]
    assert acted(config(entropy_collapse={"action": action}), rows) == [(1, "entropy_collapse"), (7, "entropy_collapse")]


def test_one_that_stops_a_run_stops_it_again_as_long_as_it_rings() -> None:
    rows = [{"entropy": x} for x in (1.0, 0.01, 0.02, 1.0)]
    assert acted(config(entropy_collapse={"action": "stop"}), rows) == [(1, "entropy_collapse"), (2, "entropy_collapse")]


def test_the_one_that_reads_the_clock_resets_nothing() -> None:
    with pytest.raises(ConfigError, match=r"alarms\.stalled_engine\.action = 'reset': choose one of off, log, pause, stop"):
        validate(config(stalled_engine={"action": "reset"}))
    alarms = make_alarms(config(**{name: {"action": "log"} for name in ALARMS}))
    assert [name for name, alarm in alarms.items() if alarm.reads_clock] == ["stalled_engine"]
    _, firings = observe(alarms, AlarmState({"stalled_engine": (100.0,) * 20}), blind_signals(1, {}), speed=10.0)
    assert [(firing.trigger, firing.reads) for firing in firings] == [("stalled_engine", "clock")]
    assert not any(character.isdigit() for character in firings[0].reason.replace("0.5", "")), "no measured time in the reason"


def test_no_alarm_sees_validation_or_a_step_time() -> None:
    settings = config(**{name: {"action": "log"} for name in ALARMS})
    clean = [{KL: 0.1, "entropy": 1.0}] * 3
    assert acted(settings, [row | {"validation.solve_rate": 1e9, "time.step_s": 1e9} for row in clean]) == acted(settings, clean) == []


def test_a_reset_empties_the_baseline_of_kl() -> None:
    alarms = make_alarms(config(kl_spike={"action": "log"}, mismatch_trend={"action": "log"}))
    signals = blind_signals(1, {KL: 0.1, "mismatch.mean": 0.2})
    assert observe(alarms, AlarmState(), signals)[0].memories == {"kl_spike": (0.1,), "mismatch_trend": (0.2,)}
    assert observe(alarms, AlarmState(), signals, reset=True)[0].memories == {"kl_spike": (), "mismatch_trend": (0.2,)}


def test_the_action_reset_is_a_trigger_under_the_same_cool_down() -> None:
    settings = config(zero_spread={"action": "reset"}, repetition={"action": "log"})
    settings.resets.cooldown_steps = 3
    rules, state, found = make_controller(settings), ControllerState(), []
    assert list(rules.triggers) == ["alarm.zero_spread"]
    for step, share in enumerate((1.0, 1.0, 0.1, 1.0, 1.0, 1.0, 0.1, 1.0), start=1):
        state, _ = control(rules, state, step, {"groups.zero_spread_share": share, "repetition.ngram_share": 1.0})
        found += [step] if state.due(step) else []
    assert found == [1, 4, 8], "once each time that it begins to ring"
