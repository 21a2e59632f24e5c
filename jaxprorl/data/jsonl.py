"""A user's own questions: one JSON object a line.

    {"prompt": "6 * 7 =", "answer": "42"}
    {"prompt": [{"role": "user", "content": "..."}], "answer": "A", "split": "held_out", "task": "quiz", "level": 3}

`prompt` is text or chat messages, `answer` the reference answer as text; the reward decides whether it may be empty. `split` is
train, validation or held_out; lines without it are assigned by a hash of the question (80 / 10 / 10). `task` is the row in reports. All
other fields reach the reward function as `prompt.item`.
"""

import json
import math
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxprorl.data.prompts import Item, question_hash
from jaxprorl.errors import DataError
from jaxprorl.monitoring.metrics import TAKEN_BY_METRICS

SPLITS = ("train", "validation", "held_out")
ROLES = ("system", "user", "assistant")
DOMAIN = "jsonl"
TAKEN_NAMES = TAKEN_BY_METRICS | {"all"}  # no task's: metrics have them, and the row of all tasks in the result table
MAX_DEPTH = 100  # of lists and objects in one another: what Python's JSON and the way to the graders surely take
MAX_DIGITS = 4300  # of a whole number: Python reads no longer ones
SHOWN = 3  # faults in one error

# How files that are no text begin -> what they are.
_BEGINNINGS = {
    b"\x1f\x8b": "a gzip file; unpack it (gunzip)",
    b"\x28\xb5\x2f\xfd": "a zstd file; unpack it (unzstd)",
    b"BZh": "a bzip2 file; unpack it (bunzip2)",
    b"\xfd7zXZ": "an xz file; unpack it (unxz)",
    b"PK\x03\x04": "a zip file; unpack it (unzip)",
    b"PAR1": "a Parquet file; write its rows as JSON lines",
    b"\xff\xfe": "UTF-16 or UTF-32; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
    b"\x00\x00\xfe\xff": "UTF-32; save it as UTF-8",
    b"[": "a JSON array; write one object a line (jq -c '.[]' FILE)",
}


class _RefusedError(ValueError):
    """JSON that is read, but not taken."""


@dataclass(frozen=True)
class Line:
    """One question of the file and the split it asks for (None = to be assigned)."""

    item: Item
    split: str | None


def read(path: str | Path) -> list[Line]:
    """All questions of the file, in its order; blank lines are skipped.

    Raises:
        DataError: names file, line, field and what is right; of several faulty lines the first ones, and how many more.
    """
    file = Path(path)
    lines, faults = [], []
    for number, raw in enumerate(_content(file).split(b"\n"), start=1):
        if raw.strip():
            try:
                lines.append(_line(raw, f"{file}, line {number}"))
            except DataError as error:
                faults.append(str(error))
    _raise_if_any(faults, file)
    if not lines:
        raise DataError(f"{file}: no questions; give one JSON object with prompt and answer a line")
    return lines


def check_answers(lines: Sequence[Line], file: str | Path, needed: bool | None, reward: str) -> None:
    """Refuses empty answers that `reward` could not grade by.

    Args:
        needed: True = none may be empty, False = all may, None = those may whose line has other fields.

    Raises:
        DataError: names file and lines.
    """
    if needed is False:
        return
    unknown = f"the line has no other field to grade by; give one of the two, or put NEEDS_ANSWER = False into the module of {reward}"
    remedy = f"{reward} needs one" if needed else unknown
    empty = [line.item for line in lines if not line.item.answer.strip() and (needed or not line.item.item)]
    _raise_if_any([f"{item.place}: answer is {_shown(item.answer)}: {remedy}" for item in empty], Path(file))


def _raise_if_any(faults: Sequence[str], file: Path) -> None:
    """One error for all faulty lines: the first ones, and how many more there are."""
    if faults:
        others = [fault.removeprefix(f"{file}, ") for fault in faults[1:SHOWN]]
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise DataError("; ".join([faults[0], *others, *more]))


def assign(lines: Sequence[Line], file: str) -> dict[str, list[Item]]:
    """Items per split. A question without `split` goes where its hash says, so that added lines move no other line.

    Questions that look alike (`question_hash`) go together, and with one that has a `split`. Only in a file so small that a split would
    stay empty do questions move: first the train question with the largest hash.

    Raises:
        DataError: a split stays empty and there is no question to give it.
    """
    chosen: dict[str, list[Item]] = {name: [] for name in SPLITS}
    hashed: dict[str, list[tuple[str, Item]]] = {name: [] for name in SPLITS}
    digests = [question_hash(line.item.question) for line in lines]
    asked = {digest: line.split for digest, line in zip(reversed(digests), reversed(lines), strict=True) if line.split}  # the first counts
    for digest, line in zip(digests, lines, strict=True):
        split = line.split or asked.get(digest)
        if split is not None:
            chosen[split].append(line.item)
            continue
        bucket = int(digest[:8], 16) % 10
        hashed["train" if bucket < 8 else "validation" if bucket == 8 else "held_out"].append((digest, line.item))
    for name in SPLITS:
        if chosen[name] or hashed[name]:
            continue
        for donor in ("train", "validation", "held_out"):
            different = {digest for digest, _ in hashed[donor]}
            if len(different) > (0 if chosen[donor] else 1):
                moved = max(different)  # a question goes with those that look like it
                hashed[name] = [pair for pair in hashed[donor] if pair[0] == moved]
                hashed[donor] = [pair for pair in hashed[donor] if pair[0] != moved]
                break
        else:
            raise DataError(
                f'{file}: the split {name} has no questions. Add lines with "split": "{name}", or leave split out of at least '
                f"{len(SPLITS)} lines with different questions (case and white space alone make none)"
            )
    return {name: chosen[name] + [item for _, item in hashed[name]] for name in SPLITS}


