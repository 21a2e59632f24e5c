"""What a config looks like: all fields of its base file, each of its type, and no other. Flag, file and Python meet the same check."""

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from configs import base
from configs.ablations import base as ablation
from jaxprorl.errors import ConfigError

KINDS: dict[type, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", tuple: "a tuple"}
PLAIN = "must be made of numbers, texts, True, False, None, tuples, lists and dicts, which config.json can hold"
SHOWN = 80  # letters of a value in a message


@dataclass(frozen=True, eq=False)
class Schema:
    """The fields of one kind of config.

    Attributes:
        name: of that kind.
        file: lists them, with type and unit.
        make: gives a config with all of them, each with a default of its type.
        open: groups that a config fills with names of its own -> an example of what each of these holds; a ConfigDict = a group.
    """

    name: str
    file: str
    make: Callable[[], ConfigDict]
    open: Mapping[str, Any]

    @property
    def hint(self) -> str:
        """The end of a message about a field."""
        return f"every field, with its type and unit, is in {self.file}"


EXPERIMENT = Schema("experiment", "configs/base.py", base.get_config, {"data.tasks": ConfigDict(), "filtering.rules": ""})
ABLATION = Schema("ablation", "configs/ablations/base.py", ablation.get_config, {"arms": ()})


def checked(config: Any, schema: Schema = EXPERIMENT, place: str = "") -> ConfigDict:
    """A locked copy of `config` in which every value has the very type of its default.

    Numbers of numpy become Python's, a whole number becomes a float where one is asked for, a list a tuple, a path a text; references to
    other fields become values. Nothing else is turned into something else: "4", 4.0 and True are no whole numbers.

    Args:
        place: where the config comes from, " in ..."; for messages.

    Raises:
        ConfigError: the first field that is unknown, missing or of another type.
    """
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config = {shown(config)}: must be a ConfigDict, as get_config() of a file in configs/ returns it")
    return _group(config, _defaults(schema), schema, "", place).lock()


def with_new_fields(config: ConfigDict, schema: Schema = EXPERIMENT) -> ConfigDict:
    """A stored config with the defaults of the fields that it lacks, because the version that wrote it did not have them.

    The default of a new field is what earlier versions did, so such a run is read, and goes on, as it was.
    """
    config = ConfigDict(config.to_dict())
    for field, default in leaves(_defaults(schema), schema):
        *groups, name = field.split(".")
        within: Any = config
        for group in groups:
            if group not in within:
                within[group] = ConfigDict()
            within = within[group] if isinstance(within[group], ConfigDict) else {name: None}  # torn: told elsewhere
        if name not in within:
            within[name] = default
    return config


def fitting(field: str, value: Any, default: Any) -> Any:
    """`value` in the very type of `default`.

    Raises:
        ConfigError: it is of another type.
    """
    kind, given = type(default), value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023:
        return float(value)
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(_plain(field, part) for part in value)
    if kind is str and isinstance(value, os.PathLike) and isinstance(os.fspath(value), str):
        return os.fspath(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{field} = {value!r}: must be a finite number")
        return kind(value)
    raise ConfigError(f"{field} = {shown(given)}: must be {KINDS[kind]}, as {shown(default)} is")


def default_of(field: str) -> Any:
    """The default of a dotted field of an experiment, which has its type."""
    value: Any = _defaults(EXPERIMENT)
    for name in field.split("."):
        value = value[name]
    return value


def wrong_kind(field: str, value: str, schema: Schema = EXPERIMENT) -> str:
    """What to say of a flag whose text is no value of its field; empty if the schema does not know the field."""
    default = dict(leaves(_defaults(schema), schema)).get(field)
    if default is not None and not isinstance(default, ConfigDict):
        return f"{field} = {value!r}: must be {KINDS[type(default)]}, as {shown(default)} is"
    if default is not None or any(name.startswith(f"{field}.") for name, _ in leaves(_defaults(schema), schema)):
        return f"{field} = {value!r}: it is a group of fields; set them one by one, as {field}.NAME"
    return ""


def unknown_field(field: str, schema: Schema = EXPERIMENT, place: str = "", guess: str = "") -> str:
    """The message about a field that there is not, with the nearest one that there is."""
    group, _, name = field.rpartition(".")
    names = [known for known, _ in leaves(_defaults(schema), schema)]
    start = f"{group}." if group else ""
    beside = {known.removeprefix(start).split(".")[0] for known in names if known.startswith(start)}
    elsewhere = [known for known in names if known.rpartition(".")[2] == name]  # the right name in another group
    close = [guess] if guess else [start + near for near in difflib.get_close_matches(name, sorted(beside), n=1)] or elsewhere[:2]
    meant = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"unknown field {field!r}{place}{meant}"


def leaves(config: ConfigDict, schema: Schema = EXPERIMENT, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field. A group that configs fill with names of their own counts as one field."""
    for name, value in config.items():
        field = f"{prefix}{name}"
        if isinstance(value, ConfigDict) and field not in schema.open:
            yield from leaves(value, schema, f"{field}.")
        else:
            yield field, value


def shown(value: Any) -> str:
    """A value in one line of a message, cut where it is long."""
    text = " ".join(repr(value.to_dict() if isinstance(value, ConfigDict) else value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


@cache
def _defaults(schema: Schema) -> ConfigDict:
    return schema.make().lock()


def _group(config: Any, defaults: ConfigDict, schema: Schema, prefix: str, place: str) -> ConfigDict:
    made = ConfigDict(type_safe=False)
    for name in config:
        if name not in defaults:
            raise ConfigError(f"{unknown_field(f'{prefix}{name}', schema, place)}; {schema.hint}")
    for name, default in defaults.items():
        field = f"{prefix}{name}"
        if name not in config:
            raise ConfigError(f"{field} is missing{place}: its default is {shown(default)}; {schema.hint}")
        inner = isinstance(default, ConfigDict) and field not in schema.open
        try:
            value = _value(config, name, field)
            if field in schema.open:
                made[name] = _open(field, value, schema.open[field])
            elif inner:
                _require_group(field, value, ", ".join(default))
            else:
                made[name] = fitting(field, value, default)
        except ConfigError as error:
            raise ConfigError(f"{error}{place and f' ({place.strip()})'}; {schema.hint}") from None
        if inner:
            made[name] = _group(value, default, schema, f"{field}.", place)
    return made


def _open(field: str, value: Any, example: Any) -> ConfigDict:
    """A group whose names are the config's own."""
    _require_group(field, value, "names of your own")
    made = ConfigDict(type_safe=False)
    for name in value:
        entry, inner = _value(value, name, f"{field}.{name}"), f"{field}.{name}"
        if isinstance(example, ConfigDict):
            _require_group(inner, entry, "its arguments")
            made[name] = ConfigDict(_plain(inner, entry), type_safe=False)
        else:
            made[name] = fitting(inner, entry, example)
    return made


def _require_group(field: str, value: Any, names: str) -> None:
    if not isinstance(value, ConfigDict):
        raise ConfigError(f"{field} = {shown(value)}: must be a ConfigDict with {names}")


def _value(config: ConfigDict, name: str, field: str) -> Any:
    try:
        return config[name]
    except Exception as error:  # a reference that is computed from other fields can fail in every way that Python knows
        raise ConfigError(f"{field}: its value cannot be computed: {type(error).__name__}: {error}") from None


def _plain(field: str, value: Any) -> Any:
    """What lies inside of a field, made of Python's own types."""
    if isinstance(value, ConfigDict):
        value = value.to_dict()
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, list | tuple):
        parts = [_plain(field, part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Mapping):
        return {name: _plain(f"{field}.{name}", part) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{field} = {value!r}: must be a finite number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{field} = {shown(value)}: {PLAIN}")
