"""A ring of records in shared memory, from one writing process to one reading process.

    header, 4096 bytes | data, `capacity` bytes
    record: position u64, length u64, checksum u64 (CRC-32 of position, length and payload), payload, padding up to a multiple of 8

Positions count bytes since the beginning and never wrap; the place in the data area is position modulo capacity. A record's
position is its sequence number: no other record of the ring has it, and one store moves from one record to the next.

The writer stores `begun` (where the record will end), then the record, then `committed`: **a record exists if and only if it lies
before `committed`**. A writer killed at any byte leaves all of a record or nothing, and `begun > committed` then tells that it died in
the middle; one that an exception interrupted may go on. The reader copies a record, checks the copy, moves `read` past it and hands it
out: each record at most once, and exactly once to a reader that is not interrupted. `read` is of no use to a later reader: the reader
of results is the trainer, whose crash ends the run, and a new run makes new rings. Nor does a ring get a second writer: a
restarted worker gets a new one.

What is relied on: header words are 8-byte aligned, each has one writer and lies on a cache line with words of the same writer, and
CPython stores and loads each (an item of a memoryview of format Q) by one machine instruction. x86-64 makes one process's stores
visible in order, so `committed` never appears before the record. aarch64 does not promise that: there the checksum, which covers
position and length, does not match until the record is visible, and the reader looks again for VISIBLE_WITHIN_S before it calls
the record damaged. Times are those of CLOCK_MONOTONIC, which processes of one machine share.
Standard library only, Linux only: trainer and worker share this module.
"""

import os
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from jaxprorl.errors import RingFullError, SharedMemoryError

SCHEMA = 1
HEADER_BYTES = 4096
RECORD_HEADER = struct.Struct("=QQQ")  # position, length, checksum
VISIBLE_WITHIN_S = 1.0
POLL_S = 0.0005

_MAGIC = int.from_bytes(b"JPRLRING", "little")
_BYTE_ORDER = 0x0102030405060708
# Words of the header, by who stores them; 8 words are one cache line.
_MAGIC_WORD, _SCHEMA_WORD, _BYTE_ORDER_WORD, _CAPACITY_WORD = range(4)  # creator
_STATE, _WRITER_PID, _WRITER_STARTED, _BEATS, _BEAT_NS = range(8, 13)  # writer
_BEGUN, _COMMITTED, _RECORDS_WRITTEN = range(16, 19)  # writer
_READER_PID, _READER_STARTED, _READ, _RECORDS_READ = range(24, 28)  # reader


class State(IntEnum):
    """What the writing process says of itself."""

    STARTING = 0
    READY = 1
    FAILED = 3
    CLOSED = 4


@dataclass(frozen=True)
class Status:
    """A look at a ring from outside; words are read one after the other while both sides go on.

    Attributes:
        writer_pid, reader_pid: process ids, 0 before that side has come.
        writer_alive, reader_alive: whether that very process still runs; False before it has come.
        beats: how often the writer has shown that it makes progress.
        beat_age_s: seconds since it last did; since the machine's start if it never has.
        waiting_bytes: committed and not yet read.
        unfinished_bytes: of a record that the writer is writing or, if it is dead, was.
    """

    state: State
    capacity_bytes: int
    writer_pid: int
    writer_alive: bool
    reader_pid: int
    reader_alive: bool
    beats: int
    beat_age_s: float
    records_written: int
    records_read: int
    waiting_bytes: int
    unfinished_bytes: int


