"""Replays of runs that are written down by hand; those of real runs are in test_triggered_runs.py."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from factories import tiny_config

from configs.base import stage
from jaxprorl.config import to_json
from jaxprorl.errors import ConfigError, DataError
from jaxprorl.monitoring.events import EventLog
from jaxprorl.monitoring.metrics import MetricsLog
from jaxprorl.resets.replay import replay

ROOT = Path(__file__).resolve().parent.parent.parent
SERIES = (0.1, 0.2, 0.1, 0.9, 0.1, 0.1, 0.9, 0.1, 0.9)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A run with these KL values, resets as (step, trigger), and stages with their first steps; its config says every 4 steps."""

    def run(
        resets: Sequence[tuple[int, str]], first: int = 0, stages: Sequence[dict] = (), begun: Sequence[int] = (), **wrong: Any
    ) -> Path:
        (tmp_path / "config.json").write_text(to_json(tiny_config(resets__every_steps=4, stages=tuple(stages))))
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics, EventLog(tmp_path / "events.jsonl") as events:
            for step, value in enumerate(SERIES, start=first):
                metrics.append(step, {"kl.k3_median": value})
            for number, (step, stage) in enumerate(zip(begun, stages, strict=True), start=1):
                events.append(step, "stage", number=number, name=stage["name"], changes=stage["changes"])
            for step, trigger in resets:
                told: dict[str, Any] = {"signals": "step", "statistics": {}, "reason": "command: odd" if trigger == "manual" else "because"}
                told |= {"also": [], "reference": True, "optimizer": "none" if trigger == "stage" else "all"} | wrong
                events.append(step, "reset", trigger=trigger, **told)
        return tmp_path

    return run


def fired(result: Any) -> list[tuple[int, str, str]]:
    return [(entry.firing.step, entry.firing.trigger, entry.outcome) for entry in result.fired]


def test_the_runs_own_triggers(write: Write) -> None:
    result = replay(write([(4, "every_steps"), (8, "every_steps")]))
    assert fired(result) == [(4, "every_steps", "reset"), (8, "every_steps", "reset")]
    assert (result.last, result.differs_at, result.difference) == (9, None, "")


def test_what_is_held_back_and_what_comes_after_the_last_step_is_shown(write: Write) -> None:
    changes = {"kl_spike": {"on": True, "z": 0.0, "above": 0.5}, "every_steps": 0, "cooldown_steps": 4}
    result = replay(write([(4, "kl_spike")]), changes)
    # 0.9 in steps 3, 6 and 8: before 4, 7 (within the cool-down) and 9, which the run did not come to.
    assert fired(result) == [(4, "kl_spike", "reset"), (7, "kl_spike", "held back"), (9, "kl_spike", "reset")]
    assert (result.last, result.differs_at) == (9, None)


THREE_STAGES = (
    stage("one", 2),
    stage("two", 3, {"resets.every_steps": 0, "resets.kl_spike.on": True, "resets.kl_spike.z": 0.0, "resets.kl_spike.above": 0.5}),
    stage("three", 9, reset_reference=True),
)


def test_stages_are_followed_with_their_own_triggers_and_resets(write: Write) -> None:
    """0.9 in steps 3, 6 and 8: before 4 (stage two), 7 and 9 (stage three, which keeps these triggers)."""
    run = write([(4, "kl_spike"), (5, "stage"), (7, "kl_spike")], stages=THREE_STAGES, begun=(0, 2, 5))
    result = replay(run)
    assert fired(result) == [(4, "kl_spike", "reset"), (5, "stage", "reset"), (7, "kl_spike", "reset"), (9, "kl_spike", "reset")]
    assert (result.last, result.differs_at) == (9, None)


def test_changed_triggers_hold_in_all_stages_and_a_reset_of_theirs_adds_to_a_stages(write: Write) -> None:
    run = write([(4, "kl_spike"), (5, "stage"), (7, "kl_spike")], stages=THREE_STAGES, begun=(0, 2, 5))
    result = replay(run, {"at_steps": [4, 5], "cooldown_steps": 1})
    assert fired(result)[:4] == [
        (4, "at_steps", "reset"),
        (4, "kl_spike", "with at_steps"),
        (5, "stage", "reset"),
        (5, "at_steps", "with stage"),
    ]
    assert result.differs_at == 5 and result.difference == (
        "before step 5 the run has a reset by stage (reference True, optimizer 'none'), with these triggers there is a reset by stage "
        "(reference True, optimizer 'all')"
    )
    assert replay(run, {"kl_spike": {"on": False}}).differs_at == 4
    assert replay(run, {"cooldown_steps": 3}).differs_at == 7, "the stage's own reset began a cool-down"


def test_it_stops_at_the_first_reset_that_differs(write: Write) -> None:
    run = write([(4, "every_steps"), (8, "every_steps")])
    result = replay(run, {"kl_spike": {"on": True, "z": 0.0, "above": 0.5}})
    assert fired(result) == [(4, "every_steps", "reset"), (4, "kl_spike", "with every_steps"), (7, "kl_spike", "reset")]
    assert (result.last, result.differs_at) == (7, 7)
    assert (
        result.difference
        == "before step 7 the run has no reset, with these triggers there is a reset by kl_spike (reference True, optimizer 'all')"
    )
    missing = replay(run, {"every_steps": 8})
    assert (fired(missing), missing.differs_at) == ([], 4)
    assert (
        missing.difference
        == "before step 4 the run has a reset by every_steps (reference True, optimizer 'all'), with these triggers there is no reset"
    )


