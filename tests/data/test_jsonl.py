import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.data.jsonl import SPLITS, Line, assign, read
from jaxprorl.data.prompts import Item
from jaxprorl.errors import DataError


def _write(folder: Path, *rows: Any) -> Path:
    file = folder / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _lines(count: int, split: str | None = None) -> list[Line]:
    return [Line(Item("jsonl", "jsonl", ({"role": "user", "content": f"question {i}"},), "", f"line {i}"), split) for i in range(count)]


def test_reads_fields(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file = _write(
        tmp_path,
        {"prompt": "6 * 7 =", "answer": "42"},
        {"prompt": chat, "answer": "", "split": "held_out", "task": "quiz", "level": 3, "tests": [[1, None]]},
    )
    first, second = read(file)
    assert first == Line(Item("jsonl", "jsonl", ({"role": "user", "content": "6 * 7 ="},), "42", f"{file}, line 1"), None)
    assert second == Line(Item("jsonl", "quiz", tuple(chat), "", f"{file}, line 2", {"level": 3, "tests": [[1, None]]}), "held_out")
    assert second.item.question == "s\nu"


def test_reads_bom_crlf_blank_lines_and_unicode_line_separators(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b", "answer": "1"}\r\n\r\n  \n{"prompt": "c", "answer": "2"}')
    lines = read(file)
    assert [line.item.question for line in lines] == ["a\u2028b", "c"]
    assert lines[1].item.place.endswith("line 4")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": "a", "answer": "b", "x": NaN}', "NaN"),
        ("[1]", "must be an object"),
        ('{"answer": "b"}', "the field prompt is missing; fields found: answer"),
        ("{}", "the field prompt is missing; fields found: none"),
        ('{"prompt": "a"}', "the field answer is missing"),
        ('{"prompt": "a", "answer": 42}', 'answer is 42; write it as text, e.g. "42"'),
        ('{"prompt": "a", "answer": null}', "answer is null"),
        ('{"prompt": "a", "answer": "b", "split": "test"}', 'split is "test"; use one of train, validation, held_out'),
        ('{"prompt": "a", "answer": "b", "split": 1}', "split is 1"),
        ('{"prompt": "a", "answer": "b", "split": []}', "split is \\[\\]"),
        ('{"prompt": "a", "answer": "b", "task": 5}', "task is 5"),
        ('{"prompt": "", "answer": "b"}', "prompt is empty"),
        ('{"prompt": 5, "answer": "b"}', "prompt must be text"),
        ('{"prompt": [], "answer": "b"}', "prompt must be text or a list"),
        ('{"prompt": ["a"], "answer": "b"}', "message 1: must be"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "message 1: must be"),
        ('{"prompt": [{"role": "human", "content": "a"}], "answer": "b"}', 'role is "human"; use one of system, user, assistant'),
        ('{"prompt": [{"role": [], "content": "a"}], "answer": "b"}', "role is"),
        ('{"prompt": [{"role": "user", "content": 1}], "answer": "b"}', "content must be text"),
        ('{"prompt": "\\ud800", "answer": "b"}', "surrogate"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"prompt": "fine", "answer": "1"}\n' + line)
    with pytest.raises(DataError, match=rf"q\.jsonl, line 2: .*{message}"):
        read(file)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_bytes(b'{"prompt": "\xff", "answer": "b"}')
    with pytest.raises(DataError, match=r"line 1: not UTF-8 \(byte 13"):
        read(tmp_path / "q.jsonl")


def test_missing_and_empty_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.source = 'jsonl:.*none.jsonl': cannot read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="cannot read"):
        read(tmp_path)
    (tmp_path / "q.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no questions"):
        read(tmp_path / "q.jsonl")


def test_shares_are_80_10_10() -> None:
    assigned = assign(_lines(5000), "q")
    assert sum(len(items) for items in assigned.values()) == 5000
    assert [round(len(assigned[name]) / 5000, 1) for name in SPLITS] == [0.8, 0.1, 0.1]


def test_assignment_ignores_order_and_other_lines() -> None:
    whole = {item.question: name for name, items in assign(_lines(500), "q").items() for item in items}
    half = {item.question: name for name, items in assign(_lines(500)[::-2], "q").items() for item in items}
    assert half.items() <= whole.items()


@given(st.integers(3, 30))
def test_small_files_fill_every_split(count: int) -> None:
    assigned = assign(_lines(count), "q")
    assert all(assigned.values())
    assert sorted(item.question for items in assigned.values() for item in items) == sorted(f"question {i}" for i in range(count))


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_lines(count: int) -> None:
    with pytest.raises(DataError, match=r"q: the split .* has no questions.*at least 3 lines"):
        assign(_lines(count), "q")


def test_duplicates_do_not_count_as_questions() -> None:
    with pytest.raises(DataError, match="has no questions"):
        assign(_lines(1) * 5, "q")


def test_duplicates_move_together() -> None:
    assigned = assign(_lines(3) * 2, "q")
    assert {name: len(items) for name, items in assigned.items()} == dict.fromkeys(SPLITS, 2)


def test_given_splits_are_kept_and_the_rest_fills_up() -> None:
    given_lines = _lines(4, "train")
    with pytest.raises(DataError, match=r'the split validation has no questions\. Add lines with "split": "validation"'):
        assign(given_lines, "q")
    rest = [Line(line.item, None) for line in _lines(6)[4:]]
    assigned = assign(given_lines + rest, "q")
    assert assigned["train"] == [line.item for line in given_lines]
    assert len(assigned["validation"]) == len(assigned["held_out"]) == 1
