"""The weight buffers: complete versions only, bit for bit, without a copy on the reading side."""

import struct
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprorl.errors import SharedMemoryError
from jaxprorl.rollout.weights_segment import PAGE_BYTES, TensorSpec, WeightReader, WeightWriter, lay_out, segment_bytes
from tests.factories import PROPERTY

SPECS = lay_out([("model.embed_tokens.weight", (7, 5), "bfloat16"), ("model.norm.weight", (5,), "float32")])


def fresh(specs: tuple[TensorSpec, ...] = SPECS) -> memoryview:
    return memoryview(bytearray(segment_bytes(specs)))


def tensors(version: int) -> dict[str, np.ndarray]:
    random = np.random.RandomState(version)
    return {
        "model.embed_tokens.weight": random.standard_normal((7, 5)).astype(ml_dtypes.bfloat16),
        "model.norm.weight": random.standard_normal(5).astype(np.float32),
    }


def fill(writer: WeightWriter, version: int) -> None:
    writer.begin(version)
    for name, array in tensors(version).items():
        writer.put(name, array)
    writer.finish()


def check(reader: WeightReader, version: int) -> None:
    with reader.version(version) as found:
        assert [(t.name, t.dtype, t.array.dtype.name) for t in found] == [
            ("model.embed_tokens.weight", "bfloat16", "uint16"),
            ("model.norm.weight", "float32", "float32"),
        ]
        for tensor, right in zip(found, tensors(version).values(), strict=True):
            assert tensor.array.tobytes() == right.tobytes() and tensor.array.shape == right.shape


def test_every_version_is_read_as_it_was_written_and_the_one_before_stays() -> None:
    memory = fresh()
    writer, reader = WeightWriter(memory, SPECS), None
    for version in range(5):
        fill(writer, version)
        reader = reader or WeightReader(memory)
        check(reader, version)
        if version:
            check(reader, version - 1)
    assert reader
    with pytest.raises(
        SharedMemoryError, match=r"version 2 is not in the weight segment, whose buffers are \[\('COMPLETE', 4\), \('COMPLETE', 3\)\]"
    ):
        check(reader, 2)


def test_tensors_are_views_of_the_segment_aligned_to_64_bytes() -> None:
    memory = fresh()
    fill(WeightWriter(memory, SPECS), 1)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    with WeightReader(memory).version(1) as found:
        for tensor, spec in zip(found, SPECS, strict=True):
            place = tensor.array.ctypes.data - base
            assert place == 2 * PAGE_BYTES + spec.offset_bytes and spec.offset_bytes % 64 == 0


def test_an_unfinished_version_cannot_be_read() -> None:
    memory = fresh()
    writer = WeightWriter(memory, SPECS)
    reader = WeightReader(memory)
    writer.begin(0)
    with pytest.raises(SharedMemoryError, match=r"'WRITING', 0.*'EMPTY', 0"):
        check(reader, 0)
    writer.put("model.norm.weight", tensors(0)["model.norm.weight"])
    with pytest.raises(SharedMemoryError, match=r"1 tensors are missing, such as 'model.embed_tokens.weight'"):
        writer.finish()
    with pytest.raises(SharedMemoryError, match="'WRITING', 0"):
        check(reader, 0)


def test_a_version_that_was_given_up_does_not_cost_the_complete_one() -> None:
    memory = fresh()
    writer, reader = WeightWriter(memory, SPECS), WeightReader(memory)
    fill(writer, 1)
    writer.begin(2)
    writer.begin(3)
    check(reader, 1)
    fill(writer, 4)
    check(reader, 1)
    check(reader, 4)


def test_a_buffer_overwritten_while_it_is_read_is_noticed() -> None:
    memory = fresh()
    writer, reader = WeightWriter(memory, SPECS), WeightReader(memory)
    fill(writer, 1)
    fill(writer, 2)
    with pytest.raises(SharedMemoryError, match="version 1 was overwritten while it was being read"), reader.version(1):
        writer.begin(3)