def test_a_run_whose_resets_are_of_something_else_differs(write: Write) -> None:
    result = replay(write([(4, "every_steps"), (8, "every_steps")], optimizer="none"))
    assert result.differs_at == 4 and "the run has a reset by every_steps (reference True, optimizer 'none')" in result.difference


def test_a_command_that_joined_a_stages_reset_is_replayed(write: Write) -> None:
    stages = (stage("one", 2, {"resets.every_steps": 0}), stage("two", 9, reset_reference=True))
    run = write([(2, "stage")], stages=stages, begun=(0, 2), also=["manual"], optimizer="all")
    result = replay(run)
    assert fired(result) == [(2, "stage", "reset"), (2, "manual", "with stage")]
    assert result.differs_at is None


def test_commands_are_taken_from_the_run(write: Write) -> None:
    result = replay(write([(2, "manual"), (4, "every_steps"), (8, "every_steps")]))
    assert fired(result) == [(2, "manual", "reset"), (4, "every_steps", "reset"), (8, "every_steps", "reset")]
    assert result.fired[0].firing.reason == "command: odd"
    assert result.differs_at is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"every_step": 3}, "every_step"),
        ({"kl_spike": {"onn": True}}, "onn"),
        ({"kl_spike": {"on": 1.5}}, "1.5"),
        ({"kl_spike": 3}, "the fields are those of resets"),
        ({"validation": {"on": True}}, r"resets\.blind = True"),
        ({"at_steps": [0]}, r"resets\.at_steps"),
        ({"at_steps": 3}, "at_steps"),
        ({"reference": False}, r"resets\.reference is no trigger"),
        ({"optimizer": "none"}, r"resets\.optimizer is no trigger"),
        ({"optimizer": "banana"}, r"resets\.optimizer is no trigger"),
        ({"warmup_updates": 10}, r"resets\.warmup_updates is no trigger"),
        ({"manual": False}, r"resets\.manual is no trigger"),
        ({"blind": False, "validation": {"on": True, "patience": 0}}, r"resets\.validation\.patience = 0: must be greater than 0"),
        ({"every_steps": -3}, r"resets\.every_steps = -3"),
        ({"cooldown_steps": -4}, r"resets\.cooldown_steps = -4"),
        ({"length": {"window": 0}}, r"resets\.length\.window = 0"),
        ({"kl_spike": {"metric": "nope"}}, r"resets\.kl_spike\.metric = 'nope': choose one of kl\.k1"),
        ({"validation": {"min_change": 7.0}}, r"resets\.validation\.min_change = 7\.0"),
        ({"entropy_collapse": {"fall": 1.5}}, r"resets\.entropy_collapse\.fall = 1\.5"),
        ({"kl_spike": {"z": float("nan")}}, r"resets\.kl_spike\.z = nan"),
    ],
)
def test_changes_that_cannot_be_are_refused(write: Write, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replay(write([]), changes)


def test_a_run_that_is_not_there_or_incomplete_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run there"):
        replay(tmp_path / "nowhere")
    with pytest.raises(DataError, match="every step from 0 on"):
        replay(write([], first=1))


def test_a_run_without_its_events_is_refused(write: Write) -> None:
    run = write([])
    (run / "events.jsonl").unlink()
    with pytest.raises(DataError, match=r"events\.jsonl: no such file"):
        replay(run)


def _without(path: str) -> str:
    content = tiny_config().to_dict()
    *groups, last = path.split(".")
    section = content
    for group in groups:
        section = section[group]
    del section[last]
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"resets": 3, "stages": []}', *map(_without, ("stages", "resets"))],
)
def test_a_config_that_is_torn_or_of_another_version_is_refused(write: Write, text: str) -> None:
    run = write([])
    (run / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json: "):
        replay(run)


@pytest.mark.parametrize("missing", ["resets.length", "alarms.repetition", "alarms.repetition.above", "alarms"])
def test_a_run_of_before_a_trigger_is_replayed_with_its_default(write: Write, missing: str) -> None:
    run = write([(4, "every_steps"), (8, "every_steps")])
    (run / "config.json").write_text(to_json(tiny_config()))
    whole = replay(run)
    (run / "config.json").write_text(_without(missing))
    assert replay(run) == whole


def test_the_command(write: Write) -> None:
    run = write([(4, "every_steps"), (8, "every_steps")])

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "launch/replay.py"), "--run", str(run), *arguments], capture_output=True, text=True
        )

    plain = command()
    assert plain.returncode == 0 and "valid for the whole run: steps 1 to 9" in plain.stdout
    changed = command("--triggers", json.dumps({"at_steps": [6]}))
    assert changed.returncode == 0 and "valid up to step 6 and not beyond" in changed.stdout and "at_steps: step 6" in changed.stdout
    for bad in ("[1", "3", '{"x": 1}'):
        refused = command("--triggers", bad)
        assert refused.returncode == 2 and refused.stderr.startswith("error: --triggers") and refused.stderr.count("\n") == 1
