"""Exact text decides which rows ask the same; what only looks alike is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import base
from jaxprorl.data.duplicates import Finding, check_disjoint, distinct_rows, exact_key, lines, prompt_ids
from jaxprorl.data.prompts import Item, question_hash
from jaxprorl.data.splits import SPLITS, Items, load_items, load_splits
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import DataError

LOOK_ALIKES = [
    ("5² =", "52 ="),
    ("Ab", "aB"),
    ("if x:\n    y = 1\nz = 2", "if x:\n    y = 1\n    z = 2"),
    ("What is a\u00a0b?", "What is a b?"),
    ("\uff11 + 1", "1 + 1"),
    ("straße", "strasse"),
    ("½ of 4", "1⁄2 of 4"),
]


def item(question: str, answer: str = "", place: str = "here", task: str = "t", **fields: Any) -> Item:
    return Item("d", task, ({"role": "user", "content": question},), answer, place, fields)


def config_of(folder: Path, rows: list[dict[str, Any]]) -> ConfigDict:
    file = folder / "q.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    config = base.get_config()
    config.data.source = f"jsonl:{file}"
    config.rollout.max_prompt_tokens = 200
    return config


def fillers(count: int = 12) -> list[dict[str, Any]]:
    return [{"prompt": f"filler {n}", "answer": str(n), "split": SPLITS[n % 3]} for n in range(count)]


def by_question(items: Items) -> dict[str, str]:
    return {one.question: name for name in SPLITS for one in getattr(items, name)}


@pytest.mark.parametrize(("first", "second"), LOOK_ALIKES)
def test_questions_that_look_alike_are_both_kept_in_one_split(tmp_path: Path, tokenizer: Tokenizer, first: str, second: str) -> None:
    assert question_hash(first) == question_hash(second)
    rows = [*fillers(), {"prompt": first, "answer": "25"}, {"prompt": second, "answer": "52"}]
    config = config_of(tmp_path, rows)
    items = load_items(config)
    placed = by_question(items)
    assert placed[first] == placed[second] and len(placed) == 14
    assert items.findings == ()
    splits = load_splits(config, tokenizer, items)
    found = {prompt.answer: prompt.prompt_id for prompt in getattr(splits, placed[first]) if prompt.answer in ("25", "52")}
    assert len(set(found.values())) == 2


def test_the_same_question_twice_is_kept_once_and_told_by_file_and_line(tmp_path: Path) -> None:
    rows = [*fillers(), {"prompt": "Ab", "answer": "1", "n": [1, {"a": 2}]}]
    items = load_items(config_of(tmp_path, [*rows, rows[-1], {"prompt": "aB", "answer": "1"}, rows[-1]]))
    file = tmp_path / "q.jsonl"
    assert items.findings == tuple(Finding("duplicate", f"{file}, line {n}", f"{file}, line 13") for n in (14, 16))
    assert list(lines(items.findings)) == [
        f"data: 2 rows left out, the same question is there already: {file}, line 14 as {file}, line 13; {file}, line 16 as {file}, line 13"
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"answer": "26"}, r"the answers are '25' and '26'"),
        ({"answer": "25 "}, r"the answers are '25' and '25 '"),
        ({"level": 4}, r"the field level is 3 and 4"),
        ({"extra": None}, r"the field extra is missing and null"),
        ({"answer": "x", "a": 1, "b": 2}, r"the answers are '25' and 'x', the field a is missing and 1 \(and 1 more fields\)"),
    ],
)
def test_two_answers_to_one_question_are_an_error_or_the_first_is_kept(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    row = {"prompt": "5² =", "answer": "25", "level": 3}
    config = config_of(tmp_path, [*fillers(), row, {**row, **change}])
    with pytest.raises(DataError, match=rf"q\.jsonl, line 13 and .*q\.jsonl, line 14: {told}.*data\.on_conflicting_answers = 'warn'"):
        load_items(config)
    config.data.on_conflicting_answers = "warn"
    items = load_items(config)
    assert [one.answer for name in SPLITS for one in getattr(items, name) if one.question == "5² ="] == ["25"]
    (finding,) = items.findings
    assert finding.kind == "conflict" and finding.place.endswith("line 14") and finding.other.endswith("line 13")
    (line,) = lines(items.findings)
    assert "line 14 as " in line and "another answer" in line


def test_of_many_conflicts_the_first_are_shown_and_the_others_counted() -> None:
    rows = [item("q", str(n), f"line {n}") for n in range(6)]
    with pytest.raises(DataError, match=r"line 0 and line 1: .*line 0 and line 2: .*line 0 and line 3: .*; and 2 more\."):
        distinct_rows(rows, "error")


def test_roles_and_the_bounds_of_messages_are_part_of_a_question() -> None:
    chats = [
        ({"role": "user", "content": "a\nb"},),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
        ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}),
    ]
    rows = [Item("d", "t", chat, str(n), f"line {n}") for n, chat in enumerate(chats)]
    assert len({exact_key(row) for row in rows}) == 3 and len({row.question for row in rows}) == 1
    assert distinct_rows(rows, "error") == (rows, [])


def test_look_alikes_over_splits_are_told_with_both_rows_and_kept(tmp_path: Path) -> None:
    rows = [*fillers(), {"prompt": "Ab", "answer": "1", "split": "train"}, {"prompt": "aB ", "answer": "2", "split": "held_out"}]
    items = load_items(config_of(tmp_path, rows))
    file = tmp_path / "q.jsonl"
    assert items.findings == (Finding("look_alike", f"{file}, line 14", f"{file}, line 13", "train and held_out"),)
    assert len(by_question(items)) == 14
    (line,) = lines(items.findings)
    assert line.startswith("data: 1 row like a question of another split ")
    assert line.endswith(f"both are kept: {file}, line 14 and {file}, line 13 (train and held_out)")


def test_the_same_question_in_two_splits_is_an_error_that_names_both_rows() -> None:
    check_disjoint({"train": [item("a"), item("a")], "validation": [item("b")], "held_out": []})
    splits = {
        "train": [item("a")],
        "validation": [item("b", place="V1"), item("c", place="V2")],
        "held_out": [item("c"), item("b", place="H")],
    }
    with pytest.raises(DataError, match=r"the splits validation and held_out share 2 questions, e\.g\. V2 and here: 'c'"):
        check_disjoint(splits)


def test_a_line_without_split_goes_where_one_that_looks_like_it_is(tmp_path: Path) -> None:
    for split in SPLITS:
        rows = [*fillers(), {"prompt": "AB", "answer": "2"}, {"prompt": "ab", "answer": "1", "split": split}]
        items = load_items(config_of(tmp_path, rows))
        assert by_question(items)["AB"] == by_question(items)["ab"] == split
        assert items.findings == ()


def test_ids_of_look_alikes_differ_and_do_not_depend_on_the_order() -> None:
    first, second, other = item("Ab"), item("aB"), item("c")
    alone = {one.question: prompt_ids({"train": [one]})["train"][0] for one in (first, second, other)}
    assert alone["Ab"] == alone["aB"], "the id of a question alone is that of all that look like it"
    orders = [[first, second, other], [other, second, first], [second, first, other]]
    ids = [dict(zip([one.question for one in order], prompt_ids({"train": order})["train"], strict=True)) for order in orders]
    assert ids[0] == ids[1] == ids[2] and len(set(ids[0].values())) == 3
    assert ids[0]["c"] == alone["c"] and alone["Ab"] in (ids[0]["Ab"], ids[0]["aB"])


def test_ids_of_a_split_do_not_depend_on_later_ones() -> None:
    held_out = [item("Ab"), item("c")]
    ids = prompt_ids({"held_out": held_out, "train": [item("aB"), item("AB"), item("d")]})
    assert ids["held_out"] == prompt_ids({"held_out": held_out})["held_out"]
    assert len({*ids["held_out"], *ids["train"]}) == 5


def test_lines_count_and_show_the_first() -> None:
    findings = [Finding("overlong", f"line {n}", detail="99 tokens") for n in range(5)] + [
        Finding("look_alike", "a", "b", "train and held_out")
    ]
    overlong, alike = lines(findings)
    assert "data: 5 rows left out, the prompt is longer than rollout.max_prompt_tokens: line 0 (99 tokens); " in overlong
    assert overlong.endswith("line 2 (99 tokens); and 2 more")
    assert alike.endswith("both are kept: a and b (train and held_out)")
