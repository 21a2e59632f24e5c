"""One Parquet file per step."""

import numpy as np
import pytest

from jaxprorl.monitoring.samples import SCHEMA, group_rows, read_samples, remove_after, sample_path, write_samples
from jaxprorl.types import Completion, Group, Prompt, Score


def group() -> Group:
    prompt = Prompt(7, "arithmetic", np.array([1, 2], np.int32), "chain_sum", "9")
    first = Completion(7, 0, np.array([3, 4, 5], np.int32), np.zeros(3, np.float32), "stop", ((4, 0, 2), (5, 2, 3)))
    second = Completion(7, 1, np.array([], np.int32), np.zeros(0, np.float32), "aborted", ())
    scores = (Score(1.0, True, "scored", "exact", "1", 0.01), Score(0.0, False, "grader_error", "exact", "1", 5.0, "timeout"))
    return Group(prompt, (first, second), scores)


def test_rows_of_a_group_come_back_as_written(tmp_path):
    rows = group_rows(group(), "8 + 5 - 4 =", ["<b>9</b>", ""], kept=True, advantages=[0.5, -0.5])
    path = write_samples(tmp_path / "samples", 12, rows)
    assert path.name == "step_000012.parquet"
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file left
    first, second = read_samples(path)
    assert list(first) == SCHEMA.names
    assert first == {
        "step": 12,
        "prompt_id": 7,
        "domain": "arithmetic",
        "task": "chain_sum",
        "prompt": "8 + 5 - 4 =",
        "answer": "9",
        "sample": 0,
        "completion": "<b>9</b>",
        "response_tokens": 3,
        "finish_reason": "stop",
        "score": 1.0,
        "outcome": "scored",
        "grader": "exact",
        "grader_version": "1",
        "kept": True,
        "advantage": 0.5,
        "policy_version_first": 4,
        "policy_version_last": 5,
    }
    assert second["score"] is None  # a grader error is not a zero
    assert second["policy_version_first"] is None


def test_a_dropped_group_has_no_advantages():
    assert {row["advantage"] for row in group_rows(group(), "", ["", ""], kept=False, advantages=None)} == {None}


def test_same_rows_same_bytes_and_a_second_attempt_replaces(tmp_path):
    rows = group_rows(group(), "p", ["a", "b"], kept=False, advantages=None)
    first = write_samples(tmp_path, 1, rows).read_bytes()
    assert write_samples(tmp_path, 1, rows).read_bytes() == first
    assert read_samples(write_samples(tmp_path, 1, [])) == []


def test_wrong_columns_are_named(tmp_path):
    row = group_rows(group(), "p", ["a", "b"], kept=False, advantages=None)[0]
    del row["task"]
    with pytest.raises(ValueError, match=r"row 0: missing \['task'\], unknown \['taks'\]"):
        write_samples(tmp_path, 1, [{**row, "taks": "x"}])


def test_remove_after(tmp_path):
    for step in (1, 2, 3):
        write_samples(tmp_path, step, [])
    (tmp_path / ".step_000004.parquet.tmp").write_bytes(b"torn")
    removed = remove_after(tmp_path, 1)
    assert [path.name for path in removed] == ["step_000002.parquet", "step_000003.parquet", ".step_000004.parquet.tmp"]
    assert list(tmp_path.iterdir()) == [sample_path(tmp_path, 1)]
    assert remove_after(tmp_path / "none", 1) == []
