import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxprorl.data import jsonl
from jaxprorl.errors import ConfigError, DataError
from jaxprorl.prompt_file import told_by_index, write_prompts

ROW = {"prompt": "6 * 7 =", "answer": "42"}
CHAT = {
    "prompt": [{"role": "user", "content": "größer? \U0001f600\n\u2028 or not"}],
    "answer": "A",
    "split": "held_out",
    "task": "quiz",
    "tags": [1, None],
}


def test_a_folder_whose_name_nobody_can_have_is_refused(tmp_path: Path) -> None:
    for name in ("a\0b", "q" * 300):
        with pytest.raises(ConfigError, match=r"^prompts cannot be written to .*; set cache_dir to a folder that can$"):
            write_prompts([{"prompt": "6 * 7 =", "answer": "42"}], tmp_path / name)


def test_what_is_written_is_what_a_file_of_lines_says(tmp_path: Path) -> None:
    file = write_prompts([ROW, OrderedDict(CHAT)], tmp_path / "made")
    assert [json.loads(line) for line in file.read_text().splitlines()] == [ROW, CHAT]
    first, second = jsonl.read(file)
    assert (first.item.answer, second.split, second.item.item) == ("42", "held_out", {"tags": [1, None]})
    assert second.item.messages[0]["content"] == CHAT["prompt"][0]["content"]


def test_the_file_is_named_by_its_content_alone(tmp_path: Path) -> None:
    file = write_prompts(iter([ROW, CHAT]), tmp_path)
    written_ns = file.stat().st_mtime_ns
    assert write_prompts((ROW, CHAT), tmp_path) == file
    assert file.stat().st_mtime_ns == written_ns
    assert write_prompts([CHAT, ROW], tmp_path) != file
    file.write_text("torn")
    assert len(write_prompts([ROW, CHAT], tmp_path).read_text().splitlines()) == 2
    assert len(os.listdir(tmp_path)) == 2, "no scratch files"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.int64(3), "prompts[1].level is a numpy.int64, which JSON cannot hold"),
        ((1, 2), "prompts[1].level is a tuple"),
        ({"a": [0, {1, 2}]}, "prompts[1].level.a[1] is a set"),
        ({3: "x"}, "prompts[1].level has the key 3: names of fields are text"),
        (float("nan"), "prompts[1].level = nan: JSON has no such number"),
        (Decimal("1.5"), "prompts[1].level is a decimal.Decimal"),
        (b"x", "prompts[1].level is a bytes"),
        ({"not a name": -float("inf")}, "prompts[1].level['not a name'] = -inf"),
    ],
)
def test_what_json_would_change_or_cannot_hold_is_refused_by_index_and_field(value: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(told)}"):
        write_prompts([ROW, ROW | {"level": value}], tmp_path)
    assert not os.listdir(tmp_path)


def nested(depth: int, make: Callable[[Any], Any]) -> Any:
    """A value in so many lists or dicts."""
    value: Any = "x"
    for _ in range(depth):
        value = make(value)
    return value


def circle() -> dict[str, Any]:
    value: dict[str, Any] = {"a": [1]}
    value["a"].append(value)
    return value


def circle_of_lists() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        circle(),
        circle_of_lists(),
        nested(100, lambda value: [value]),
        nested(100, lambda value: {"a.b": value}),
        nested(20_000, lambda value: [value]),
    ],
    ids=["a circle", "a circle of lists", "lists", "dicts", "very deep"],
)
def test_what_is_too_deep_or_goes_in_a_circle_is_refused_as_in_a_file(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^prompts\[1\]\.level: more than 100 lists and dicts in one another$"):
        write_prompts([ROW, ROW | {"level": value}], tmp_path)
    assert not os.listdir(tmp_path)


def test_what_a_file_may_hold_at_the_deepest_is_taken(tmp_path: Path) -> None:
    deepest = nested(99, lambda value: [value])
    (line,) = jsonl.read(write_prompts([ROW | {"level": deepest}], tmp_path))
    assert line.item.item == {"level": deepest}
    (tmp_path / "deeper.jsonl").write_text(json.dumps(ROW | {"level": [deepest]}))
    with pytest.raises(DataError, match="line 1: level: more than 100 lists and objects in one another"):
        jsonl.read(tmp_path / "deeper.jsonl")


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([], "prompts is empty"), ({"prompt": "x"}, "prompts is a dict: give a list"), ("mine.jsonl", "prompts is a str: give a list"),
        (7, "prompts is a int"), ([ROW, "prompt"], r"prompts\[1\] is a str, .* frame.to_dict\('records'\)"),
        ([ROW, ("6 * 7 =", "42")], r"prompts\[1\] is a tuple, not a dict"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused(prompts: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        write_prompts(prompts, tmp_path)


def test_a_folder_that_cannot_be_written_is_named_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"prompts cannot be written to .*; set cache_dir"):
        write_prompts([ROW], tmp_path / "file")


def test_errors_name_the_question_and_not_the_file(tmp_path: Path) -> None:
    file = write_prompts([ROW, {"prompt": "6 * 7 ="}], tmp_path)
    with pytest.raises(DataError, match=r"^prompts\[1\]: the field answer is missing"), told_by_index(file):
        jsonl.read(file)
    with pytest.raises(DataError, match=f"^{re.escape(str(file))}, line 2"), told_by_index(None):
        jsonl.read(file)
    with pytest.raises(KeyError, match="other"), told_by_index(file):
        raise KeyError("other")
    with pytest.raises(ConfigError, match=r"^seed: other$"), told_by_index(file):
        raise ConfigError("seed: other")
