"""Append-only lines: offsets, torn lines, truncation."""

import errno
import os

import numpy as np
import pytest

from jaxprorl.errors import StorageError
from jaxprorl.monitoring.jsonl import JsonLog, encode, read, truncate


def test_offset_counts_the_bytes_of_complete_lines(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    with JsonLog(path) as log:
        assert log.offset() == 0
        log.append_row({"a": 1})
        assert path.read_bytes() == b'{"a": 1}\n'
        assert log.offset() == 9
        log.append_row({"ü": "é"})  # two bytes each: offsets are bytes, not characters
        log.sync()
        assert log.offset() == path.stat().st_size == 9 + len('{"ü": "é"}\n'.encode())


def test_newlines_inside_values_stay_inside_their_line(tmp_path):
    with JsonLog(tmp_path / "log") as log:
        log.append_row({"text": "a\nb\u2028c\r"})
    assert read(tmp_path / "log") == [{"text": "a\nb\u2028c\r"}]


def test_torn_last_line_is_dropped_by_read_and_cut_by_opening(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": ')
    assert read(path) == [{"a": 1}, {"a": 2}]
    with JsonLog(path) as log:
        assert log.offset() == 18
        log.append_row({"a": 3})
    assert read(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_a_torn_line_longer_than_the_search_window(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 200_000)
    with JsonLog(path) as log:
        assert log.offset() == 9


def test_a_file_of_only_a_torn_line_is_empty(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"a"')
    assert read(path) == []
    with JsonLog(path) as log:
        assert log.offset() == 0


@pytest.mark.parametrize("line", [b"{broken}\n", b"[1]\n", b"\n", b"\x00\x00\n"])
def test_a_damaged_complete_line_is_named(tmp_path, line):
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n' + line + b'{"a": 2}\n')
    with pytest.raises(ValueError, match=r"log:2: not"):
        read(path)


def test_truncate_goes_back_to_an_offset(tmp_path):
    path = tmp_path / "log"
    with JsonLog(path) as log:
        log.append_row({"a": 1})
        offset = log.offset()
        log.append_row({"a": 2})
    truncate(path, offset)
    assert path.read_bytes() == b'{"a": 1}\n'
    truncate(path, 0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(("offset", "message"), [(10, "outside the file"), (-1, "outside the file"), (4, "inside a line")])
def test_truncate_refuses_what_no_checkpoint_of_this_run_stored(tmp_path, offset, message):
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n')
    with pytest.raises(ValueError, match=message):
        truncate(path, offset)
    assert path.read_bytes() == b'{"a": 1}\n'


def test_truncate_of_a_missing_file(tmp_path):
    truncate(tmp_path / "none", 0)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="0 bytes"):
        truncate(tmp_path / "none", 5)


def test_encode_keeps_every_bit_and_knows_numpy():
    assert encode(0.1 + 0.2) == "0.30000000000000004"
    assert encode({"i": np.int32(3), "f": np.float32(0.1), "a": np.arange(2)}) == '{"i": 3, "f": 0.10000000149011612, "a": [0, 1]}'
    with pytest.raises(TypeError, match="set is not a JSON type"):
        encode({1})


def test_a_write_that_fails_half_way_is_taken_back(tmp_path):
    class FullDisk:
        """Takes half of the first write, then reports a full disk."""

        def __init__(self, file):
            self.file, self.calls = file, 0

        def write(self, data):
            self.calls += 1
            if self.calls > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data[: len(data) // 2])

        def __getattr__(self, name):
            return getattr(self.file, name)

    path = tmp_path / "log"
    with JsonLog(path) as log:
        log.append_row({"a": 1})
        real = log._file
        log._file = FullDisk(real)
        with pytest.raises(StorageError, match=r"log cannot be written \(No space left on device\): 0\.0 kB needed, .* free there"):
            log.append_row({"a": 2})
        log._file = real
        log.append_row({"a": 3})
    assert read(path) == [{"a": 1}, {"a": 3}]
