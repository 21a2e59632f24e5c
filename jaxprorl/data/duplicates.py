"""Which questions are the same, and which only look alike.

Two rows of a file are the same question when all their messages are the same, roles and every character. Questions that differ in case,
white space or the form of letters alone (`5² =` and `52 =`, code with another indentation) look alike: both are kept. Look-alikes over two
splits are told of, since what is trained on should not be measured on.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxprorl.data.prompts import Item, question_hash
from jaxprorl.errors import DataError

SHOWN = 3  # places in an error or a warning
Kind = Literal["duplicate", "conflict", "overlong", "look_alike"]


@dataclass(frozen=True)
class Finding:
    """A row that was left out, or (`look_alike`) one that stays.

    Attributes:
        kind: why: another row asks the same (`duplicate`), and has another answer or other fields (`conflict`); or its prompt is too long.
        place: file and line, or task, seed and index.
        other: of the row that it was compared with, which is kept; "" for `overlong`.
        detail: in what they differ, or how long it is.
    """

    kind: Kind
    place: str
    other: str = ""
    detail: str = ""


def exact_key(item: Item) -> str:
    """Hex sha256 of all messages of a question, with their roles."""
    messages = [[message["role"], message["content"]] for message in item.messages]
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()


def distinct_rows(rows: Iterable[Item], on_conflict: str) -> tuple[list[Item], list[Finding]]:
    """The first row of every question, and what became of the others.

    Args:
        on_conflict: "error" or "warn", as `data.on_conflicting_answers`.

    Raises:
        DataError: two rows ask the same and differ in answer or fields, and `on_conflict` is "error"; names the rows.
    """
    kept: dict[str, Item] = {}
    findings = []
    for row in rows:
        first = kept.setdefault(exact_key(row), row)
        if first is not row:
            difference = _difference(first, row)
            findings.append(Finding("conflict" if difference else "duplicate", row.place, first.place, difference))
    conflicts = [finding for finding in findings if finding.kind == "conflict"]
    if conflicts and on_conflict == "error":
        shown = "; ".join(f"{finding.other} and {finding.place}: {finding.detail}" for finding in conflicts[:SHOWN])
        raise DataError(
            f"the same question twice, and not the same to be graded by: {shown}{_more(len(conflicts))}. Remove the wrong one, or set "
            "data.on_conflicting_answers = 'warn' to keep the first"
        )
    return list(kept.values()), findings


def check_disjoint(splits: Mapping[str, Sequence[Item]]) -> list[Finding]:
    """Refuses questions that two splits share; returns a finding for every row that looks like one of an earlier split.

    Raises:
        DataError: says how many rows of which splits ask the same, and names the first.
    """
    exact: dict[str, tuple[str, Item]] = {}  # the first holder of a question, and its split
    alike: dict[str, tuple[str, Item]] = {}
    shared, findings = [], []
    for name, items in splits.items():
        for item in items:
            split, first = exact.setdefault(exact_key(item), (name, item))
            if split != name:
                shared.append((split, first, name, item))
                continue
            split, first = alike.setdefault(question_hash(item.question), (name, item))
            if split != name:
                findings.append(Finding("look_alike", item.place, first.place, f"{split} and {name}"))
    if shared:
        split, first, name, item = shared[0]
        raise DataError(
            f"the splits {split} and {name} share {sum((row[0], row[2]) == (split, name) for row in shared)} questions, e.g. {first.place} "
            f"and {item.place}: {first.question[:200]!r}; what is trained on must not be measured on: remove them from one of the two"
        )
    return findings


def prompt_ids(splits: Mapping[str, Sequence[Item]]) -> dict[str, list[int]]:
    """A number for every question, from the question itself, below 2^31 so that random generators can fold it in.

    Of the look-alikes of a task, one has the number that it would have without the others: in the first split that holds any, the one with
    the smallest exact key. So ids do not depend on the order of rows, nor those of a split on the splits after it. (Where two numbers meet
    by chance, the next hash decides, and then the order counts.)
    """
    taken: set[int] = set()
    held: set[tuple[str, str, str]] = set()  # by a split before
    ids: dict[str, list[int]] = {}
    for name, items in splits.items():
        keys = [((item.domain, item.task, question_hash(item.question)), exact_key(item)) for item in items]
        smallest: dict[tuple[str, str, str], str] = {}
        for alike, exact in keys:
            smallest[alike] = min(exact, smallest.get(alike, exact))
        ids[name] = [
            _free_id([*alike] if alike not in held and exact == smallest[alike] else [*alike, exact], taken) for alike, exact in keys
        ]
        held |= smallest.keys()
    return ids


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line of text for each kind of finding: how many, and the first ones."""
    told = {
        "duplicate": ("left out, the same question is there already", "as"),
        "conflict": ("left out, the same question is there with another answer or other fields", "as"),
        "overlong": ("left out, the prompt is longer than rollout.max_prompt_tokens", ""),
        "look_alike": ("like a question of another split but for case, white space or the form of letters; both are kept", "and"),
    }
    for kind, (meaning, joint) in told.items():
        found = [finding for finding in findings if finding.kind == kind]
        if found:
            shown = "; ".join(
                " ".join(filter(None, (one.place, joint, one.other, f"({one.detail})" if one.detail else ""))) for one in found[:SHOWN]
            )
            yield f"data: {len(found)} {'row' if len(found) == 1 else 'rows'} {meaning}: {shown}{_more(len(found))}"


def _difference(first: Item, second: Item) -> str:
    """In what two rows differ that a reward can see; "" if in nothing."""
    parts = []
    if first.answer != second.answer:
        parts.append(f"the answers are {first.answer[:60]!r} and {second.answer[:60]!r}")
    names = [name for name in sorted({*first.item, *second.item}) if _text(first, name) != _text(second, name)]
    if names:
        values = " and ".join(_text(item, names[0])[:60] for item in (first, second))
        parts.append(f"the field {names[0]} is {values}" + f" (and {len(names) - 1} more fields)" * (len(names) > 1))
    return ", ".join(parts)


def _text(item: Item, name: str) -> str:
    return json.dumps(item.item[name], sort_keys=True) if name in item.item else "missing"


def _more(count: int) -> str:
    return f"; and {count - SHOWN} more" if count > SHOWN else ""


def _free_id(key: Sequence[str], taken: set[int]) -> int:
    for attempt in range(len(taken) + 1000):
        digest = hashlib.sha256(json.dumps([*key, attempt]).encode()).digest()
        prompt_id = int.from_bytes(digest[:4], "big") >> 1
        if prompt_id not in taken:
            taken.add(prompt_id)
            return prompt_id
    raise DataError(f"task {key[1]}: no free prompt id")
