"""What trainer and worker say to each other through their rings, as bytes: one dataclass per kind of record.

    header: magic `JPRR`, schema u32, kind u32, length u32 of what follows | the fields in order, each from a multiple of 8
    field:  int -> i64; float -> f64; str -> u64 bytes, UTF-8; array -> u64 per axis, elements (all little-endian)

The schema is a digest of all layouts: sides that differ in any field of any record refuse each other's records.
A reader trusts nothing: it allocates nothing that the bytes at hand do not hold, and says what is wrong. numpy only.
"""

import struct
import typing
import zlib
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self

import numpy as np

from jaxprorl.errors import RecordError
from jaxprorl.types import Completion, FinishReason

_HEADER = struct.Struct("<4sIII")
_MAGIC = b"JPRR"

Int32_T = Annotated[np.ndarray, "<i4", 1]
Int64_R = Annotated[np.ndarray, "<i8", 1]
Int64_KX = Annotated[np.ndarray, "<i8", 2]
Float32_T = Annotated[np.ndarray, "<f4", 1]


@dataclass(frozen=True)
class Request:
    """To the worker: sample one completion.

    Attributes:
        request: number that `Finished` and `Aborted` refer to; attempt: how often this sample was asked for before.
        token_ids: of the prompt.
        temperature: 0 = greedy; top_k: 0 = all tokens may be drawn; top_p: 1 = likewise.
        seed: of this sample's draws.
        stop_ids: token ids that end it.
    """

    request: int
    attempt: int
    prompt_id: int
    sample: int
    token_ids: Int32_T
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    stop_ids: Int32_T


@dataclass(frozen=True)
class Go:
    """To the worker: begin with the requests sent so far. They then share engine steps in one way, however they trickle in.

    A worker that has no requests then begins with an empty prefix cache, which these requests share.
    """


@dataclass(frozen=True)
class Abort:
    """To the worker: drop the requests that have not begun and, if `running` is 1, those that have; `Aborted` answers."""

    running: int


@dataclass(frozen=True)
class Swap:
    """To the worker, which has no requests then: load this version from the weight segment; `Swapped` answers."""

    version: int


@dataclass(frozen=True)
class Stop:
    """To the worker: end in order."""


@dataclass(frozen=True)
class Ready:
    """From the worker, first of all: by which layouts it reads and writes. `versions` reads NAME=VERSION per line."""

    ring_schema: int
    weights_schema: int
    versions: str


@dataclass(frozen=True)
class Finished:
    """From the worker: one completion; fields as in `types.Completion`, version_spans int64 [spans, 3]."""

    request: int
    attempt: int
    prompt_id: int
    sample: int
    token_ids: Int32_T
    logprobs: Float32_T
    finish_reason: str
    version_spans: Int64_KX

    def __post_init__(self) -> None:
        if self.finish_reason not in typing.get_args(FinishReason):
            raise RecordError(f"finish_reason is {self.finish_reason!r}, not one of {', '.join(typing.get_args(FinishReason))}")
        if len(self.logprobs) != len(self.token_ids):
            raise RecordError(f"request {self.request} has {len(self.token_ids)} token ids and {len(self.logprobs)} logprobs")
        if self.version_spans.shape[1:] != (3,):
            raise RecordError(f"version_spans has shape {self.version_spans.shape}, not [spans, 3]")

    @classmethod
    def of(cls, request: int, attempt: int, c: Completion) -> Self:
        """The record of a completion."""
        spans = np.array(c.version_spans, np.int64).reshape(-1, 3)
        return cls(request, attempt, c.prompt_id, c.sample, c.token_ids, c.logprobs, c.finish_reason, spans)

    def completion(self) -> Completion:
        """The completion in it; its arrays are read-only."""
        spans = tuple((int(version), int(first), int(end)) for version, first, end in self.version_spans)
        reason = typing.cast(FinishReason, self.finish_reason)
        return Completion(self.prompt_id, self.sample, self.token_ids, self.logprobs, reason, spans)


@dataclass(frozen=True)
class Aborted:
    """From the worker: these requests are gone, none of them finishes after this."""

    requests: Int64_R


@dataclass(frozen=True)
class Swapped:
    """From the worker: this version is loaded and its caches are empty, after `seconds`; `loaded_bytes` of tensors."""

    version: int
    seconds: float
    loaded_bytes: int


@dataclass(frozen=True)
class Failed:
    """From the worker: it cannot go on; `text` says why, with the traceback."""

    text: str


