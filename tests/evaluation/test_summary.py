"""summary.json: its schema, and what peak memory counts."""

import json
import subprocess
import sys

import pytest
from factories import summary_of

from jaxprorl.evaluation.summary import build_summary, peak_memory_bytes, write_summary

BEFORE = summary_of({"a": [1.0, 0.0], "b": [0.0, 0.5]})
AFTER = summary_of({"a": [1.0, 1.0], "b": [1.0, 0.5]})
SECONDS = {"warm_start": 1.0, "rl": 2.0, "evaluation": 3.0, "total": 6.0}


def summary(**changes):
    values = {
        "before": BEFORE,
        "after": AFTER,
        "greedy_before": BEFORE,
        "greedy_after": AFTER,
        "steps": 80,
        "resets": 1,
        "completion_tokens_per_s": 8000.5,
        "seconds": SECONDS,
        "peak_memory_bytes": 123,
        "seed": 0,
    }
    return build_summary(**{**values, **changes})


def test_the_schema_is_exactly_what_scripts_expect(tmp_path):
    path = write_summary(tmp_path, summary())
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    read = json.loads(path.read_text())
    assert list(read) == [
        "before",
        "after",
        "steps",
        "resets",
        "completion_tokens_per_s",
        "seconds",
        "peak_memory_bytes",
        "seed",
        "greedy",
    ]
    for side in (read["before"], read["after"], read["greedy"]["before"], read["greedy"]["after"]):
        assert list(side) == ["solve_rate", "mean_score", "ci95", "ungraded", "per_task"]
        assert list(side["per_task"]) == ["a", "b"]
        assert all(list(part) == ["solve_rate", "mean_score", "ci95", "n", "ungraded"] for part in side["per_task"].values())
    assert read["before"]["solve_rate"] == 0.25
    assert read["before"]["mean_score"] == 0.375
    b = {"solve_rate": 0.5, "mean_score": 0.75, "ci95": AFTER["per_task"]["b"]["ci95"], "n": 2, "ungraded": 0}
    assert read["after"]["per_task"]["b"] == b
    assert read["seconds"] == SECONDS


def test_items_without_a_grade_are_counted_and_a_task_without_any_has_no_rate(tmp_path):
    after = summary_of({"a": [1.0, None], "b": [None, None]})
    read = json.loads(write_summary(tmp_path, summary(after=after)).read_text())["after"]
    assert (read["solve_rate"], read["ungraded"]) == (1.0, 3)
    assert read["per_task"]["b"] == {"solve_rate": None, "mean_score": None, "ci95": None, "n": 0, "ungraded": 2}


def test_an_evaluation_of_before_the_count_is_read(tmp_path):
    old = json.loads(json.dumps(BEFORE))
    for part in (old, *old["per_task"].values()):
        del part["ungraded"]
    assert summary(before=old) == summary()


def test_what_does_not_fit_the_schema_is_refused(tmp_path):
    with pytest.raises(ValueError, match="seconds has"):
        summary(seconds={"rl": 1.0})
    with pytest.raises(ValueError, match="after lacks the field 'mean_score'"):
        summary(after={"solve_rate": 1.0, "ci95": [0, 1], "per_task": {}})
    with pytest.raises(ValueError):
        write_summary(tmp_path, summary(completion_tokens_per_s=float("nan")))
    assert not (tmp_path / "summary.json").exists()


def test_peak_memory_counts_living_children_with_their_own_peak():
    alone = peak_memory_bytes()
    assert 10 * 2**20 < alone < 64 * 2**30
    code = "data = bytearray(b'x') * (200 * 2**20); del data; print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        together = peak_memory_bytes()
        child.communicate("\n")
    assert 200 * 2**20 < together - alone < 300 * 2**20  # the peak, though the memory is given back already
    assert peak_memory_bytes() - alone < 50 * 2**20
