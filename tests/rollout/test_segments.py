"""Segments: reserved in full, named, refused clearly, reaped after real kills."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxprorl.errors import SharedMemoryError
from jaxprorl.rollout import segments
from jaxprorl.rollout.segments import SHARED_MEMORY, attach, choose_folder, create, reap

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 1_000_000
OWN = """
import sys
from pathlib import Path
from jaxprorl.rollout import segments
folder, run_folder = Path(sys.argv[1]), Path(sys.argv[2])
with segments.create(folder, run_folder, "completions", 3, 10000) as segment:
    print(segment.path, flush=True)
    sys.stdin.read()
"""


def owner(folder: Path, run_folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process that owns a segment until its input ends, and the segment's path."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWN, folder, run_folder],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def free(shared_bytes: int, disk_bytes: int) -> Callable[[Path], int]:
    return lambda folder: shared_bytes if folder == SHARED_MEMORY else disk_bytes


def test_both_sides_see_the_same_bytes_and_leaving_removes_the_name(run_folder: Path) -> None:
    with create(SHARED_MEMORY, run_folder, "weights", 0, 5000) as mine:
        assert mine.path.parent == SHARED_MEMORY and mine.path.name.startswith(
            f"{segments.run_prefix(run_folder)}-weights-0-{os.getpid()}-"
        )
        assert bytes(mine.buffer) == bytes(5000)
        assert mine.path.stat().st_mode & 0o777 == 0o600  # nobody else's business
        with attach(mine.path) as other:
            mine.buffer[4999] = 7
            assert other.buffer[4999] == 7
        assert mine.path.exists()  # whoever merely attached removes nothing
    assert not mine.path.exists()


def test_every_page_is_reserved(run_folder: Path) -> None:
    with create(SHARED_MEMORY, run_folder, "weights", 0, 5 * MEGABYTE) as segment:
        assert segment.path.stat().st_blocks * 512 >= 5 * MEGABYTE


def test_two_segments_of_one_role_have_two_names(run_folder: Path) -> None:
    with create(SHARED_MEMORY, run_folder, "completions", 0, 8) as first, create(SHARED_MEMORY, run_folder, "completions", 0, 8) as second:
        assert first.path != second.path


def test_a_name_that_a_dead_process_with_this_id_left_is_passed_over(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_serial", iter([0, 1]))
    left = SHARED_MEMORY / f"{segments.run_prefix(run_folder)}-weights-0-{os.getpid()}-0"
    left.touch()
    with create(SHARED_MEMORY, run_folder, "weights", 0, 8) as segment:
        assert segment.path.name.endswith("-1")
        assert reap(run_folder) == [left]


def test_a_file_that_is_reaped_before_it_is_locked_is_made_again(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reaped, flock = [], segments.fcntl.flock

    def reap_first(file: int, how: int) -> None:
        monkeypatch.setattr(segments.fcntl, "flock", flock)
        reaped.extend(reap(run_folder))
        flock(file, how)

    monkeypatch.setattr(segments.fcntl, "flock", reap_first)
    with create(SHARED_MEMORY, run_folder, "weights", 0, 8) as segment:
        assert len(reaped) == 1 and reaped[0] != segment.path and segment.path.exists()


def test_arrays_outlive_their_segment(run_folder: Path) -> None:
    with create(SHARED_MEMORY, run_folder, "weights", 0, 8) as segment:
        array = np.frombuffer(segment.buffer, np.uint8)
        array[3] = 9
    assert array[3] == 9 and not segment.path.exists()


def test_an_owner_may_drop_the_name_once_the_other_side_has_attached(run_folder: Path) -> None:
    with create(SHARED_MEMORY, run_folder, "completions", 0, 8) as mine, attach(mine.path) as other:
        mine.unlink()
        assert not mine.path.exists()
        mine.buffer[0] = 5
        assert other.buffer[0] == 5
    with pytest.raises(SharedMemoryError, match=f"{mine.path} cannot be mapped.*owner is gone"):
        attach(mine.path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(SharedMemoryError, match="empty cannot be mapped"):
        attach(tmp_path / "empty")


def test_free_shared_memory_decides_where_segments_go_and_the_fallback_says_so(tmp_path: Path) -> None:
    assert choose_folder(tmp_path, 64 * MEGABYTE, free(64 * MEGABYTE, 0)) == (SHARED_MEMORY, "")
    assert not list(tmp_path.iterdir())
    folder, note = choose_folder(tmp_path, 64 * MEGABYTE + 1, free(64 * MEGABYTE, 65 * MEGABYTE))
    assert folder == tmp_path / "tmp" and folder.is_dir()
    for words in ("64.0 MB", str(folder), "slower", "--shm-size"):
        assert words in note
    with pytest.raises(
        SharedMemoryError, match=r"80\.0 MB of shared memory are needed, /dev/shm has 64\.0 MB free and .*tmp 70\.0 MB.*--shm-size"
    ):
        choose_folder(tmp_path, 80 * MEGABYTE, free(64 * MEGABYTE, 70 * MEGABYTE))


def test_free_bytes_are_those_of_the_file_system_and_0_without_one(tmp_path: Path) -> None:
    status = os.statvfs("/dev/shm")
    assert 0 < segments.free_bytes(SHARED_MEMORY) <= status.f_blocks * status.f_frsize
    assert segments.free_bytes(tmp_path / "missing") == 0


def test_segments_in_files_work_alike(run_folder: Path) -> None:
    folder, _ = choose_folder(run_folder, 8, free(0, MEGABYTE))
    with create(folder, run_folder, "completions", 0, 8) as mine, attach(mine.path) as other:
        mine.buffer[0] = 5
        assert other.buffer[0] == 5
    assert not list(folder.iterdir())


def test_memory_that_cannot_be_reserved_is_an_error_and_leaves_nothing(run_folder: Path) -> None:
    """RLIMIT_FSIZE stands in for a full /dev/shm: posix_fallocate fails there as well, with another errno."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, before[1]))
    try:
        with pytest.raises(
            SharedMemoryError, match=r"weights-0-.*: 2\.0 MB cannot be reserved \(File too large\); .* [MG]B are free in /dev/shm"
        ):
            create(SHARED_MEMORY, run_folder, "weights", 0, 2 * MEGABYTE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("call", ["posix_fallocate", "fstat"])
def test_ctrl_c_while_a_segment_is_made_leaves_nothing(run_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """While its pages are reserved, and right after its file was made."""
    opened = len(os.listdir("/proc/self/fd"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            create(SHARED_MEMORY, run_folder, "weights", 0, MEGABYTE)
    assert list(SHARED_MEMORY.glob(f"{segments.run_prefix(run_folder)}-*")) == []
    assert len(os.listdir("/proc/self/fd")) == opened


FULL = """
import sys
from pathlib import Path
from jaxprorl.errors import SharedMemoryError
from jaxprorl.rollout import segments
run_folder = Path(sys.argv[1])
shared = segments.SHARED_MEMORY
print(segments.choose_folder(run_folder, 64 << 10) == (shared, ""), segments.choose_folder(run_folder, 65 << 10)[0] == run_folder / "tmp")
with segments.create(shared, run_folder, "completions", 0, 40 << 10) as segment:
    segment.buffer[:] = bytes([1]) * len(segment.buffer)
    try:
        segments.create(shared, run_folder, "completions", 1, 40 << 10)
    except SharedMemoryError as error:
        print("No space left on device" in str(error))
print(list(shared.iterdir()))
"""


def test_a_shared_memory_of_64_kb_is_refused_without_a_bus_error(tmp_path: Path) -> None:
    """A real one, in a mount namespace of its own, where the system lets us have one."""
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=64k none /dev/shm"
    if subprocess.run([*enter, mount], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    command = f'{mount} && exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        [*enter, command, sys.executable, FULL, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "True True\nTrue\n[]\n"), done.stderr


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_a_killed_owner_leaves_is_reaped_and_living_ones_are_not_touched(run_folder: Path, kind: str) -> None:
    other_run = run_folder / "other"
    folder = SHARED_MEMORY if kind == "memory" else run_folder / "tmp"
    folder.mkdir(exist_ok=True)
    killed, killed_path = owner(folder, run_folder)
    living, living_path = owner(folder, run_folder)
    stranger, stranger_path = owner(SHARED_MEMORY, other_run)
    with killed, living, stranger:
        assert reap(run_folder) == []
        killed.send_signal(signal.SIGKILL)
        stranger.send_signal(signal.SIGKILL)
        assert killed.wait() == stranger.wait() == -signal.SIGKILL
        assert killed_path.exists()  # the kernel does not remove it
        assert reap(run_folder) == [killed_path]
        assert not killed_path.exists() and living_path.exists() and stranger_path.exists()
        assert reap(other_run) == [stranger_path]  # another run's: only that run's start removes it
        living.communicate("")
    assert not living_path.exists()


def test_ctrl_c_leaves_nothing(run_folder: Path) -> None:
    process, path = owner(SHARED_MEMORY, run_folder)
    with process:
        assert path.exists()
        process.send_signal(signal.SIGINT)
        assert process.wait() != 0
        assert not path.exists()


def test_a_process_that_merely_attached_keeps_nothing_from_being_reaped(run_folder: Path) -> None:
    process, path = owner(SHARED_MEMORY, run_folder)
    with process, attach(path) as segment:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert reap(run_folder) == [path]
        segment.buffer[0] = 1  # the mapping stays