def _content(file: Path) -> bytes:
    """The bytes of the file without a byte order mark."""
    try:
        kind = stat.S_IFMT(file.stat().st_mode)
        if kind != stat.S_IFREG:  # a pipe would be waited for, and is empty when the run goes on
            told = "a folder" if kind == stat.S_IFDIR else "no regular file"
            raise DataError(f"data.source = 'jsonl:{file}': cannot read it, this is {told}; name a file of JSON lines")
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data.source = 'jsonl:{file}': cannot read the file ({getattr(error, 'strerror', None) or error})") from error
    content = content.removeprefix(b"\xef\xbb\xbf")
    for beginning, what in _BEGINNINGS.items():
        if content.startswith(beginning) or (beginning == b"[" and content.lstrip().startswith(beginning)):
            raise DataError(f"{file}: {what.replace('FILE', str(file))}; it must be UTF-8 text, one JSON object a line")
    first, _, rest = content.lstrip().partition(b"\n")
    if b"\x00" in first:
        raise DataError(f"{file}: line 1 holds zero bytes; if it is UTF-16 or UTF-32, save it as UTF-8")
    if first.strip() == b"{" and rest.strip():
        raise DataError(f"{file}: an object goes over several lines; write one object a line (jq -c . {file})")
    return content


def _line(raw: bytes, place: str) -> Line:
    try:
        row = json.loads(
            raw.decode("utf-8"), parse_constant=_constant, parse_float=_float, parse_int=_int, object_pairs_hook=_distinct_keys
        )
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except _RefusedError as error:
        raise DataError(f"{place}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f'{place}: must be an object such as {{"prompt": "6 * 7 =", "answer": "42"}}')
    missing = [name for name in ("prompt", "answer") if name not in row]
    if missing:
        found = ", ".join(row).encode(errors="backslashreplace").decode()[:200]
        raise DataError(f"{place}: the field {missing[0]} is missing; fields found: {found or 'none'}")
    messages = _messages(row.pop("prompt"), place)
    answer, split, task = row.pop("answer"), row.pop("split", None), row.pop("task", DOMAIN)
    if not isinstance(answer, str):
        raise DataError(f"{place}: answer is {_shown(answer)}; write it as text, e.g. {_shown(json.dumps(answer))}")
    if split is not None and split not in SPLITS:
        raise DataError(f"{place}: split is {_shown(split)}; use one of {', '.join(SPLITS)}, or leave it out")
    if not isinstance(task, str) or not task.strip() or not task.isprintable():
        raise DataError(f"{place}: task is {_shown(task)}; write a name as text on one line, or leave it out")
    if task in TAKEN_NAMES:
        raise DataError(f"{place}: task is {_shown(task)}, a name that metrics and reports have already; choose another, e.g. {task}_task")
    _check_text(answer, "answer", place)
    _check_value(row, "", place)
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
            raise DataError(f"{place}: prompt, message {number}: role is {_shown(message['role'])}; use one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise DataError(f"{place}: prompt, message {number}: content must be text")
        _check_text(message["content"], f"prompt, message {number}", place)
    if not any(message["content"].strip() for message in prompt):
        raise DataError(f"{place}: prompt is empty")
    return tuple(prompt)


def _check_text(text: str, field: str, place: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {field}: half of a surrogate pair (\\u escape) at character {error.start + 1}") from error


def _check_value(value: Any, field: str, place: str, depth: int = 1) -> None:
    """Refuses what graders and logs could not be given, anywhere in the fields of `Prompt.item`."""
    if isinstance(value, str):
        _check_text(value, field, place)
    elif isinstance(value, dict | list):
        if depth > MAX_DEPTH:
            raise DataError(f"{place}: {field.split('.')[0].split('[')[0]}: more than {MAX_DEPTH} lists and objects in one another")
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            path = f"{field}[{name}]" if isinstance(value, list) else f"{field}.{name}".removeprefix(".")
            if isinstance(name, str):
                _check_text(name, f"the name of a field beside {', '.join(map(_shown, list(value)[:2]))}", place)
            _check_value(inner, path, place, depth + 1)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _constant(name: str) -> None:
    raise _RefusedError(f"{name} is no number of JSON; write null, a number or text")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError(f"the number {text[:40]} is too large; write it as text")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _RefusedError(f"a number of {len(text)} digits, {MAX_DIGITS} at most are read; write it as text")
    return int(text)


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        values = [_shown(value) for name, value in pairs if name == twice]
        raise _RefusedError(f"the field {_shown(twice)} is given {len(values)} times ({', '.join(values)[:120]}); keep one")
    return row
