"""Two buffers of weights in shared memory: the trainer fills one while workers may still read the other.

    header, 4096 bytes | manifest, from a multiple of 4096 | buffer 0 | buffer 1, each from a multiple of 4096
    manifest: JSON [[name, shape, dtype, offset in the buffer], ...], the same for both buffers and the whole run

Per buffer the header holds `version` and `state`. The writer marks a buffer WRITING, fills it tensor by tensor, stores the version and
marks it COMPLETE; a reader takes only a COMPLETE buffer with the version it was told, and checks both again when it is done.
Tensors carry no checksum: the probe that ends every swap compares what they compute. What is relied on between processes: as in
`ring.py`; a worker is told of a version through its ring, after the last tensor. numpy only.
"""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from jaxprorl.errors import SharedMemoryError

SCHEMA = 1
PAGE_BYTES = 4096
ALIGNMENT_BYTES = 64
# What numpy holds each type as: it has no bfloat16 of its own.
CARRIERS: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.float32)}

_MAGIC = int.from_bytes(b"JPRLWGTS", "little")
_BYTE_ORDER = 0x0102030405060708
_MAGIC_WORD, _SCHEMA_WORD, _BYTE_ORDER_WORD, _MANIFEST_BYTES, _MANIFEST_CHECKSUM, _BUFFER_BYTES = range(6)
_BUFFER_WORDS = ((8, 9), (16, 17))  # state and version of each


class State(IntEnum):
    """Of a buffer."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: Hugging Face name, shape, `bfloat16` or `float32`, and where it begins in a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Without padding."""
        return math.prod(self.shape) * CARRIERS[self.dtype].itemsize


@dataclass(frozen=True)
class Tensor:
    """One tensor of a version: a view into shared memory, bfloat16 as uint16."""

    name: str
    dtype: str
    array: np.ndarray


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...], str]]) -> tuple[TensorSpec, ...]:
    """Places (name, shape, dtype) one after the other, in the order in which they will be written and read."""
    specs, offset = [], 0
    for name, shape, dtype in tensors:
        specs.append(TensorSpec(name, tuple(shape), dtype, offset))
        offset += _up(specs[-1].size_bytes, ALIGNMENT_BYTES)
    return tuple(specs)


def segment_bytes(specs: Sequence[TensorSpec]) -> int:
    """Size of the segment: header, manifest and both buffers."""
    return PAGE_BYTES + _up(len(_manifest(specs)), PAGE_BYTES) + 2 * _buffer_bytes(specs)


class WeightWriter:
    """The trainer's side. Formats a segment of zeros of `segment_bytes(specs)`; it has one writer, ever."""

    def __init__(self, memory: memoryview, specs: Sequence[TensorSpec]):
        manifest = _manifest(specs)
        self._specs = {spec.name: spec for spec in specs}
        self._memory = memory
        self._words = memory[:PAGE_BYTES].cast("Q")
        self._index = 1
        self._missing: set[str] | None = None  # while a version is being written
        memory[PAGE_BYTES : PAGE_BYTES + len(manifest)] = manifest
        self._words[_SCHEMA_WORD], self._words[_BYTE_ORDER_WORD] = SCHEMA, _BYTE_ORDER
        self._words[_MANIFEST_BYTES], self._words[_MANIFEST_CHECKSUM] = len(manifest), zlib.crc32(manifest)
        self._words[_BUFFER_BYTES] = _buffer_bytes(specs)
        self._words[_MAGIC_WORD] = _MAGIC

    def begin(self, version: int) -> None:
        """Opens the buffer that does not hold the newest complete version. No worker may still be reading that one."""
        if self._missing is None:
            self._index = 1 - self._index
        state, number = _BUFFER_WORDS[self._index]
        self._words[state] = State.WRITING
        self._words[number] = version
        self._missing = set(self._specs)

    def put(self, name: str, array: np.ndarray) -> None:
        """Copies one tensor of the version begun; strides do not matter, shape and dtype (`bfloat16` or its uint16 bits) must be right.

        Raises:
            SharedMemoryError: it is not of this manifest, or came already.
        """
        spec = self._specs.get(name)
        if spec is None or self._missing is None or name not in self._missing:
            raise SharedMemoryError(f"tensor {name!r} is not in the manifest, or came twice, or no version was begun")
        carrier = CARRIERS[spec.dtype]
        if array.shape != spec.shape or array.dtype.name not in (spec.dtype, carrier.name):
            found = f"{array.dtype}{list(array.shape)}"
            raise SharedMemoryError(f"tensor {name!r} is {found}, the manifest says {spec.dtype}{list(spec.shape)}")
        np.copyto(_view(self._memory, spec, _start(self._words, self._index)), array.view(carrier))
        self._missing.remove(name)

    def finish(self) -> None:
        """Makes the version readable.

        Raises:
            SharedMemoryError: a tensor is missing; the buffer stays unreadable.
        """
        missing = self._specs.keys() if self._missing is None else self._missing
        if missing:
            raise SharedMemoryError(f"the version is not complete: {len(missing)} tensors are missing, such as {min(missing)!r}")
        self._words[_BUFFER_WORDS[self._index][0]] = State.COMPLETE
        self._missing = None

    def close(self) -> None:
        """Lets the memory go."""
        self._words.release()


