"""Records: there and back, and nothing else than what this version writes is taken."""

import dataclasses
import struct
import tracemalloc
import typing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from jaxprorl.errors import RecordError
from jaxprorl.rollout import records
from jaxprorl.rollout.records import KINDS, SCHEMA, Aborted, Failed, Finished, Go, Record, Request, Stop, Swap, decode, encode
from jaxprorl.types import Completion
from tests.factories import PROPERTY

INT64 = st.integers(-(2**63), 2**63 - 1)
FINISHED = Finished(
    5,
    1,
    17,
    3,
    np.array([7, 8, 9], np.int32),
    np.array([-0.5, -1.5, 0.0], np.float32),
    "length",
    np.array([[0, 0, 2], [1, 2, 3]], np.int64),
)


def of_field(form: Any, name: str) -> st.SearchStrategy[Any]:
    if form is int:
        return INT64
    if form is float:
        return st.floats()
    if form is str:
        return st.just("stop") if name == "finish_reason" else st.text()
    shape = st.just((2, 3)) if name == "version_spans" else st.just((4,)) if name in ("token_ids", "logprobs") else st_numpy.array_shapes(
        min_dims=form[1], max_dims=form[1], min_side=0
    )  # fmt: skip
    return st_numpy.arrays(np.dtype(form[0]), shape)


RECORDS = st.one_of([st.builds(kind, **{name: of_field(form, name) for name, form in records._LAYOUTS[kind]}) for kind in KINDS])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()  # by bits: NaN equals NaN
    return struct.pack("<d", a) == struct.pack("<d", b) if isinstance(a, float) else bool(a == b)


@settings(PROPERTY, max_examples=200)
@given(RECORDS)
def test_every_kind_of_record_comes_back_as_it_was(record: Record) -> None:
    back = decode(encode(record))
    assert type(back) is type(record)
    for f in dataclasses.fields(record):
        assert equal(getattr(record, f.name), getattr(back, f.name)), f.name


def test_a_record_byte_by_byte() -> None:
    head = b"JPRR" + struct.pack("<III", SCHEMA, KINDS.index(Aborted), 24)
    assert encode(Aborted(np.array([3, -1], np.int64))) == head + struct.pack("<Qqq", 2, 3, -1)
    assert encode(Failed("no\n")) == b"JPRR" + struct.pack("<III", SCHEMA, KINDS.index(Failed), 16) + struct.pack(
        "<Q", 3
    ) + b"no\n" + bytes(5)


def test_a_completion_comes_back_as_it_was() -> None:
    completion = Completion(17, 3, np.array([7, 8, 9], np.int32), np.array([-0.5, -1.5, 0.0], np.float32), "length", ((0, 0, 2), (1, 2, 3)))
    record = decode(encode(Finished.of(5, 1, completion)))
    assert isinstance(record, Finished) and (record.request, record.attempt) == (5, 1)
    back = record.completion()
    assert (back.prompt_id, back.sample, back.finish_reason, back.version_spans) == (17, 3, "length", ((0, 0, 2), (1, 2, 3)))
    assert equal(back.token_ids, completion.token_ids) and equal(back.logprobs, completion.logprobs)
    assert all(type(number) is int for span in back.version_spans for number in span)
    nothing = dataclasses.replace(completion, token_ids=back.token_ids[:0], logprobs=back.logprobs[:0], version_spans=())
    empty = decode(encode(Finished.of(0, 0, nothing)))
    assert isinstance(empty, Finished) and empty.completion().version_spans == ()


def test_decoded_arrays_cannot_be_written_and_are_aligned() -> None:
    record = decode(encode(FINISHED))
    assert isinstance(record, Finished)
    for array in (record.token_ids, record.logprobs, record.version_spans):
        assert not array.flags.writeable and array.flags.aligned


def test_arrays_with_strides_are_written_as_they_read() -> None:
    back = decode(encode(Aborted(np.arange(10, dtype=np.int64)[::-3])))
    assert isinstance(back, Aborted) and back.requests.tolist() == [9, 6, 3, 0]


