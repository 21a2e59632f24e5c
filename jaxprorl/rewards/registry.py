"""Rewards by name: `module:function`, called as `function(completion_text, prompt) -> float in [0, 1]`.

The module may also define
- `prepare()`, called once in each grader process before it grades (slow imports, model loading: not counted against the timeout);
- `DISTRIBUTIONS: tuple[str, ...]`, packages that decide its scores: their versions go into `reward_version`;
- `NEEDS_ANSWER: bool`, whether it compares with `prompt.answer`: True = no question may have an empty one, False = all may. Without it
  those may that bring other fields (`prompt.item`).
"""

import hashlib
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from jaxprorl.errors import RewardError
from jaxprorl.types import Prompt

Reward = Callable[[str, Prompt], float]

_SHAPE = 'expected "module:function", e.g. "jaxprorl.rewards.puzzles:exact" or "my_reward:score" for my_reward.py in this folder'


def load_reward(spec: str) -> Reward:
    """The function that `spec` names. Modules beside the user (in the current directory) are importable.

    Raises:
        RewardError: `spec` has another form, or its module or function is missing or unfit.
    """
    module, name = _load(spec)
    reward = getattr(module, name, None)
    if reward is None:
        known = ", ".join(sorted(n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__)) or "none"
        raise RewardError(f"reward = {spec!r}: {_file(module)} has no {name!r}; functions there: {known}")
    if not callable(reward):
        raise RewardError(f"reward = {spec!r}: {name} is a {type(reward).__name__}, not a function (completion_text, prompt) -> float")
    if inspect.iscoroutinefunction(reward):
        raise RewardError(f"reward = {spec!r}: {name} is async; a reward is a plain function (completion_text, prompt) -> float")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some builtins have none; the first call will tell
        return reward
    try:
        signature.bind("", None)
    except TypeError as error:
        raise RewardError(f"reward = {spec!r}: {name}{signature} is not callable with (completion_text, prompt): {error}") from error
    return reward


def prepare_reward(spec: str) -> None:
    """Calls the module's `prepare()` if it has one. Errors of it pass through."""
    prepare = getattr(_load(spec)[0], "prepare", None)
    if callable(prepare):
        prepare()


def needs_answer(spec: str) -> bool | None:
    """The module's `NEEDS_ANSWER`; None if it does not say."""
    stated = getattr(_load(spec)[0], "NEEDS_ANSWER", None)
    return stated if isinstance(stated, bool) else None


def reward_version(spec: str) -> str:
    """`module:function@<12 hex digits>`: a hash over the source of the module, of what it uses from its package, and `DISTRIBUTIONS`."""
    module, _ = _load(spec)
    digest = hashlib.sha256()
    for part in _sources(module):
        digest.update(part)
    for distribution in sorted(getattr(module, "DISTRIBUTIONS", ())):
        digest.update(f"{distribution}=={importlib.metadata.version(distribution)}\n".encode())
    return f"{spec}@{digest.hexdigest()[:12]}"


def _load(spec: str) -> tuple[ModuleType, str]:
    """Module and function name of `spec`."""
    if not isinstance(spec, str) or spec.count(":") != 1:
        raise RewardError(f"reward = {spec!r}: {_SHAPE}")
    module_name, name = spec.split(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise RewardError(f"reward = {spec!r}: {_SHAPE}")
    if module_name == "__main__":
        raise RewardError(f"reward = {spec!r}: grader processes cannot import __main__; put the function into a module of its own")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end: a file of the user's must not shadow a library
    importlib.invalidate_caches()
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
