"""The ring in one process: limits, every byte at which a writer can die, damage of every kind."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprorl.errors import RingFullError, SharedMemoryError
from jaxprorl.rollout import ring
from jaxprorl.rollout.ring import RingReader, RingWriter, State, format_ring, record_bytes, segment_bytes, status
from tests.factories import PROPERTY
from tests.rollout.rings import DyingWriter, new_ring


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "VISIBLE_WITHIN_S", 0.003)


def test_records_come_out_once_and_in_order_over_many_rounds() -> None:
    buffer = new_ring(200)
    writer, reader = RingWriter(buffer), RingReader(buffer)
    assert reader.read() is None
    for i in range(200):  # 7 to 13 records fill the ring, so its end is met at many offsets
        payload = bytes([i]) * (i % 150)
        writer.write(payload, 0.0)
        assert reader.read() == payload
        assert reader.read() is None
    assert status(buffer).records_read == 200


def test_sizes_in_the_ring_are_multiples_of_8_with_24_bytes_of_header() -> None:
    assert [record_bytes(n) for n in (0, 1, 8, 9)] == [24, 32, 32, 40]
    assert [segment_bytes(n) for n in (24, 25)] == [4096 + 24, 4096 + 32]


def test_the_largest_record_fits_exactly_and_one_byte_more_is_refused() -> None:
    buffer = new_ring(200)
    writer, reader = RingWriter(buffer), RingReader(buffer)
    with pytest.raises(SharedMemoryError, match="a record of 177 bytes takes 208 in the ring, which has 200"):
        writer.write(bytes(177), 0.0)
    assert status(buffer).unfinished_bytes == 0
    for i in range(3):
        writer.write(bytes([i]) * 176, 0.0)
        assert reader.read() == bytes([i]) * 176


def test_a_full_ring_holds_the_writer_up_and_loses_nothing() -> None:
    buffer = new_ring(64)
    writer, reader = RingWriter(buffer), RingReader(buffer)
    writer.write(b"a" * 8, 0.0)
    writer.write(b"b" * 8, 0.0)
    beats = status(buffer).beats
    with pytest.raises(
        RingFullError, match=f"32 bytes found no room in a ring of 64 bytes for 0.01 s: process {os.getpid()} .running. has read 0 of 2"
    ):
        writer.write(b"c" * 8, 0.01)
    assert status(buffer).beats > beats  # a writer that waits is alive
    assert (status(buffer).waiting_bytes, status(buffer).unfinished_bytes) == (64, 0)
    assert reader.read() == b"a" * 8
    writer.write(b"c" * 8, 0.0)
    assert [reader.read(), reader.read(), reader.read()] == [b"b" * 8, b"c" * 8, None]


def test_without_a_reader_the_full_ring_says_so() -> None:
    writer = RingWriter(new_ring(24))
    writer.write(b"", 0.0)
    with pytest.raises(RingFullError, match=r"process 0 .not running. has read 0 of 1 records"):
        writer.write(b"", 0.0)


@pytest.mark.parametrize("rounds", [0, 1, 2])  # at the beginning of the data area; across its end; after a wrap
def test_a_writer_that_dies_at_any_byte_leaves_the_records_before_and_nothing_of_this_one(rounds: int) -> None:
    payload = bytes(range(41))
    for budget in range(record_bytes(len(payload)) - 7 + 1):  # the padding is not written
        buffer = new_ring(120)
        writer, reader = DyingWriter(buffer), RingReader(buffer)
        for i in range(rounds):
            writer.write(bytes([i]) * 50, 0.0)
            assert reader.read() == bytes([i]) * 50
        writer.write(b"before", 0.0)
        writer.budget = budget
        with pytest.raises(DyingWriter.DiedError):
            writer.write(payload, 0.0)
        assert status(buffer).unfinished_bytes == record_bytes(len(payload))
        assert [reader.read(), reader.read()] == [b"before", None]


def test_a_writer_that_was_merely_interrupted_goes_on() -> None:
    buffer = new_ring(120)
    writer, reader = DyingWriter(buffer), RingReader(buffer)
    writer.budget = 30
    with pytest.raises(DyingWriter.DiedError):
        writer.write(b"x" * 20, 0.0)
    writer.budget = None
    writer.write(b"y" * 10, 0.0)
    assert [reader.read(), reader.read()] == [b"y" * 10, None]
    assert status(buffer).unfinished_bytes == 0


def test_states_and_beats_reach_the_other_side() -> None:
    buffer = new_ring(100)
    before = status(buffer)
    assert (before.state, before.writer_pid, before.writer_alive, before.reader_pid, before.reader_alive) == (
        State.STARTING,
        0,
        False,
        0,
        False,
    )
    writer = RingWriter(buffer)
    seen = status(buffer)
    assert (seen.writer_pid, seen.writer_alive, seen.beats) == (os.getpid(), True, 1)
    assert seen.beat_age_s < 60 < before.beat_age_s  # nobody beat since this machine started
    for state in State:
        writer.set_state(state)
        assert status(buffer).state is state
    for state, last in ((State.READY, State.CLOSED), (State.FAILED, State.FAILED)):
        buffer = new_ring(100)
        writer = RingWriter(buffer)
        writer.set_state(state)
        writer.close()
        assert status(buffer).state is last


def test_what_was_committed_before_closing_still_comes() -> None:
    buffer = new_ring(100)
    writer = RingWriter(buffer)
    writer.write(b"last words", 0.0)
    writer.close()
    reader = RingReader(buffer)
    assert (reader.read(), reader.read(), status(buffer).state) == (b"last words", None, State.CLOSED)


def test_a_ring_has_one_writer_and_one_reader_ever() -> None:
    buffer = new_ring(100)
    RingWriter(buffer)
    RingReader(buffer)
    with pytest.raises(SharedMemoryError, match=f"already has a writer, process {os.getpid()}"):
        RingWriter(buffer)
    with pytest.raises(SharedMemoryError, match=f"already has a reader, process {os.getpid()}"):
        RingReader(buffer)


def test_a_dead_process_is_told_from_a_living_one_and_from_one_with_the_same_id() -> None:
    started = ring.start_ticks(os.getpid())
    assert started > 0 and ring.start_ticks(os.getppid()) > 0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert ring.start_ticks(child.pid) >= started
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
        assert ring.start_ticks(child.pid) == 0
    assert ring.start_ticks(child.pid) == 0
    buffer = new_ring(100)
    RingWriter(buffer)
    buffer.cast("Q")[ring._WRITER_STARTED] += 1
    assert not status(buffer).writer_alive


def test_a_record_that_becomes_visible_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that shows stores in another order: the header says committed, the payload is not there yet."""
    monkeypatch.setattr(ring, "VISIBLE_WITHIN_S", 60.0)
    buffer = new_ring(100)
    RingWriter(buffer).write(b"payload!", 0.0)
    place = ring.HEADER_BYTES + ring.RECORD_HEADER.size
    buffer[place] = 0
    monkeypatch.setattr(ring.time, "sleep", lambda seconds: buffer.__setitem__(place, ord("p")))
    assert RingReader(buffer).read() == b"payload!"


