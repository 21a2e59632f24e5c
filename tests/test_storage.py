"""What is said of files that cannot be written, with errors that the system itself raises."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import read_only, small_disk

from jaxprorl import storage
from jaxprorl.errors import StorageError
from jaxprorl.monitoring.jsonl import JsonLog, read
from jaxprorl.monitoring.samples import SCHEMA, read_samples, remove_after, write_samples

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room on that disk"),
        (errno.EDQUOT, "make room within the quota"),
        (errno.EIO, "see to the disk"),
        (errno.EFBIG, r"ulimit -f"),
        (errno.ESTALE, "network file system"),
        (errno.EROFS, "make the file system writable"),
    ],
)
def test_an_error_of_the_system_is_one_line_with_path_sizes_and_remedy(tmp_path: Path, number: int, remedy: str) -> None:
    with pytest.raises(StorageError) as caught, storage.writing(tmp_path / "not there yet/file", 8200):
        raise OSError(number, os.strerror(number))
    told = str(caught.value)
    assert told.startswith(f"{tmp_path}/not there yet/file cannot be written ({os.strerror(number)}): 8.2 kB needed, ")
    assert " free there; " in told and remedy in told and "goes on from the last checkpoint, or starts over where there is none" in told
    assert "\n" not in told


def write_log(path: Path) -> None:
    with JsonLog(path / "log.jsonl") as log:
        for number in range(10_000):
            log.append_row({"number": number})


def write_many_samples(path: Path) -> None:
    row = dict.fromkeys(name for name in SCHEMA.names if name != "step")
    for step in range(400):
        write_samples(path / "samples", step, [row | {"completion": os.urandom(4096).hex()}])


@pytest.mark.parametrize("write", [write_log, write_many_samples])
def test_a_disk_that_fills_up_is_told_and_what_was_written_whole_is_there(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        (disk / "filler").write_bytes(bytes(900_000))
        with pytest.raises(StorageError, match=r"cannot be written \(No space left on device\): .* needed, .* free there; make room"):
            write(disk)
        if write is write_log:
            rows = read(disk / "log.jsonl")
            assert rows == [{"number": number} for number in range(len(rows))] and rows
            assert (disk / "log.jsonl").read_bytes().endswith(b"}\n"), "no torn line is left"
        else:
            files = sorted((disk / "samples").glob("step_*.parquet"))
            assert [read_samples(file)[0]["step"] for file in files] == list(range(len(files))) and files
            remove_after(disk / "samples", len(files))
            assert sorted((disk / "samples").iterdir()) == files, "what was half written goes on resume"


TOO_LARGE = """
import resource, sys
from pathlib import Path
from test_storage import write_log
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
write_log(Path(sys.argv[1]))
"""


def test_a_log_over_the_limit_of_a_files_size_is_told_and_ends_with_a_whole_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run([sys.executable, "-c", TOO_LARGE, tmp_path], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        f"jaxprorl.errors.StorageError: {tmp_path}/log.jsonl cannot be written (File too large): 0.0 kB needed, "
    )
    rows = read(tmp_path / "log.jsonl")
    assert rows == [{"number": number} for number in range(len(rows))]
    assert 4900 < (tmp_path / "log.jsonl").stat().st_size <= 5000
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000


def test_a_log_whose_folder_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match=r"run/log\.jsonl cannot be written \("):
        JsonLog(tmp_path / "run/log.jsonl")


def test_a_folder_that_can_be_written_or_made_is_no_problem(tmp_path: Path) -> None:
    assert storage.unwritable(tmp_path) == storage.unwritable(tmp_path / "new/and/deep") == ""


def test_a_file_in_the_folders_place_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert storage.unwritable(tmp_path / "file") == storage.unwritable(tmp_path / "file/deep") == f"{tmp_path}/file is no folder"


def test_a_name_that_is_too_long_is(tmp_path: Path) -> None:
    assert storage.unwritable(tmp_path / ("a" * 300)) == storage.unwritable(tmp_path / ("a" * 300) / "deep") == "File name too long"


def test_a_name_with_a_nul_character_is() -> None:
    for name in ("a\0b", "a\0b/deep", "/tmp/a\0"):
        assert "null character" in storage.unwritable(Path(name))


def test_a_folder_that_can_only_be_read_is(tmp_path: Path) -> None:
    (tmp_path / "folder/below").mkdir(parents=True)
    with read_only(tmp_path / "folder") as folder:
        for path in (folder, folder / "below", folder / "new"):
            assert storage.unwritable(path).startswith(f"{path if path.exists() else folder} is ")