@pytest.mark.parametrize("array", [np.zeros(3, np.int32), np.zeros((3, 1), np.int64), np.zeros(3, ">i8"), np.zeros(3, np.float64)])
def test_an_array_of_another_type_than_its_field_is_refused(array: np.ndarray) -> None:
    with pytest.raises(RecordError, match=r"Aborted\.requests is .* axes, not int64 with 1"):
        encode(Aborted(array))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "bored"}, "finish_reason is 'bored', not one of stop, length, aborted, error"),
        ({"logprobs": np.zeros(2, np.float32)}, "request 5 has 3 token ids and 2 logprobs"),
        ({"version_spans": np.zeros((1, 4), np.int64)}, r"version_spans has shape \(1, 4\)"),
    ],
)
def test_a_completion_that_contradicts_itself_is_refused_on_both_sides(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        dataclasses.replace(FINISHED, **change)
    forged = dataclasses.replace(FINISHED)
    for name, value in change.items():
        object.__setattr__(forged, name, value)
    with pytest.raises(RecordError, match=message):
        decode(encode(forged))


def test_a_report_of_an_error_survives_any_text() -> None:
    back = decode(encode(Failed("no file \udc80")))
    assert back == Failed("no file \\udc80")


def test_truncated_anywhere_a_record_is_refused() -> None:
    data = encode(FINISHED)
    for length in range(len(data)):
        with pytest.raises(RecordError):
            decode(data[:length])
    for length in range(16, len(data)):  # also if the length in the header is made to fit
        with pytest.raises(RecordError, match=r"Finished\.\w+ needs \d+ bytes, \d+ are left|finish_reason|logprobs|version_spans"):
            decode(data[:12] + struct.pack("<I", length - 16) + data[16:length])


def test_too_long_a_record_is_refused() -> None:
    data = encode(Swap(3))
    with pytest.raises(RecordError, match="a Swap record says 8 bytes and has 16"):
        decode(data + bytes(8))
    with pytest.raises(RecordError, match="a Swap record has 8 bytes too many"):
        decode(data[:12] + struct.pack("<I", 16) + data[16:] + bytes(8))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"PKL\x80", "begins with b'PKL"),
        (4, struct.pack("<I", SCHEMA ^ 1), "both sides must run the same jaxprorl"),
        (8, struct.pack("<I", len(KINDS)), f"of kind {len(KINDS)}; the highest known one is {len(KINDS) - 1}"),
        (12, struct.pack("<I", 2**32 - 1), "says 4294967295 bytes"),
    ],
)
def test_a_wrong_header_is_refused(place: int, value: bytes, message: str) -> None:
    data = encode(Swap(3))
    with pytest.raises(RecordError, match=message):
        decode(data[:place] + value + data[place + len(value) :])


@pytest.mark.parametrize("extents", [(2**62,), (2**64 - 1,), (1000,)])
def test_an_absurd_length_allocates_nothing(extents: tuple[int, ...]) -> None:
    data = encode(Aborted(np.zeros(2, np.int64)))
    forged = data[:16] + struct.pack("<Q", *extents) + data[24:]
    tracemalloc.start()
    with pytest.raises(RecordError, match=r"Aborted\.requests needs \d+ bytes, 16 are left"):
        decode(forged)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@pytest.mark.parametrize("shape", [(2**63, 0), (0, 2**64 - 1), (2**32, 2**32)])
def test_absurd_shapes_of_little_or_overflowing_size_are_refused(shape: tuple[int, int]) -> None:
    data = encode(FINISHED)
    place = len(data) - FINISHED.version_spans.nbytes - 16
    forged = data[:place] + struct.pack("<QQ", *shape) + data[place + 16 :]
    with pytest.raises(RecordError, match=r"[Vv]ersion_spans (needs|cannot have shape|has shape)"):
        decode(forged)


def test_text_that_is_no_text_is_refused() -> None:
    data = encode(Failed("ab"))
    with pytest.raises(RecordError, match=r"Failed\.text is not UTF-8"):
        decode(data.replace(b"ab", b"\xff\xfe"))


@settings(PROPERTY, max_examples=300)
@given(st.one_of(st.binary(max_size=100), st.tuples(st.integers(0, 20), st.binary(max_size=120))))
def test_any_bytes_are_a_record_or_an_error(junk: bytes | tuple[int, bytes]) -> None:
    if isinstance(junk, tuple):  # with a header that lets them in
        junk = b"JPRR" + struct.pack("<III", SCHEMA, junk[0], len(junk[1])) + junk[1]
    try:
        record = decode(junk)
    except RecordError:
        return
    assert decode(encode(record)) is not None


def test_the_schema_follows_every_change_of_a_layout() -> None:
    assert records.schema(KINDS) == SCHEMA
    longer = dataclasses.make_dataclass("Swap", [("version", int), ("buffer", int)])
    renamed = dataclasses.make_dataclass("Swap", [("number", int)])
    retyped = dataclasses.make_dataclass("Swap", [("version", float)])
    others = [tuple(other if kind is Swap else kind for kind in KINDS) for other in (longer, renamed, retyped)]
    assert len({SCHEMA, records.schema(KINDS[::-1]), *map(records.schema, others)}) == 5


def test_every_dataclass_of_the_module_is_a_kind() -> None:
    found = [value for value in vars(records).values() if dataclasses.is_dataclass(value) and value.__module__ == records.__name__]
    assert set(found) == set(KINDS) == set(typing.get_args(Record))
    assert {Request, Go, Stop} <= set(found)