def segment_bytes(capacity_bytes: int) -> int:
    """Size of the segment of a ring whose records take up to `capacity_bytes` in all."""
    return HEADER_BYTES + -(-capacity_bytes // 8) * 8


def record_bytes(payload_bytes: int) -> int:
    """What a record takes in the ring."""
    return RECORD_HEADER.size + -(-payload_bytes // 8) * 8


def format_ring(buffer: memoryview) -> None:
    """Makes a segment of zeros an empty ring. Before either side attaches."""
    with buffer.cast("Q") as words:
        words[_SCHEMA_WORD], words[_BYTE_ORDER_WORD], words[_CAPACITY_WORD] = SCHEMA, _BYTE_ORDER, len(buffer) - HEADER_BYTES
        words[_MAGIC_WORD] = _MAGIC


def status(buffer: memoryview) -> Status:
    """How a ring stands.

    Raises:
        SharedMemoryError: not a ring of this schema, or a damaged one.
    """
    with _checked_words(buffer) as words:
        read, committed, begun = words[_READ], words[_COMMITTED], words[_BEGUN]  # in this order: the later ones only grow
        return Status(
            state=_state(words[_STATE]),
            capacity_bytes=words[_CAPACITY_WORD],
            writer_pid=words[_WRITER_PID],
            writer_alive=_runs(words[_WRITER_PID], words[_WRITER_STARTED]),
            reader_pid=words[_READER_PID],
            reader_alive=_runs(words[_READER_PID], words[_READER_STARTED]),
            beats=words[_BEATS],
            beat_age_s=_beat_age_s(words),
            records_written=words[_RECORDS_WRITTEN],
            records_read=words[_RECORDS_READ],
            waiting_bytes=committed - read,
            unfinished_bytes=max(0, begun - committed),
        )


class RingWriter:
    """The writing end; one per ring, ever.

    Raises:
        SharedMemoryError: not a ring of this schema, or one that has had a writer.
    """

    def __init__(self, buffer: memoryview):
        self._words = _checked_words(buffer)
        self._data = buffer[HEADER_BYTES:]
        _claim(self._words, _WRITER_PID, _WRITER_STARTED, "writer")
        self.beat()

    def beat(self) -> None:
        """Shows that this process makes progress."""
        self._words[_BEAT_NS] = time.monotonic_ns()
        self._words[_BEATS] += 1

    def set_state(self, state: State) -> None:
        """What this process says of itself."""
        self._words[_STATE] = state

    def write(self, payload: bytes, timeout_s: float) -> None:
        """Appends a record, and waits for room if the reader is behind; beats meanwhile.

        Raises:
            RingFullError: still no room after `timeout_s`; nothing was written, and the call may be repeated.
            SharedMemoryError: the record is larger than the ring.
        """
        words, size, capacity = self._words, record_bytes(len(payload)), len(self._data)
        if size > capacity:
            raise SharedMemoryError(f"a record of {len(payload)} bytes takes {size} in the ring, which has {capacity}: enlarge the ring")
        start = words[_COMMITTED]
        end = start + size
        if not _wait(lambda: end - words[_READ] <= capacity, timeout_s, self.beat):
            raise RingFullError(
                f"a record of {size} bytes found no room in a ring of {capacity} bytes for {timeout_s} s: process {words[_READER_PID]} "
                f"({'running' if _runs(words[_READER_PID], words[_READER_STARTED]) else 'not running'}) has read "
                f"{words[_RECORDS_READ]} of {words[_RECORDS_WRITTEN]} records"
            )
        words[_BEGUN] = end
        self._copy(start, RECORD_HEADER.pack(start, len(payload), _checksum(start, payload)))
        self._copy(start + RECORD_HEADER.size, payload)
        words[_COMMITTED] = end
        words[_RECORDS_WRITTEN] += 1

    def _copy(self, position: int, source: bytes) -> None:
        """Into the data area, around its end if need be."""
        place = position % len(self._data)
        first = min(len(source), len(self._data) - place)
        self._data[place : place + first] = source[:first]
        self._data[: len(source) - first] = source[first:]

    def close(self) -> None:
        """Says CLOSED (unless it was FAILED) and lets the memory go."""
        if self._words[_STATE] != State.FAILED:
            self._words[_STATE] = State.CLOSED
        self._words.release()
        self._data.release()


class RingReader:
    """The reading end; one per ring, ever.

    Raises:
        SharedMemoryError: not a ring of this schema, or one that has had a reader.
    """

    def __init__(self, buffer: memoryview):
        self._words = _checked_words(buffer)
        self._data = buffer[HEADER_BYTES:]
        _claim(self._words, _READER_PID, _READER_STARTED, "reader")

    def read(self, timeout_s: float = 0.0) -> bytes | None:
        """The next record, or None if none is committed within `timeout_s`.

        None says nothing about the writer: `status` does. What a dead or closed writer had committed still comes, in order.

        Raises:
            SharedMemoryError: the record is damaged; names its number and position. Every further call raises it again.
        """
        words = self._words
        start = words[_READ]
        if not _wait(lambda: words[_COMMITTED] != start, timeout_s):
            return None
        deadline = time.monotonic() + VISIBLE_WITHIN_S
        payload, problem = self._copied(start)
        while problem and time.monotonic() < deadline:
            time.sleep(POLL_S)
            payload, problem = self._copied(start)
        if problem:
            raise SharedMemoryError(f"record {words[_RECORDS_READ]} of the ring, at position {start}, is damaged: {problem}")
        words[_READ] = start + record_bytes(len(payload))
        words[_RECORDS_READ] += 1
        return payload

    def beat_age_s(self) -> float:
        """Seconds since the writer last showed that it makes progress; since the machine's start if it never has."""
        return _beat_age_s(self._words)

    def _copied(self, start: int) -> tuple[bytes, str]:
        """The payload of the record at `start`, or what is wrong with it."""
        available = self._words[_COMMITTED] - start
        if not RECORD_HEADER.size <= available <= len(self._data):
            return b"", f"{available} bytes are committed in a ring of {len(self._data)}"
        position, length, checksum = RECORD_HEADER.unpack(self._copy(start, RECORD_HEADER.size))
        if position != start:
            return b"", f"it says that its position is {position}"
        if record_bytes(length) > available:
            return b"", f"its length reads {length}, only {available} bytes are committed"
        payload = self._copy(start + RECORD_HEADER.size, length)
        if _checksum(start, payload) != checksum:
            return b"", f"the checksum of its {length} bytes does not match"
        return payload, ""

    def _copy(self, position: int, count: int) -> bytes:
        """Out of the data area, around its end if need be."""
        place = position % len(self._data)
        first = min(count, len(self._data) - place)
        if first == count:
            return bytes(self._data[place : place + count])
        return bytes(self._data[place:]) + bytes(self._data[: count - first])

    def close(self) -> None:
        """Lets the memory go."""
        self._words.release()
        self._data.release()


def start_ticks(pid: int) -> int:
    """When process `pid` was started, in clock ticks since boot; 0 if it does not run (or is a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # the command, in parentheses, may hold anything
    return 0 if fields[0] in "ZX" else int(fields[19])


def _beat_age_s(words: memoryview) -> float:
    return max(0.0, (time.monotonic_ns() - words[_BEAT_NS]) / 1e9)


def _runs(pid: int, started: int) -> bool:
    return started != 0 and start_ticks(pid) == started


def _state(value: int) -> State:
    try:
        return State(value)
    except ValueError:
        raise SharedMemoryError(f"the state of the ring reads {value}, the highest known one is {max(State)}") from None


def _claim(words: memoryview, pid_word: int, started_word: int, role: str) -> None:
    if words[pid_word]:
        raise SharedMemoryError(f"the ring already has a {role}, process {words[pid_word]}; make a new ring")
    words[started_word] = start_ticks(os.getpid())
    words[pid_word] = os.getpid()


def _checked_words(buffer: memoryview) -> memoryview:
    """The buffer as 8-byte words, after a look at what does not change."""
    if len(buffer) < HEADER_BYTES or len(buffer) % 8:
        raise SharedMemoryError(f"{len(buffer)} bytes are no ring: {HEADER_BYTES} are its header, and the size is a multiple of 8")
    words = buffer.cast("Q")
    right = {"magic": _MAGIC, "schema": SCHEMA, "byte order": _BYTE_ORDER, "capacity": len(buffer) - HEADER_BYTES}
    for word, (name, value) in enumerate(right.items()):
        found = words[word]
        if found != value:
            words.release()
            raise SharedMemoryError(f"not a ring that this side understands: its {name} is {found:#x}, not {value:#x}")
    return words


def _checksum(position: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("=QQ", position, len(payload))))


def _wait(condition: Callable[[], bool], timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Looks until `condition` holds or `timeout_s` has passed; whether it holds."""
    if condition():
        return True
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        meanwhile()
        time.sleep(POLL_S)
        if condition():
            return True
    return False
