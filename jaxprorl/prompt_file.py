"""Questions that Python hands over, as a file like any other: resume and sample.py know no difference."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxprorl.data.jsonl import MAX_DEPTH
from jaxprorl.errors import ConfigError, DataError, UserError
from jaxprorl.files import write_atomically


def write_prompts(prompts: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """The JSON-lines file of these questions in `folder`, named by its content.

    Args:
        prompts: dicts with the fields that a line of `data.source = "jsonl:PATH"` has (data/jsonl.py).

    Raises:
        DataError: names the question by its index, and the field that JSON cannot hold.
        ConfigError: the folder cannot be written.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise DataError(f'prompts is a {type(prompts).__name__}: give a list of dicts such as {{"prompt": "6 * 7 =", "answer": "42"}}')
    rows = list(prompts)
    if not rows:
        raise DataError('prompts is empty: give at least three dicts such as {"prompt": "6 * 7 =", "answer": "42"}')
    content = "".join(_line(row, f"prompts[{index}]") for index, row in enumerate(rows)).encode()
    file = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    try:
        if not file.is_file() or file.read_bytes() != content:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, content)
    except (OSError, ValueError) as error:  # the latter of a name with a NUL character
        raise ConfigError(f"prompts cannot be written to {file} ({error}); set cache_dir to a folder that can") from error
    return file


@contextmanager
def told_by_index(file: Path | None) -> Iterator[None]:
    """Errors that name a line of the file name the question by its index instead, as the caller knows it."""
    try:
        yield
    except UserError as error:
        if file is None or str(file) not in str(error):
            raise
        text = re.sub(rf"{re.escape(str(file))}, line (\d+)", lambda found: f"prompts[{int(found[1]) - 1}]", str(error))
        raise type(error)(text.replace(str(file), "prompts")) from None


def _line(row: Any, place: str) -> str:
    if not isinstance(row, Mapping):
        frame = "; of a data frame, give frame.to_dict('records')" if isinstance(row, str) else ""
        raise DataError(f'{place} is a {type(row).__name__}, not a dict such as {{"prompt": "6 * 7 =", "answer": "42"}}{frame}')
    _require_json(dict(row), (place,))
    return json.dumps(dict(row)) + "\n"


def _require_json(value: Any, path: tuple[str, ...]) -> None:
    """Refuses what would come back from JSON as something else, or not at all.

    Args:
        path: of the value: the question, its field, and what leads on from there.
    """
    place = "".join(path)
    if isinstance(value, dict | list) and len(path) > MAX_DEPTH:  # a cycle too
        raise DataError(f"{''.join(path[:2])}: more than {MAX_DEPTH} lists and dicts in one another")
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise DataError(f"{place} has the key {name!r}: names of fields are text")
            _require_json(inner, (*path, f".{name}" if name.isidentifier() else f"[{name!r}]"))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _require_json(inner, (*path, f"[{index}]"))
    elif isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{place} = {value!r}: JSON has no such number; write it as text, or leave the field out")
    elif not (value is None or isinstance(value, str | int | float)):
        kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        raise DataError(f"{place} is a {kind}, which JSON cannot hold; give text, a number, true or false, None, a list or a dict")