class WeightReader:
    """A worker's side.

    Raises:
        SharedMemoryError: not a weight segment of this schema, or its manifest is damaged.
    """

    def __init__(self, memory: memoryview):
        self._memory = memory
        self.specs = _read_manifest(memory)
        self._words = memory[:PAGE_BYTES].cast("Q")

    @contextmanager
    def version(self, version: int) -> Iterator[list[Tensor]]:
        """The tensors of a version, in the order of the manifest, as views that must not be used after the block.

        Raises:
            SharedMemoryError: no buffer holds it in full, at the beginning or (overwritten meanwhile) at the end.
        """
        index = self._index(version)
        if index is None:
            held = [(State(self._words[state]).name, self._words[number]) for state, number in _BUFFER_WORDS]
            raise SharedMemoryError(f"version {version} is not in the weight segment, whose buffers are {held}")
        yield [Tensor(spec.name, spec.dtype, _view(self._memory, spec, _start(self._words, index))) for spec in self.specs]
        if self._index(version) != index:
            raise SharedMemoryError(f"version {version} was overwritten while it was being read")

    def _index(self, version: int) -> int | None:
        """The buffer that holds it in full."""
        for index, (state, number) in enumerate(_BUFFER_WORDS):
            if self._words[state] == State.COMPLETE and self._words[number] == version:
                return index
        return None

    def close(self) -> None:
        """Lets the memory go."""
        self._words.release()


def _manifest(specs: Sequence[TensorSpec]) -> bytes:
    return json.dumps([[s.name, s.shape, s.dtype, s.offset_bytes] for s in specs], separators=(",", ":")).encode()


def _read_manifest(memory: memoryview) -> tuple[TensorSpec, ...]:
    if len(memory) < PAGE_BYTES:
        raise SharedMemoryError(f"{len(memory)} bytes are no weight segment: its header alone has {PAGE_BYTES}")
    with memory[:PAGE_BYTES].cast("Q") as words:
        magic, schema, byte_order, size, checksum, buffer_bytes = (words[i] for i in range(6))
    for name, found, right in (("magic", magic, _MAGIC), ("schema", schema, SCHEMA), ("byte order", byte_order, _BYTE_ORDER)):
        if found != right:
            raise SharedMemoryError(f"not a weight segment that this side understands: its {name} is {found:#x}, not {right:#x}")
    if PAGE_BYTES + _up(size, PAGE_BYTES) + 2 * buffer_bytes != len(memory):
        raise SharedMemoryError(f"a weight segment of {len(memory)} bytes says it has a manifest of {size} and buffers of {buffer_bytes}")
    text = bytes(memory[PAGE_BYTES : PAGE_BYTES + size])
    if zlib.crc32(text) != checksum:
        raise SharedMemoryError("the manifest of the weight segment is damaged: its checksum does not match")
    specs = tuple(_spec(entry) for entry in json.loads(text))
    end = 0
    for spec in specs:
        if not end <= spec.offset_bytes <= buffer_bytes - spec.size_bytes:
            raise SharedMemoryError(f"tensor {spec.name!r} overlaps the one before it or ends after its buffer of {buffer_bytes} bytes")
        end = spec.offset_bytes + spec.size_bytes
    return specs


def _spec(entry: list[Any]) -> TensorSpec:
    name, shape, dtype, offset_bytes = entry
    if dtype not in CARRIERS:
        raise SharedMemoryError(f"tensor {name!r} has dtype {dtype!r}, not one of {', '.join(CARRIERS)}")
    return TensorSpec(name, tuple(shape), dtype, offset_bytes)


def _buffer_bytes(specs: Sequence[TensorSpec]) -> int:
    return _up(max((s.offset_bytes + s.size_bytes for s in specs), default=0), PAGE_BYTES)


def _start(words: memoryview, index: int) -> int:
    """Where a buffer begins."""
    return PAGE_BYTES + _up(words[_MANIFEST_BYTES], PAGE_BYTES) + index * words[_BUFFER_BYTES]


def _view(memory: memoryview, spec: TensorSpec, start: int) -> np.ndarray:
    carrier = CARRIERS[spec.dtype]
    return np.frombuffer(memory, carrier, math.prod(spec.shape), start + spec.offset_bytes).reshape(spec.shape)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
