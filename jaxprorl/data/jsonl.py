"""A user's own questions: one JSON object a line.

    {"prompt": "6 * 7 =", "answer": "42"}
    {"prompt": [{"role": "user", "content": "..."}], "answer": "A", "split": "held_out", "task": "quiz", "level": 3}

`prompt` is text or chat messages, `answer` the reference answer as text. `split` is train, validation or held_out; lines without
it are assigned by a hash of the question (80 / 10 / 10). `task` is the row in reports. All other fields reach the reward function
as `prompt.item`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxprorl.data.prompts import Item, question_hash
from jaxprorl.errors import DataError

SPLITS = ("train", "validation", "held_out")
ROLES = ("system", "user", "assistant")
DOMAIN = "jsonl"


@dataclass(frozen=True)
class Line:
    """One question of the file and the split it asks for (None = to be assigned)."""

    item: Item
    split: str | None


def read(path: str | Path) -> list[Line]:
    """All questions of the file, in its order; blank lines are skipped.

    Raises:
        DataError: names file, line, field and what is right.
    """
    file = Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"data.source = 'jsonl:{path}': cannot read the file ({error.strerror or error})") from error
    lines = []
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.strip():
            lines.append(_line(raw, f"{file}, line {number}"))
    if not lines:
        raise DataError(f"{file}: no questions; give one JSON object with prompt and answer a line")
    return lines


def assign(lines: list[Line], file: str) -> dict[str, list[Item]]:
    """Items per split. A question without `split` goes where its hash says, so that added lines move no other line.

    Only in a file so small that a split would stay empty do questions move: first the train question with the largest hash.

    Raises:
        DataError: a split stays empty and there is no question to give it.
    """
    chosen: dict[str, list[Item]] = {name: [] for name in SPLITS}
    hashed: dict[str, list[tuple[str, Item]]] = {name: [] for name in SPLITS}
    for line in lines:
        if line.split is not None:
            chosen[line.split].append(line.item)
            continue
        digest = question_hash(line.item.question)
        bucket = int(digest[:8], 16) % 10
        hashed["train" if bucket < 8 else "validation" if bucket == 8 else "held_out"].append((digest, line.item))
    for name in SPLITS:
        if chosen[name] or hashed[name]:
            continue
        for donor in ("train", "validation", "held_out"):
            digests = {digest for digest, _ in hashed[donor]}
            if len(digests) > (0 if chosen[donor] else 1):
                moved = max(digests)  # a question goes with its duplicates
                hashed[name] = [pair for pair in hashed[donor] if pair[0] == moved]
                hashed[donor] = [pair for pair in hashed[donor] if pair[0] != moved]
                break
        else:
            raise DataError(
                f'{file}: the split {name} has no questions. Add lines with "split": "{name}", or leave split out of at least '
                f"{len(SPLITS)} lines with different questions"
            )
    return {name: chosen[name] + [item for _, item in hashed[name]] for name in SPLITS}


def _line(raw: bytes, place: str) -> Line:
    try:
        row = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f'{place}: must be an object such as {{"prompt": "6 * 7 =", "answer": "42"}}')
    for name in ("prompt", "answer"):
        if name not in row:
            raise DataError(f"{place}: the field {name} is missing; fields found: {', '.join(row) or 'none'}")
    messages = _messages(row.pop("prompt"), place)
    answer, split, task = row.pop("answer"), row.pop("split", None), row.pop("task", DOMAIN)
    if not isinstance(answer, str):
        raise DataError(f"{place}: answer is {json.dumps(answer)[:80]}; write it as text, e.g. {json.dumps(json.dumps(answer))[:80]}")
    if split is not None and split not in SPLITS:
        raise DataError(f"{place}: split is {json.dumps(split)}; use one of {', '.join(SPLITS)}, or leave it out")
    if not isinstance(task, str) or not task:
        raise DataError(f"{place}: task is {json.dumps(task)[:80]}; write a name as text, or leave it out")
    return Line(Item(domain=DOMAIN, task=task, messages=messages, answer=answer, place=place, item=row), split)


def _messages(prompt: Any, place: str) -> tuple[dict[str, str], ...]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{place}: prompt must be text or a list of chat messages")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise DataError(f'{place}: prompt, message {number}: must be {{"role": ..., "content": ...}} and nothing else')
        if message["role"] not in ROLES:
            raise DataError(f"{place}: prompt, message {number}: role is {json.dumps(message['role'])[:80]}; use one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise DataError(f"{place}: prompt, message {number}: content must be text")
        try:
            message["content"].encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: prompt, message {number}: half of a surrogate pair (\\u escape) at character {error.start + 1}"
            ) from error
    if not any(message["content"].strip() for message in prompt):
        raise DataError(f"{place}: prompt is empty")
    return tuple(prompt)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
