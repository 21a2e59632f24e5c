import shutil
from pathlib import Path

import pytest

from jaxprorl import commit
from jaxprorl.commit import Record, committed_steps, damage, read_record, remove, remove_debris, to_keep, write_record
from jaxprorl.errors import CheckpointError


def write_files(folder: Path, step: int) -> Path:
    """The files of a checkpoint, not yet committed."""
    root = commit.step_folder(folder, step)
    (root / "state/deep").mkdir(parents=True)
    (root / "state/deep/array").write_bytes(bytes(range(256)) * 20)
    (root / "state/empty").write_bytes(b"")
    (root / "host").write_text(f"step {step}")
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 2 and 10, committed."""
    for step in (10, 2):
        write_files(tmp_path, step)
        write_record(tmp_path, step, 7, 0.25 if step == 2 else None, step == 10)
    return tmp_path


def test_a_record_comes_back_as_it_was_written(folder: Path) -> None:
    record = write_record(folder, 2, 7, 0.1 + 0.2, True)
    assert read_record(folder, 2) == record
    assert record == Record(2, 7, record.files, 0.30000000000000004, True)
    assert set(record.files) == {"host", "state/deep/array", "state/empty"}
    assert record.files["state/empty"] == {"sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "bytes": 0}
    assert record.bytes == 5120 + 6


def test_steps_are_in_numeric_order_and_sound(folder: Path) -> None:
    assert committed_steps(folder) == [2, 10]
    assert [damage(folder, step) for step in (2, 10)] == [None, None]
    assert committed_steps(folder / "nowhere") == []


def test_without_a_record_nothing_is_committed(folder: Path) -> None:
    write_files(folder, 12)
    (folder / "step_12.commit.json.host-1-0123abcd.writing").write_text("{")
    assert committed_steps(folder) == [2, 10]
    with pytest.raises(CheckpointError, match="holds no committed checkpoint of step 12"):
        read_record(folder, 12)


def test_a_record_is_in_place_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(folder, 12)

    def torn(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", torn)
    with pytest.raises(OSError, match="disk full"):
        write_record(folder, 12, 7, None, False)
    assert committed_steps(folder) == [2, 10]
    assert remove_debris(folder, [2, 10]) == ["step_12"]


def edit(path: Path, content: bytes) -> None:
    path.write_bytes(content)


DAMAGES = {
    "truncated": (lambda root: edit(root / "state/deep/array", b"short"), r"state/deep/array has 5 bytes, 5120 were written"),
    "grown": (lambda root: edit(root / "state/empty", b"x"), r"state/empty has 1 bytes, 0 were written"),
    "flipped": (lambda root: edit(root / "host", b"step 3"), r"host has changed since it was written"),
    "missing": (lambda root: (root / "host").unlink(), r"host is missing"),
    "half deleted": (lambda root: shutil.rmtree(root / "state"), r"state/deep/array is missing"),
    "deleted but for the record": (lambda root: shutil.rmtree(root), r"host is missing"),
    "extra": (lambda root: edit(root / "state/more", b""), r"state/more does not belong to the checkpoint"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_named(folder: Path, kind: str) -> None:
    make, words = DAMAGES[kind]
    make(commit.step_folder(folder, 2))
    found = damage(folder, 2)
    assert found is not None
    assert words in found
    assert damage(folder, 10) is None


def test_every_single_flipped_bit_of_a_file_is_found(folder: Path) -> None:
    path = commit.step_folder(folder, 2) / "host"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert damage(folder, 2)
    path.write_bytes(whole)
    assert damage(folder, 2) is None


def test_a_damaged_record_is_damage_whatever_was_hit(folder: Path) -> None:
    path = commit.record_path(folder, 2)
    whole = path.read_bytes()
    broken = [whole[:length] for length in (0, 1, len(whole) // 2, len(whole) - 3)]
    broken += [whole.replace(b'"bytes": 5120', b'"bytes": 5121'), whole.replace(b"0.25", b"0.75"), b"[]\n", b"null", b"\xff\xfe"]
    for content in broken:
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"step_2\.commit\.json is damaged: "):
            read_record(folder, 2)
        assert "is damaged" in str(damage(folder, 2))
    assert committed_steps(folder) == [2, 10], "it is not taken for one that was never made"
    assert [record.step for record in commit.readable_records(folder)] == [10]


def test_removing_takes_the_record_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a crash between the two
    remove(folder, 2)
    assert committed_steps(folder) == [10]
    monkeypatch.undo()
    assert commit.step_folder(folder, 2).is_dir()
    assert remove_debris(folder, [10]) == ["step_2"]
    remove(folder, 10)
    remove(folder, 10)  # nothing there is fine
    assert list(folder.iterdir()) == []


def test_debris_is_all_but_the_committed(folder: Path) -> None:
    write_files(folder, 11)
    (folder / "step_12.orbax-checkpoint-tmp").mkdir()
    (folder / "step_11.commit.json.host-1-0123abcd.writing").write_text("{")
    assert remove_debris(folder, committed_steps(folder)) == [
        "step_11",
        "step_11.commit.json.host-1-0123abcd.writing",
        "step_12.orbax-checkpoint-tmp",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["step_10", "step_10.commit.json", "step_2", "step_2.commit.json"]
    assert remove_debris(folder / "nowhere", []) == []


# step -> validation solve rate; 6 and 12 lie right before a reset.
RATES = {1: 0.5, 2: None, 3: 0.7, 4: 0.7, 6: 0.1, 8: None, 12: 0.2, 13: None}
RECORDS = [Record(step, 7, {}, rate, step in (6, 12)) for step, rate in RATES.items()]


@pytest.mark.parametrize(
    ("newest", "every_steps", "best", "reset_boundaries", "kept"),
    [
        (1, 0, 0, False, {13}),
        (3, 0, 0, False, {8, 12, 13}),
        (99, 0, 0, False, set(RATES)),
        (1, 4, 0, False, {4, 8, 12, 13}),
        (1, 0, 1, False, {4, 13}),  # 3 and 4 are equal: the later one
        (1, 0, 2, False, {3, 4, 13}),
        (1, 0, 3, False, {1, 3, 4, 13}),
        (1, 0, 99, False, {1, 3, 4, 6, 12, 13}),  # those without a validation are never the best
        (1, 0, 0, True, {6, 12, 13}),
        (2, 6, 1, True, {4, 6, 12, 13}),
    ],
)
def test_what_is_kept(newest: int, every_steps: int, best: int, reset_boundaries: bool, kept: set[int]) -> None:
    for records in (RECORDS, RECORDS[::-1]):
        assert to_keep(records, newest, every_steps, best, reset_boundaries) == kept
    assert to_keep([], newest, every_steps, best, reset_boundaries) == set()
