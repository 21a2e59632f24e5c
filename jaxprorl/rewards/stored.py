"""Functions that no module holds (lambdas, closures, a notebook's, partials, objects with `__call__`): files named by their content.

A grader process, a resumed run and `launch/sample.py` load the same file. Its name holds a digest of its bytes and the Python version,
whose bytecode they are. Modules that the function uses are not in the file: they must be importable.
"""

import hashlib
import io
import pickle
import re
import sys
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

from jaxprorl.errors import ConfigError, RewardError
from jaxprorl.files import write_atomically

_TAG = str(sys.implementation.cache_tag)  # e.g. cpython-313
_NAME_LETTERS = 40  # of the function's name in a file's: file systems allow 255 bytes in all


def store(reward: Callable[..., Any], folder: Path) -> Path:
    """Writes a callable into `folder`, unless it is there already and whole, and returns its file.

    Raises:
        RewardError: it holds something that cannot be stored.
        ConfigError: the folder cannot be written.
    """
    name = re.sub(r"\W+", "_", getattr(reward, "__name__", type(reward).__name__)).strip("_") or "reward"
    try:
        content = _dumps(reward)
    except Exception as error:  # whatever the user's objects raise
        raise RewardError(
            f"reward {name}: it cannot be stored for the grader processes ({type(error).__name__}: {error}); put the function into a "
            "module of its own, or let it make what it needs when it is called"
        ) from error
    path = folder / f"{name[:_NAME_LETTERS]}-{_digest(content)}.{_TAG}.pkl"
    try:
        if not path.is_file() or path.read_bytes() != content:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"reward {name} cannot be written to {path} ({error}); set cache_dir to a folder that can") from error
    return path


def load(path: Path, spec: str) -> Any:
    """The callable that `store` wrote. `spec` is the reward's text, for messages.

    Raises:
        RewardError: the file is missing, changed, of another Python version, or needs a module that cannot be imported.
    """
    begin = f"reward = {spec!r}: {path}"
    remedy = "call train again with the function itself, or put it into a module of its own"
    named = re.fullmatch(r".*-(?P<digest>[0-9a-f]{16})\.(?P<tag>[\w-]+)\.pkl", path.name)
    if not named:
        raise RewardError(f"{begin} is no name of a stored function; {remedy}")
    if named["tag"] != _TAG:
        raise RewardError(f"{begin} was stored by {named['tag']}, and this is {_TAG}; {remedy}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RewardError(f"{begin} cannot be read ({error.strerror}); {remedy}") from None
    if _digest(content) != named["digest"]:
        raise RewardError(f"{begin} was changed after it was stored; {remedy}")
    try:
        return pickle.loads(content)
    except Exception as error:  # a module that is not importable here, or whatever its import raises
        raise RewardError(f"{begin} cannot be loaded ({type(error).__name__}: {error}); {remedy}") from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _code(code: CodeType) -> Any:
    """A code object without its place in the script, so that lines added above a function do not make it another reward."""
    return internals._code_reduce(code.replace(co_firstlineno=1))


class _Pickler(pickle._Pickler):
    """cloudpickle's way with functions and classes, and sets in an order that is the same in every process.

    Its base is the pickler in Python: that in C, which cloudpickle's own class extends, asks nobody how to store a set.

    Args:
        sorting: ids of the sets whose elements are being put in order; inside of their own elements they count as empty.
    """

    _function_reduce = cloudpickle.Pickler._function_reduce
    _dynamic_function_reduce = cloudpickle.Pickler._dynamic_function_reduce
    _function_getnewargs = cloudpickle.Pickler._function_getnewargs

    def __init__(self, file: io.BytesIO, sorting: frozenset[int] = frozenset()) -> None:
        super().__init__(file, protocol=cloudpickle.DEFAULT_PROTOCOL)
        self.dispatch_table = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)
        self.globals_ref: dict[int, Any] = {}  # cloudpickle's functions read it
        self._sorting = sorting

    def reducer_override(self, obj: Any) -> Any:
        reduce: Any = type(obj).__reduce__
        if reduce in (set.__reduce__, frozenset.__reduce__):
            make, (members,), state = obj.__reduce__()
            inside = self._sorting | {id(obj)}
            return make, ([] if id(obj) in self._sorting else sorted(members, key=lambda each: _dumps(each, inside)),), state
        reduced = cloudpickle.Pickler.reducer_override(self, obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            reduced[2][0].pop("__firstlineno__", None)  # of a class, since Python 3.13; see `_code`
        return reduced


def _dumps(obj: Any, sorting: frozenset[int] = frozenset()) -> bytes:
    """The same bytes for the same function, or element of a set, in every process. `sorting`: of `_Pickler`."""
    file = io.BytesIO()
    _Pickler(file, sorting).dump(obj)
    content = file.getvalue()
    # Classes of a script or notebook get random ids of 32 characters; ids of the content take their place.
    found = [(content.find(identity.encode()), identity) for identity in internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.values()]
    identities = [identity.encode() for place, identity in sorted(found) if place >= 0]
    for number, identity in enumerate(identities):
        content = content.replace(identity, f"{number:032x}".encode())
    digest = hashlib.sha256(content).hexdigest()
    for number in range(len(identities)):
        own = hashlib.sha256(f"{digest} {number}".encode()).hexdigest()[:32]
        content = content.replace(f"{number:032x}".encode(), own.encode())
    return content