def test_an_error_inside_the_block_is_not_hidden() -> None:
    memory = fresh()
    writer, reader = WeightWriter(memory, SPECS), WeightReader(memory)
    fill(writer, 1)
    with pytest.raises(ZeroDivisionError), reader.version(1):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("lm_head.weight", np.zeros((7, 5), np.float32), "'lm_head.weight' is not in the manifest"),
        ("model.norm.weight", np.zeros(6, np.float32), r"'model.norm.weight' is float32\[6\], the manifest says float32\[5\]"),
        ("model.norm.weight", np.zeros(5, np.float64), r"is float64\[5\], the manifest says float32"),
        ("model.norm.weight", np.zeros(5, ml_dtypes.bfloat16), r"is bfloat16\[5\], the manifest says float32"),
        ("model.embed_tokens.weight", np.zeros((5, 7), np.uint16), r"is uint16\[5, 7\], the manifest says bfloat16\[7, 5\]"),
        ("model.embed_tokens.weight", np.zeros((7, 5), np.float16), r"is float16\[7, 5\], the manifest says bfloat16"),
    ],
)
def test_a_tensor_that_is_not_of_the_manifest_is_refused(name: str, array: np.ndarray, message: str) -> None:
    writer = WeightWriter(fresh(), SPECS)
    writer.begin(1)
    with pytest.raises(SharedMemoryError, match=message):
        writer.put(name, array)


def test_every_tensor_comes_once_and_only_within_a_version() -> None:
    writer, norm = WeightWriter(fresh(), SPECS), tensors(0)["model.norm.weight"]
    with pytest.raises(SharedMemoryError, match="no version was begun"):
        writer.put("model.norm.weight", norm)
    with pytest.raises(SharedMemoryError, match="2 tensors are missing"):
        writer.finish()
    writer.begin(0)
    writer.put("model.norm.weight", norm)
    with pytest.raises(SharedMemoryError, match="came twice"):
        writer.put("model.norm.weight", norm)


@settings(PROPERTY, max_examples=40)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 40), max_size=3).map(tuple), st.sampled_from(["bfloat16", "float32"])), max_size=6
    ),
    st.booleans(),
)  # fmt: skip
def test_any_shapes_lie_apart_and_come_back(shapes: list[tuple[tuple[int, ...], str]], transposed: bool) -> None:
    specs = lay_out([(f"tensor.{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes)])
    memory = fresh(specs)
    writer = WeightWriter(memory, specs)
    random = np.random.RandomState(0)
    for version in (1, 2):
        arrays = [random.standard_normal(s.shape[::-1] if transposed else s.shape).astype(s.dtype) for s in specs]
        arrays = [array.T if transposed else array for array in arrays]
        writer.begin(version)
        for spec, array in zip(specs, arrays, strict=True):
            writer.put(spec.name, array)
        writer.finish()
        with WeightReader(memory).version(version) as found:
            assert [t.array.tobytes() for t in found] == [array.tobytes() for array in arrays]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.__setitem__(0, 0), "its magic is"),
        (lambda m: struct.pack_into("=Q", m, 8, 2), "its schema is 0x2, not 0x1"),
        (lambda m: struct.pack_into(">Q", m, 16, 0x0102030405060708), "its byte order is"),
        (lambda m: struct.pack_into("=Q", m, 24, 2**50), "says it has a manifest of 1125899906842624"),
        (lambda m: struct.pack_into("=Q", m, 40, 2**50), "and buffers of 1125899906842624"),
        (lambda m: m.__setitem__(PAGE_BYTES + 3, 65), "manifest of the weight segment is damaged"),
    ],
)
def test_anything_else_than_a_weight_segment_of_this_schema_is_refused(change: Callable[[memoryview], None], message: str) -> None:
    memory = fresh()
    WeightWriter(memory, SPECS)
    change(memory)
    with pytest.raises(SharedMemoryError, match=message):
        WeightReader(memory)


def test_memory_without_a_header_or_cut_short_is_refused() -> None:
    with pytest.raises(SharedMemoryError, match="100 bytes are no weight segment"):
        WeightReader(memoryview(bytearray(100)))
    memory = fresh()
    WeightWriter(memory, SPECS)
    with pytest.raises(SharedMemoryError, match=r"a weight segment of .* bytes says"):
        WeightReader(memory[:-PAGE_BYTES])


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((TensorSpec("a", (4,), "float32", 0), TensorSpec("b", (4,), "float32", 8)), "'b' overlaps"),
        ((TensorSpec("a", (4,), "float32", -8),), "'a' overlaps"),
    ],
)
def test_a_manifest_whose_tensors_overlap_is_refused(specs: tuple[TensorSpec, ...], message: str) -> None:
    memory = fresh(specs)
    WeightWriter(memory, specs)
    with pytest.raises(SharedMemoryError, match=message):
        WeightReader(memory)
