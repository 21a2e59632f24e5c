"""The text that names a reward: `my_reward:score`, or a weighted sum such as `my_reward:score + 0.2 * my_reward:brevity`.

A part is `module:function`, or `pickle:"PATH"` for a function that no module holds (see `stored`).
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxprorl.errors import RewardError

SHAPE = (
    'expected "module:function", e.g. "jaxprorl.rewards.puzzles:exact" or "my_reward:score" for my_reward.py in this folder, or a weighted '
    'sum of such names, e.g. "my_reward:score + 0.2 * my_reward:brevity"'
)
_PART = re.compile(r"""(?:(?P<weight>[0-9][\w.]*(?:[eE][+-]?[0-9]+)?)\s*\*\s*)?(?P<name>pickle:"(?:[^"\\]|\\.)*"|[^\s+*"]+)""")
_SIGN = re.compile(r"\s*(?P<sign>[+-])\s*")


@dataclass(frozen=True)
class Part:
    """One function of a reward. `name` is `module:function` or `pickle:"PATH"`."""

    weight: float
    name: str

    @property
    def stored(self) -> Path | None:
        """The file of a function that no module holds."""
        return Path(json.loads(self.name.removeprefix("pickle:"))) if self.name.startswith('pickle:"') else None


def parse(spec: str) -> tuple[Part, ...]:
    """The parts of a reward's text, at least one.

    Raises:
        RewardError: `spec` has another form.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise RewardError(f"reward = {spec!r}: {SHAPE}")
    text, parts, at = spec.strip(), list[Part](), 0
    while at < len(text):
        sign = _SIGN.match(text, at)
        if parts and not sign:
            raise RewardError(f"reward = {spec!r}: {text[at:].strip()!r} follows {parts[-1].name!r} without + or -; {SHAPE}")
        found = _PART.match(text, sign.end() if sign else at)
        if not found:
            raise RewardError(f"reward = {spec!r}: no function is named at {text[at:]!r}; {SHAPE}")
        parts.append(Part(_weight(spec, found["weight"] or "1", sign is not None and sign["sign"] == "-"), found["name"]))
        at = found.end()
    return tuple(parts)


def render(parts: Sequence[Part]) -> str:
    """The text that `parse` turns into these parts."""
    text = ""
    for part in parts:
        sign = "-" if math.copysign(1.0, part.weight) < 0 else "+"
        size = abs(part.weight)
        term = part.name if size == 1 else f"{size!r} * {part.name}"
        text = f"{text} {sign} {term}" if text else (f"- {term}" if sign == "-" else term)
    return text


def _weight(spec: str, text: str, negative: bool) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise RewardError(f"reward = {spec!r}: the weight {text} is not a finite number")
    return -weight if negative else weight