Record = Request | Go | Abort | Swap | Stop | Ready | Finished | Aborted | Swapped | Failed
KINDS: tuple[type[Any], ...] = typing.get_args(Record)


def _layout(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Field names with `int`, `float`, `str`, or (element type, axes) of an array."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple((f.name, getattr(hints[f.name], "__metadata__", hints[f.name])) for f in fields(kind))


_LAYOUTS = {kind: _layout(kind) for kind in KINDS}


def schema(kinds: tuple[type[Any], ...]) -> int:
    """A digest of the layouts of records of these kinds."""
    return zlib.crc32(repr([(kind.__name__, _layout(kind)) for kind in kinds]).encode())


SCHEMA = schema(KINDS)


def encode(record: Record) -> bytes:
    """The bytes of a record.

    Raises:
        RecordError: an array has another type or number of axes than its field.
    """
    parts: list[bytes] = []
    for name, form in _LAYOUTS[type(record)]:
        value = getattr(record, name)
        if form is int:
            parts.append(struct.pack("<q", value))
        elif form is float:
            parts.append(struct.pack("<d", value))
        elif form is str:
            text = value.encode(errors="backslashreplace")  # a report of an error must never fail over a file name
            parts += [struct.pack("<Q", len(text)), text, bytes(-len(text) % 8)]
        else:
            dtype, axes = form
            if value.dtype != np.dtype(dtype) or value.ndim != axes:
                raise RecordError(
                    f"{type(record).__name__}.{name} is {value.dtype} with {value.ndim} axes, not {np.dtype(dtype)} with {axes}"
                )
            parts += [struct.pack(f"<{axes}Q", *value.shape), value.tobytes(), bytes(-value.nbytes % 8)]
    body = b"".join(parts)
    return _HEADER.pack(_MAGIC, SCHEMA, KINDS.index(type(record)), len(body)) + body


def decode(data: bytes) -> Record:
    """The record in `data`; its arrays look into `data` and are read-only.

    Raises:
        RecordError: anything but what `encode` of this version makes.
    """
    if len(data) < _HEADER.size:
        raise RecordError(f"a record of {len(data)} bytes is shorter than its header, {_HEADER.size}")
    magic, schema, kind, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise RecordError(f"a record begins with {magic!r}, not {_MAGIC!r}")
    if schema != SCHEMA:
        raise RecordError(f"a record has schema {schema:#010x}, this side {SCHEMA:#010x}: both sides must run the same jaxprorl")
    if kind >= len(KINDS):
        raise RecordError(f"a record is of kind {kind}; the highest known one is {len(KINDS) - 1}")
    if length != len(data) - _HEADER.size:
        raise RecordError(f"a {KINDS[kind].__name__} record says {length} bytes and has {len(data) - _HEADER.size}")
    position, values = _HEADER.size, []
    for name, form in _LAYOUTS[KINDS[kind]]:
        value, position = _field(data, position, form, f"{KINDS[kind].__name__}.{name}")
        values.append(value)
    if position != len(data):
        raise RecordError(f"a {KINDS[kind].__name__} record has {len(data) - position} bytes too many")
    return typing.cast(Record, KINDS[kind](*values))


def _field(data: bytes, position: int, form: Any, name: str) -> tuple[Any, int]:
    """The value at `position`, and where the next one begins."""
    if form is int or form is float:
        _need(data, position, 8, name)
        return struct.unpack_from("<q" if form is int else "<d", data, position)[0], position + 8
    axes = 1 if form is str else form[1]
    _need(data, position, 8 * axes, name)
    shape = struct.unpack_from(f"<{axes}Q", data, position)
    position += 8 * axes
    dtype = np.dtype(np.uint8 if form is str else form[0])
    size = dtype.itemsize
    for extent in shape:
        size *= extent  # Python's integers do not overflow
    _need(data, position, size + -size % 8, name)
    end = position + size + -size % 8
    if form is str:
        try:
            return data[position : position + size].decode(), end
        except UnicodeDecodeError as error:
            raise RecordError(f"{name} is not UTF-8: {error}") from error
    try:
        return np.frombuffer(data, dtype, size // dtype.itemsize, position).reshape(shape), end
    except (ValueError, OverflowError) as error:  # beside an extent of 0 another may be absurd
        raise RecordError(f"{name} cannot have shape {shape}: {error}") from error


def _need(data: bytes, position: int, count: int, name: str) -> None:
    if count > len(data) - position:
        raise RecordError(f"{name} needs {count} bytes, {len(data) - position} are left")
