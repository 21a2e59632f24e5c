import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.data.jsonl import SPLITS, Line, assign, check_answers, read
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
        ('{"prompt": "a", "answer": "\\udfff"}', "answer: half of a surrogate pair"),
        ('{"prompt": "a", "answer": "b", "task": "\\ud800"}', "task is"),
        ('{"prompt": "a", "answer": "b", "x": {"y": ["fine", {"z": "\\ud800"}]}}', r"x\.y\[1\]\.z: half of a surrogate pair"),
        ('{"prompt": "a", "answer": "b", "x": {"\\ud800": 1}}', "the name of a field.*half of a surrogate pair"),
        # Doubled keys.
        ('{"prompt": "a", "answer": "b", "answer": "c"}', r'the field "answer" is given 2 times \("b", "c"\); keep one'),
        ('{"prompt": "a", "answer": "b", "answer": "b"}', 'the field "answer" is given 2 times'),
        ('{"prompt": "a", "answer": "b", "o": [{"k": 1, "k": 2, "k": 3}]}', r'the field "k" is given 3 times \(1, 2, 3\)'),
        ('{"prompt": [{"role": "user", "content": "a", "content": "b"}], "answer": "b"}', 'the field "content" is given 2 times'),
        # Names that metrics and reports have.
        *(
            (f'{{"prompt": "a", "answer": "b", "task": "{name}"}}', f'task is "{name}", a name that metrics and reports have')
            for name in ("mean_score", "solve_rate", "items", "completion_tokens", "mean", "all")
        ),
        ('{"prompt": "a", "answer": "b", "task": ""}', 'task is ""'),
        ('{"prompt": "a", "answer": "b", "task": "  "}', 'task is "  "'),
        ('{"prompt": "a", "answer": "b", "task": "a\\nb"}', "on one line"),
        ('{"prompt": "a", "answer": "b", "task": "a\\u001b[2J"}', "on one line"),
        # Numbers, depth, types.
        ('{"prompt": "a", "answer": "b", "x": 1e999}', "the number 1e999 is too large; write it as text"),
        ('{"prompt": "a", "answer": "b", "x": [-1E400]}', "the number -1E400 is too large"),
        ('{"prompt": "a", "answer": "b", "x": -Infinity}', "-Infinity is no number of JSON"),
        ('{"prompt": "a", "answer": "b", "x": ' + "7" * 5000 + "}", "a number of 5000 digits, 4300 at most"),
        ('{"prompt": "a", "answer": "b", "x": ' + "[" * 120 + "]" * 120 + "}", "x: more than 100 lists and objects in one another"),
        ('{"prompt": "a", "answer": 1.5}', 'answer is 1.5; write it as text, e.g. "1.5"'),
        ('{"prompt": "a", "answer": true}', 'answer is true; write it as text, e.g. "true"'),
        ('{"prompt": "a", "answer": ["b"]}', r'answer is \["b"\]; write it as text'),
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


def test_of_several_faulty_lines_the_first_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    rows = ['{"prompt": "fine", "answer": "1"}', "{", '{"prompt": "a"}', '{"prompt": "a", "answer": 3}', "[1]", "[2]"]
    (tmp_path / "q.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError) as caught:
        read(tmp_path / "q.jsonl")
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / 'q.jsonl'}, line 2: not JSON") and told.endswith("; and 2 more") and "\n" not in told
    assert "; line 3: the field answer is missing" in told and "; line 4: answer is 3" in told and "line 5" not in told


TEXT = '{"prompt": "6 * 7 =", "answer": "42"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no questions"),
        (b"\xef\xbb\xbf", "no questions"),
        (TEXT.encode("utf-16"), "UTF-16 or UTF-32; save it as UTF-8"),
        (TEXT.encode("utf-16-be"), "line 1 holds zero bytes; if it is UTF-16"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), "UTF-16; save it as UTF-8"),
        (TEXT.encode("utf-32"), "UTF-16 or UTF-32"),
        (gzip.compress(TEXT.encode()), r"a gzip file; unpack it \(gunzip\)"),
        (lzma.compress(TEXT.encode()), r"an xz file; unpack it"),
        (bz2.compress(TEXT.encode()), r"a bzip2 file; unpack it"),
        (b"PAR1" + bytes(8), "a Parquet file"),
        (json.dumps([json.loads(TEXT)] * 3).encode(), r"a JSON array; write one object a line \(jq -c '\.\[\]' .*q\.jsonl\)"),
        (b"\n " + json.dumps([json.loads(TEXT)] * 3, indent=1).encode(), "a JSON array; write one object a line"),
        (json.dumps(json.loads(TEXT), indent=2).encode(), r"an object goes over several lines; .*jq -c \. .*q\.jsonl"),
    ],
)
def test_files_of_another_form_are_told_by_what_they_are(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "q.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"q\.jsonl: {message}"):
        read(tmp_path / "q.jsonl")


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "q.jsonl")
    with pytest.raises(DataError, match=r"data\.source = 'jsonl:.*q\.jsonl': cannot read it, this is no regular file"):
        read(tmp_path / "q.jsonl")


def test_what_is_right_stays_right(tmp_path: Path) -> None:
    """Numbers, depth and names at their bounds."""
    row = {"prompt": "a", "answer": "", "task": "mean scores/b.c", "x": [1e308, 10**4000, {"all": "items"}], "deep": 1}
    for _ in range(98):
        row["deep"] = [row["deep"]]
    (line,) = read(_write(tmp_path, row))
    assert line.item.task == "mean scores/b.c" and line.item.item == {"x": row["x"], "deep": row["deep"]}


@pytest.mark.parametrize("answer", ["", " \n\t"])
def test_the_reward_decides_whether_an_answer_may_be_empty(tmp_path: Path, answer: str) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": answer}, {"prompt": "c", "answer": answer, "tests": []}]
    lines = read(_write(tmp_path, *rows))
    with pytest.raises(DataError, match=r'^.*q\.jsonl, line 2: answer is ".*": m:f needs one; line 3: answer is ".*": m:f needs one$'):
        check_answers(lines, tmp_path / "q.jsonl", True, "m:f")
    with pytest.raises(
        DataError, match=r'^.*q\.jsonl, line 2: answer is ".*": the line has no other field to grade by; .*NEEDS_ANSWER = False.*m:f$'
    ):
        check_answers(lines, tmp_path / "q.jsonl", None, "m:f")
    check_answers(lines, tmp_path / "q.jsonl", False, "m:f")


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
