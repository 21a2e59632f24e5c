import errno
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxprorl import files
from jaxprorl.files import TakenError, contents, new_file, new_folder, scratch_in, sweep, write_atomically

ROOT = Path(__file__).resolve().parent.parent

# Makes TARGET with three files, some of which take a while, and prints what it is about to do. Arguments: TARGET, seconds, replace.
MAKE = """
import sys, time
from pathlib import Path
from jaxprorl.files import TakenError, new_folder
target, seconds, replace = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "True"
try:
    with new_folder(target, replace=replace, last="config.json") as scratch:
        print("writing", flush=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (scratch / name).write_text(f"{name} of {len(name)}" * 1000)
            time.sleep(seconds / 3)
except TakenError as error:
    sys.exit(f"taken: {error}")
"""
WHOLE = {name: f"{name} of {len(name)}" * 1000 for name in ("config.json", "model.safetensors", "tokenizer.json")}


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def fill(folder: Path) -> None:
    (folder / "config.json").write_text("ours")


@pytest.fixture(params=["missing", "empty"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that may be made: it is not there, or empty."""
    folder = tmp_path / "out"
    if request.param == "empty":
        folder.mkdir()
    return folder


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, empty but for lost+found."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    (folder / "lost+found").mkdir()
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_folder_gets_its_name_when_it_is_complete(target: Path) -> None:
    was_there = target.exists()
    with new_folder(target) as scratch:
        fill(scratch)
        assert contents(target) == []
        assert target.exists() == was_there
    assert held(target) == {"config.json": "ours"}
    assert sorted(path.name for path in target.parent.iterdir()) == ["out"]
    assert target.stat().st_mode == (target.parent / "out").stat().st_mode


def test_an_error_leaves_everything_as_it_was(target: Path) -> None:
    was_there = target.exists()
    with pytest.raises(KeyError), new_folder(target) as scratch:
        fill(scratch)
        raise KeyError
    assert target.exists() == was_there
    assert not was_there or held(target) == {}
    assert scratch_in(target.parent) == []


def test_a_folder_that_holds_something_is_refused_at_once_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TakenError, match=r"it holds notes\.txt"), new_folder(tmp_path / "out"):
        raise AssertionError
    with pytest.raises(TakenError, match=r"file is there already and no folder"), new_folder(tmp_path / "file"):
        raise AssertionError
    assert (tmp_path / "out/notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "a folder", ".hidden"])
def test_what_somebody_puts_there_meanwhile_survives(name: str, target: Path) -> None:
    def put() -> None:
        target.mkdir(exist_ok=True)
        (target / name).mkdir() if name == "a folder" else (target / name).write_text("mine")

    with pytest.raises(TakenError, match=re.escape(f"it holds {name}, which somebody else put there")), new_folder(target) as scratch:
        fill(scratch)
        put()
    assert [path.name for path in target.iterdir()] == [name], "what is theirs stays, what is ours is gone"
    assert (target / name).is_dir() or (target / name).read_text() == "mine"
    assert scratch_in(target.parent) == scratch_in(target) == []


def test_a_file_that_takes_the_name_meanwhile_survives(tmp_path: Path) -> None:
    with pytest.raises(TakenError, match="there already and no folder"), new_folder(tmp_path / "out") as scratch:
        fill(scratch)
        (tmp_path / "out").write_text("mine")
    assert held(tmp_path) == {"out": "mine"}


@pytest.mark.parametrize(
    "name", ["out.writing", ".out.tmp", "out.old-1", f"out.{files.HOST}-123.writing", f"out.{files.HOST}-1-0123456.writing"]
)
def test_a_users_own_folder_with_a_similar_name_survives(name: str, target: Path) -> None:
    (target.parent / name).mkdir()
    (target.parent / name / "thesis.tex").write_text("mine")
    with new_folder(target) as scratch:
        fill(scratch)
    assert held(target.parent / name) == {"thesis.tex": "mine"}


def test_an_empty_mount_point_is_filled_in_place(mounted: Path) -> None:
    with new_folder(mounted, last="config.json") as scratch:
        assert scratch.stat().st_dev == mounted.stat().st_dev != mounted.parent.stat().st_dev
        fill(scratch)
    assert sorted(path.name for path in mounted.iterdir()) == ["config.json", "lost+found"]
    assert os.path.ismount(mounted)
    assert [path.name for path in mounted.parent.iterdir()] == ["mounted"]


def test_a_folder_given_by_somebody_else_keeps_its_mode_and_needs_nothing_of_its_parent(tmp_path: Path) -> None:
    target = tmp_path / "given/out"
    target.mkdir(parents=True)
    target.chmod(0o2770)
    before = target.stat()
    with new_folder(target) as scratch:
        assert scratch.parent == target, "nothing is written around it"
        fill(scratch)
    assert (target.stat().st_mode, target.stat().st_ino) == (before.st_mode, before.st_ino)


def test_the_file_without_which_nothing_works_is_moved_up_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    rename = Path.rename

    def logged(source: Path, to: Path) -> Path:
        moved.append(to.name)
        return rename(source, to)

    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out", last="config.json") as scratch:
        for name in WHOLE:
            (scratch / name).write_text(name)
        monkeypatch.setattr(Path, "rename", logged)
    assert moved == ["model.safetensors", "tokenizer.json", "config.json"]


def test_files_moved_up_before_an_error_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fails_once(source: Path, to: Path) -> Path:
        if to == tmp_path / "out/tokenizer.json":
            raise OSError(errno.EIO, "Input/output error")
        return rename(source, to)

    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="Input/output"), new_folder(tmp_path / "out") as scratch:
        for name in WHOLE:
            (scratch / name).write_text(name)
        monkeypatch.setattr(Path, "rename", fails_once)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_older_folder_is_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/older").write_text("")
    with new_folder(tmp_path / "out", replace=True) as scratch:
        fill(scratch)
    assert held(tmp_path / "out") == {"config.json": "ours"}


@pytest.mark.parametrize("number", [2, 4])
def test_of_processes_that_make_one_folder_together_one_wins_and_the_others_say_so(number: int, target: Path) -> None:
    processes = [start(MAKE, target, 0.5, False) for _ in range(number)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0] + [1] * (number - 1), errors
    assert all(error.startswith("taken: ") for error in errors if error)
    assert held(target) == WHOLE
    assert scratch_in(target.parent) == []


@pytest.mark.parametrize("rounds", [6, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_four_processes_killed_at_random_leave_nothing_that_looks_finished_and_no_debris(rounds: int, target: Path) -> None:
    draw, killed, was_there = random.Random(0), 0, target.exists()
    for number in range(rounds):
        processes = [start(MAKE, target, 0.2, False) for _ in range(4)]
        time.sleep(draw.uniform(0.0, 0.6))
        for process in processes[: 1 + number % 4]:
            killed += process.poll() is None
            kill(process)
        rest = processes[1 + number % 4 :]
        errors = [process.communicate(timeout=60)[1] for process in rest]
        assert all(process.returncode in (0, 1) for process in rest), errors
        assert all(error.startswith("taken: ") for error in errors if error), errors
        finished = (target / "config.json").is_file()
        if finished:
            assert {name: text for name, text in held_files(target).items()} == WHOLE
        else:
            assert not rest or (target / files._CLAIM).exists(), "one that was not killed finishes it"
        sweep(target.parent)
        sweep(target)
        assert scratch_in(target.parent) == [] and (not target.exists() or scratch_in(target) == [])
        shutil.rmtree(target, ignore_errors=True)
        if was_there:
            target.mkdir()
    assert killed > rounds / 2


def held_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_a_killed_one_is_swept_away_and_a_living_one_is_left(tmp_path: Path) -> None:
    living, dying = start(MAKE, tmp_path / "a", 60, False), start(MAKE, tmp_path / "b", 60, False)
    try:
        assert all(process.stdout and process.stdout.readline() == "writing\n" for process in (living, dying))
        kill(dying)
        (removed,) = sweep(tmp_path)
        assert removed.startswith(f"b.{files.HOST}-{dying.pid}-")
        (left,) = scratch_in(tmp_path)
        assert left.name.startswith(f"a.{files.HOST}-{living.pid}-")
        os.kill(living.pid, signal.SIGSTOP)  # one that hangs is alive
        assert sweep(tmp_path) == []
    finally:
        kill(living)
    assert sweep(tmp_path) == [left.name]


def test_what_another_host_writes_and_where_there_are_no_locks_all_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.elsewhere-1-0123abcd.writing").mkdir()
    assert sweep(tmp_path) == []
    (tmp_path / f"out.{files.HOST}-1-0123abcd.writing").mkdir()

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as here:
        here.setattr(files.fcntl, "flock", no_locks)
        assert sweep(tmp_path) == []
        with new_folder(tmp_path / "out") as scratch:
            fill(scratch)
        write_atomically(tmp_path / "file", "written")
    assert held(tmp_path / "out") == {"config.json": "ours"}
    assert (tmp_path / "file").read_text() == "written"
    assert sweep(tmp_path) == [f"out.{files.HOST}-1-0123abcd.writing"]


def test_a_scratch_that_is_swept_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, swept = files.try_lock, []

    def sweep_first(descriptor: int) -> bool | None:
        monkeypatch.setattr(files, "try_lock", lock)
        swept.extend(sweep(tmp_path))
        return lock(descriptor)

    for target in ("out", "file"):
        monkeypatch.setattr(files, "try_lock", sweep_first)
        if target == "out":
            with new_folder(tmp_path / target) as scratch:
                fill(scratch)
        else:
            write_atomically(tmp_path / target, "ours")
    assert [name.partition(".")[0] for name in swept] == ["out", "file"]
    assert held(tmp_path / "out") == {"config.json": "ours"}
    assert (tmp_path / "file").read_text() == "ours"


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "älter")
    with pytest.raises(KeyError), new_file(path) as file:
        file.write(b"half of i")
        raise KeyError
    assert held(tmp_path) == {"summary.json": "älter"}
    write_atomically(path, b"new")
    assert held(tmp_path) == {"summary.json": "new"}
    with pytest.raises(FileExistsError):
        write_atomically(path, "newer", overwrite=False)
    assert held(tmp_path) == {"summary.json": "new"}


WRITE = """
import sys
from pathlib import Path
from jaxprorl.files import write_atomically
for number in range(int(sys.argv[3])):
    write_atomically(Path(sys.argv[1]), sys.argv[2] * 100_000)
"""


def test_four_writers_of_one_file_leave_one_of_theirs_whole(tmp_path: Path) -> None:
    path, writers = tmp_path / "report.html", [start(WRITE, tmp_path / "report.html", letter, 40) for letter in "abcd"]
    while any(writer.poll() is None for writer in writers):
        assert not path.exists() or len(set(path.read_text())) == 1
        time.sleep(0.01)
    assert [writer.communicate()[1] for writer in writers] == [""] * 4
    assert len(path.read_text()) == 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_writer_that_is_killed_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for seconds in (0.2, 0.35, 0.5):
        path.write_text("before")
        writer = start(WRITE, path, "a", 10**6)
        time.sleep(seconds)
        kill(writer)
        assert path.read_text() in ("before", "a" * 100_000)
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", ["m" * 250, "モデル" * 25, "a name with spaces, [brackets] and *"])
def test_any_name_that_the_file_system_takes_will_do(name: str, tmp_path: Path) -> None:
    with new_folder(tmp_path / name) as scratch:
        fill(scratch)
    write_atomically(tmp_path / name / name, "x")
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == sorted(["config.json", name])


def test_the_host_in_a_scratch_name_is_this_one() -> None:
    assert files.HOST.startswith(re.sub(r"[^\w.-]", "_", socket.gethostname())[:32])