@settings(PROPERTY, max_examples=60)
@given(st.integers(0, 24 + 40 - 1), st.integers(0, 7))
def test_any_flipped_bit_of_a_record_is_found_and_the_record_is_named(byte: int, bit: int) -> None:
    buffer = new_ring(104)
    writer, reader = RingWriter(buffer), RingReader(buffer)
    writer.write(b"before", 0.0)
    assert reader.read() == b"before"
    writer.write(bytes(range(40)), 0.0)
    buffer[ring.HEADER_BYTES + 32 + byte] ^= 1 << bit
    for _ in range(2):  # damage stays damage
        with pytest.raises(SharedMemoryError, match="record 1 of the ring, at position 32, is damaged: "):
            reader.read()
    assert status(buffer).records_read == 1


def words_set(**values: int) -> Callable[[memoryview], None]:
    def change(buffer: memoryview) -> None:
        for name, value in values.items():
            buffer.cast("Q")[getattr(ring, name)] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (words_set(_COMMITTED=8), "8 bytes are committed in a ring of 104"),
        (words_set(_COMMITTED=112), "112 bytes are committed"),
        (words_set(_COMMITTED=2**64 - 8), "bytes are committed"),
        (words_set(_READ=64), "bytes are committed"),
    ],
)
def test_positions_that_cannot_be_are_damage(change: Callable[[memoryview], None], message: str) -> None:
    buffer = new_ring(104)
    writer, reader = RingWriter(buffer), RingReader(buffer)
    writer.write(b"before", 0.0)
    change(buffer)
    with pytest.raises(SharedMemoryError, match=f"is damaged: .*{message}"):
        reader.read()


def test_an_absurd_length_allocates_nothing() -> None:
    buffer = new_ring(104)
    writer, reader = RingWriter(buffer), RingReader(buffer)
    writer.write(b"before", 0.0)
    ring.RECORD_HEADER.pack_into(buffer, ring.HEADER_BYTES, 0, 2**62, 0)
    with pytest.raises(SharedMemoryError, match=f"its length reads {2**62}, only 32 bytes are committed"):
        reader.read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (words_set(_MAGIC_WORD=0), "magic is 0x0"),
        (words_set(_MAGIC_WORD=int.from_bytes(b"JPRLRING", "big")), "magic"),
        (words_set(_SCHEMA_WORD=2), "schema is 0x2, not 0x1"),
        (words_set(_BYTE_ORDER_WORD=0x0807060504030201), "byte order is 0x807060504030201, not 0x102030405060708"),
        (words_set(_CAPACITY_WORD=2**40), "capacity is 0x10000000000"),
    ],
)
@pytest.mark.parametrize("attach", [RingWriter, RingReader, status])
def test_anything_else_than_a_ring_of_this_schema_is_refused(
    attach: Callable[[memoryview], object], change: Callable[[memoryview], None], message: str
) -> None:
    buffer = new_ring(104)
    change(buffer)
    with pytest.raises(SharedMemoryError, match=message):
        attach(buffer)


@pytest.mark.parametrize("size", [0, 8, 4095, 4097])
def test_memory_of_no_ring_s_size_is_refused(size: int) -> None:
    with pytest.raises(SharedMemoryError, match=f"{size} bytes are no ring"):
        RingReader(memoryview(bytearray(size)))


def test_an_unknown_state_is_refused() -> None:
    buffer = new_ring(104)
    words_set(_STATE=99)(buffer)
    with pytest.raises(SharedMemoryError, match="state of the ring reads 99"):
        status(buffer)


def test_words_that_different_sides_store_lie_on_different_cache_lines() -> None:
    creator = {ring._MAGIC_WORD, ring._CAPACITY_WORD}
    writer = {ring._STATE, ring._BEAT_NS, ring._BEGUN, ring._RECORDS_WRITTEN}
    reader = {ring._READER_PID, ring._RECORDS_READ}
    lines = [{word // 8 for word in words} for words in (creator, writer, reader)]
    assert sum(map(len, lines)) == len(set.union(*lines))


def test_formatting_leaves_nothing_to_read() -> None:
    buffer = memoryview(bytearray(segment_bytes(100)))
    format_ring(buffer)
    assert RingReader(buffer).read(0.01) is None
