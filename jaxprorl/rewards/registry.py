"""Rewards by name: `module:function`, called as `function(completion_text, prompt)`, or a weighted sum of such names (see `spec`).

A reward returns a finite real number, or a `Graded` (see `graded`). The module may also define
- `prepare()`, called once in each grader process before it grades (slow imports, model loading: not counted against the timeout);
- `DISTRIBUTIONS: tuple[str, ...]`, packages that decide its scores: their versions go into `reward_version`;
- `NEEDS_ANSWER: bool`, whether it compares with `prompt.answer`: True = no question may have an empty one, False = all may. Without it
  those may that bring other fields (`prompt.item`).
"""

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxprorl.errors import RewardError
from jaxprorl.rewards import stored
from jaxprorl.rewards.spec import SHAPE, Part, parse, render
from jaxprorl.types import Prompt

Reward = Callable[[str, Prompt], Any]  # users' functions may return anything; `graded.verdict` reads it


@dataclass(frozen=True)
class Weighted:
    """One function of a reward, with its weight in the sum."""

    weight: float
    function: Reward


def reward_spec(reward: Any, folder: Path) -> str:
    """The text, as in `config.reward`, of a reward that is given in Python.

    Args:
        reward: such a text; a function `(completion_text, prompt)`; or several of these, as a mapping to weights, as a sequence of
            (reward, weight) pairs, or as a sequence without weights, each of which then counts once.
        folder: where functions are stored that no module holds. The text names the file by this folder, so keep it.

    Raises:
        RewardError: it is none of these, a weight is no finite number, or a function cannot be stored.
        ConfigError: the folder cannot be written.
    """
    return render(_parts(reward, folder))


def _parts(reward: Any, folder: Path) -> tuple[Part, ...]:
    if isinstance(reward, str):
        return parse(reward)
    if isinstance(reward, Mapping):
        pairs = list(reward.items())
    elif isinstance(reward, Sequence) and not callable(reward):
        pairs = [each if isinstance(each, tuple) and len(each) == 2 else (each, 1.0) for each in reward]
    elif callable(reward):
        return (Part(1.0, _name(reward, folder)),)
    else:
        raise RewardError(
            f"reward is of type {type(reward).__name__}; give a function (completion_text, prompt), its name, or several of them"
        )
    if not pairs:
        raise RewardError("reward is empty; give at least one function")
    parts = list[Part]()
    for each, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise RewardError(f"reward: the weight {weight!r} of {getattr(each, '__name__', each)!r} is not a finite number")
        parts += [replace(part, weight=float(weight) * part.weight) for part in _parts(each, folder)]
    return tuple(parts)


def _name(reward: Reward, folder: Path) -> str:
    """`module:function` where that is the callable, else the name of the file that it is stored in."""
    module, name = getattr(reward, "__module__", None), getattr(reward, "__qualname__", None)
    _check_callable(reward, f"reward {name or type(reward).__name__}")
    if module and name and module != "__main__" and all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is reward:
            return f"{module}:{name}"
    return f"pickle:{json.dumps(str(stored.store(reward, folder)))}"


def load_parts(spec: str) -> tuple[Weighted, ...]:
    """The functions that `spec` names, with their weights. Modules beside the user (in the current directory) are importable.

    Raises:
        RewardError: `spec` has another form, or a module or function is missing or unfit.
    """
    return tuple(Weighted(part.weight, _function(part, spec)) for part in parse(spec))


def _function(part: Part, spec: str) -> Reward:
    if part.stored:
        _import_beside_the_user()
        stored_one: Reward = stored.load(part.stored, spec)
        _check_callable(stored_one, f"reward = {spec!r}: {part.stored}")
        return stored_one
    module, name = _load(part, spec)
    reward: Any = module
    for each in name.split("."):
        reward = getattr(reward, each, None)
    if reward is None:
        known = ", ".join(sorted(n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__)) or "none"
        raise RewardError(f"reward = {spec!r}: {_file(module)} has no {name!r}; functions there: {known}")
    _check_callable(reward, f"reward = {spec!r}: {name}")
    return reward


def _check_callable(reward: Any, begin: str) -> None:
    """Refuses what cannot be called with (completion_text, prompt); `begin` begins the message."""
    if not callable(reward):
        raise RewardError(f"{begin} is a {type(reward).__name__}, not a function (completion_text, prompt)")
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None)):  # noqa: B004
        raise RewardError(f"{begin} is async; a reward is a plain function (completion_text, prompt)")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some builtins have none; the first call will tell
        return
    try:
        signature.bind("", None)
    except TypeError as error:
        raise RewardError(f"{begin}{signature} is not callable with (completion_text, prompt): {error}") from error


def prepare_reward(spec: str) -> None:
    """Calls each module's `prepare()` if it has one. Errors of it pass through."""
    modules = [_load(part, spec)[0] for part in parse(spec) if not part.stored]
    for module in dict.fromkeys(modules):
        prepare = getattr(module, "prepare", None)
        if callable(prepare):
            prepare()


def needs_answer(spec: str) -> bool | None:
    """Whether some function's module says `NEEDS_ANSWER = True`; None if none does and some module does not say."""
    stated = [None if part.stored else getattr(_load(part, spec)[0], "NEEDS_ANSWER", None) for part in parse(spec)]
    return True if True in stated else None if None in stated else False


def reward_version(spec: str) -> str:
    """`SPEC@<12 hex digits>`: a hash over the sources of its modules, of what they use from their packages, and `DISTRIBUTIONS`.

    Of a stored function its file is hashed, which does not hold the modules that it uses.
    """
    digest = hashlib.sha256()
    for part in parse(spec):
        if part.stored:
            digest.update(part.stored.read_bytes())
            continue
        module, _ = _load(part, spec)
        for source in _sources(module):
            digest.update(source)
        for distribution in sorted(getattr(module, "DISTRIBUTIONS", ())):
            digest.update(f"{distribution}=={importlib.metadata.version(distribution)}\n".encode())
    return f"{spec}@{digest.hexdigest()[:12]}"


def _import_beside_the_user() -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end: a file of the user's must not shadow a library
    importlib.invalidate_caches()


def _load(part: Part, spec: str) -> tuple[ModuleType, str]:
    """Module and function name of a part of `spec`."""
    module_name, colon, name = part.name.partition(":")
    if not colon or not all(each.isidentifier() for each in (*module_name.split("."), *name.split("."))):
        raise RewardError(f"reward = {spec!r}: {SHAPE}")
    if module_name == "__main__":
        raise RewardError(f"reward = {spec!r}: grader processes cannot import __main__; put the function into a module of its own")
    _import_beside_the_user()
    try:
        return importlib.import_module(module_name), name
    except Exception as error:
        raise RewardError(
            f"reward = {spec!r}: cannot import {module_name!r} ({type(error).__name__}: {error}); "
            f"put {module_name.split('.')[0]}.py into {os.getcwd()} or install its package"
        ) from error


def _file(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _sources(module: ModuleType) -> list[bytes]:
    """Source bytes of `module` and of the modules in its top-level package from which it took something, sorted by name."""
    root = module.__name__.split(".")[0]
    names = {module.__name__}
    for value in vars(module).values():
        owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(owner, str) and owner.split(".")[0] == root:
            names.add(owner)
    files = [getattr(sys.modules.get(name), "__file__", None) for name in sorted(names)]
    return [Path(file).read_bytes() for file in files if file and Path(file).is_file()]
