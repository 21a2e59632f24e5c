"""events.jsonl: kinds, fields, no clock."""

import math

import numpy as np
import pytest

from jaxprorl.monitoring.events import EVENTS, EventLog, read, truncate


def test_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append(3, "drop", prompt_ids=np.array([5, 2]), all_correct=np.int64(1))
        log.append(3, "reset", reason="schedule", reference=True, optimizer="all")
    assert path.read_text() == (
        '{"step": 3, "kind": "drop", "all_correct": 1, "prompt_ids": [5, 2]}\n'
        '{"step": 3, "kind": "reset", "optimizer": "all", "reason": "schedule", "reference": true}\n'
    )


def test_offset_and_truncate(tmp_path):
    path = tmp_path / "e"
    with EventLog(path) as log:
        log.append(1, "swap", policy_version=1)
        offset = log.offset()
        log.append(2, "swap", policy_version=2)
    truncate(path, offset)
    assert read(path) == [{"step": 1, "kind": "swap", "policy_version": 1}]


def test_unknown_kinds_are_refused(tmp_path):
    with EventLog(tmp_path / "e") as log, pytest.raises(ValueError, match=r"'rest'.*known: run_start"):
        log.append(1, "rest")


@pytest.mark.parametrize("name", ["seconds", "compile_s", "timestamp", "elapsed"])
def test_the_clock_is_only_in_time_fields(tmp_path, name):
    with EventLog(tmp_path / "e") as log:
        with pytest.raises(ValueError, match=name):
            log.append(0, "compile", **{name: 1.0})
        log.append(0, "compile", time_s=1.0)


def test_what_json_cannot_hold_is_refused_by_name(tmp_path):
    with EventLog(tmp_path / "e") as log:
        with pytest.raises(ValueError, match="'per_task'"):
            log.append(0, "validation", per_task={"a": math.nan})
        with pytest.raises(TypeError, match="'graders'"):
            log.append(0, "grader_errors", graders=object())
        assert log.offset() == 0


def test_every_kind_is_documented():
    assert all(meaning and fields for meaning, fields in EVENTS.values())
