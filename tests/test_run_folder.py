import json
import os
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from ml_collections import ConfigDict
from places import small_disk

from configs.base import stage
from configs.quickstart import get_config
from jaxprorl import run_folder, sizes
from jaxprorl.config import to_json
from jaxprorl.errors import ConfigError, RunLockedError, StorageError
from jaxprorl.files import HOST
from jaxprorl.run_folder import RunFolder, as_begun, move_aside, what_comes_next
from jaxprorl.run_lock import RunLock


@pytest.fixture
def config(tmp_path: Path) -> ConfigDict:
    config = get_config()
    config.runs_dir = str(tmp_path / "runs")
    return config


def open_run(config: ConfigDict) -> RunFolder:
    """Opened, and let go again."""
    with ExitStack() as stack:
        return run_folder.open_run(config, stack)


def begin(config: ConfigDict) -> RunFolder:
    """A run that has begun: it has an event."""
    folder = open_run(config)
    folder.events.write_text("{}\n")
    return folder


def test_a_new_run_gets_its_folder_with_the_resolved_config(config: ConfigDict, tmp_path: Path) -> None:
    folder = open_run(config)
    assert folder.path == tmp_path / "runs/quickstart"
    assert json.loads(folder.config.read_text())["steps"] == config.steps
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "config.json"]


def test_the_same_config_goes_on(config: ConfigDict) -> None:
    assert begin(config) == open_run(config)


def test_a_run_goes_on_with_the_host_devices_that_were_chosen_for_it_on_another_machine(
    config: ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.mesh.cpu_devices, config.batch.micro_batch_rows = 0, 0
    folder = RunFolder(Path(config.runs_dir) / config.run_name)
    for cores, expected in ((4, 4), (2, 4), (8, 4)):
        monkeypatch.setattr(sizes, "usable_cores", lambda cores=cores: cores)
        begun = as_begun(config, folder)
        assert (begun.mesh.cpu_devices, config.mesh.cpu_devices) == (expected, 0)
        begin(begun)
    config.on_existing = "replace"
    assert as_begun(config, folder).mesh.cpu_devices == 8


@pytest.mark.parametrize("stored", [None, {"cpu_devices": "2"}, "mesh"])
def test_a_stored_mesh_that_is_none_leaves_the_choice_to_the_rule(
    config: ConfigDict, stored: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "usable_cores", lambda: 4)
    folder = begin(as_begun(config, RunFolder(Path(config.runs_dir) / config.run_name)))
    content = json.loads(folder.config.read_text())
    content["mesh"] = content["mesh"] | stored if isinstance(stored, dict) and stored else stored
    folder.config.write_text(json.dumps(content))
    config.mesh.cpu_devices = 0
    assert as_begun(config, folder).mesh.cpu_devices == 4


def test_a_number_that_may_change_is_chosen_anew(config: ConfigDict, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begin(config)
    monkeypatch.setattr(sizes, "usable_cores", lambda: 4)
    config.mesh.cpu_devices, config.checkpoint.accept = 0, "mesh.cpu_devices"
    assert as_begun(config, folder).mesh.cpu_devices == 4


def test_another_mesh_chooses_anew(config: ConfigDict) -> None:
    folder = begin(config)
    config.mesh.cpu_devices, config.mesh.strategy, config.mesh.tensor = 0, "fsdp_tp", 4
    assert as_begun(config, folder).mesh.cpu_devices == 4


def test_a_start_that_failed_decides_nothing(config: ConfigDict, monkeypatch: pytest.MonkeyPatch) -> None:
    config.mesh.cpu_devices = 0
    for cores in (4, 2):
        monkeypatch.setattr(sizes, "usable_cores", lambda cores=cores: cores)
        folder = open_run(as_begun(config, RunFolder(Path(config.runs_dir) / config.run_name)))
        assert json.loads(folder.config.read_text())["mesh"]["cpu_devices"] == cores


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("", "steps", 7), ("", "cache_dir", "x"), ("monitoring", "progress", False), ("checkpoint", "keep", 9), ("grading", "workers", 3),
        ("checkpoint", "on_damage", "previous"),
    ],
)  # fmt: skip
def test_fields_that_do_not_change_a_step_may_change(config: ConfigDict, section: str, field: str, value: object) -> None:
    begin(config)
    (config[section] if section else config)[field] = value
    folder = open_run(config)
    stored = json.loads(folder.config.read_text())
    assert (stored[section] if section else stored)[field] == value


@pytest.mark.parametrize(
    ("section", "field", "value", "words"),
    [
        ("", "seed", 5, "seed was 0, now 5"),
        ("algorithm", "clip_low", 0.1, "algorithm.clip_low was 0.2, now 0.1"),
        ("validation", "every_steps", 3, "validation.every_steps was 20, now 3"),
        ("grading", "timeout_s", 1.0, "grading.timeout_s was 5.0, now 1.0"),
    ],
)
def test_another_config_is_refused_with_the_field_and_the_remedy(
    config: ConfigDict, section: str, field: str, value: object, words: str
) -> None:
    folder = begin(config)
    before = folder.config.read_text()
    (config[section] if section else config)[field] = value
    with pytest.raises(ConfigError) as caught:
        open_run(config)
    assert words in str(caught.value)
    assert "--config.run_name" in str(caught.value)
    assert "--config.on_existing=replace" in str(caught.value)
    assert f"--config.checkpoint.accept={words.split()[0]} to go on all the same" in str(caught.value)
    assert folder.config.read_text() == before


def test_many_differences_are_cut_short(config: ConfigDict) -> None:
    begin(config)
    for field in ("rows", "row_tokens", "warmup_updates", "skill_updates", "careless_updates"):
        config.warmstart[field] += 1
    with pytest.raises(ConfigError, match="…"):
        open_run(config)


def test_a_field_that_is_accepted_by_name_may_change_and_only_that_one(config: ConfigDict) -> None:
    begin(config)
    config.algorithm.clip_low, config.seed = 0.1, 5
    config.checkpoint.accept = "data, algorithm.clip_low"
    with pytest.raises(ConfigError, match=r"\(seed was 0, now 5\)"):
        open_run(config)
    config.checkpoint.accept = "algorithm.clip_low,seed"
    open_run(config)
    config.checkpoint.accept = ""
    open_run(config)  # what was accepted is the run's config now


def test_a_run_is_locked_until_the_stack_closes(config: ConfigDict, tmp_path: Path) -> None:
    with ExitStack() as stack:
        folder = run_folder.open_run(config, stack)
        before = folder.config.read_text()
        config.steps = 7
        for config.on_existing in ("resume", "replace"):
            with pytest.raises(RunLockedError, match="is in use by process"):
                open_run(config)
        assert folder.config.read_text() == before
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["quickstart"]
    open_run(config)


def test_the_new_folder_of_a_replaced_run_is_locked_too(config: ConfigDict) -> None:
    begin(config)
    config.on_existing = "replace"
    with ExitStack() as stack:
        run_folder.open_run(config, stack)
        config.on_existing = "resume"
        with pytest.raises(RunLockedError):
            open_run(config)


def test_a_folder_that_cannot_be_written_is_a_clear_error(config: ConfigDict, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"runs_dir = .*: the run's folder cannot be written .*; choose another one"):
        open_run(config)


def test_on_a_full_disk_the_same_config_opens_and_a_changed_one_is_told_to_make_room(config: ConfigDict, tmp_path: Path) -> None:
    with small_disk(tmp_path / "runs", 1) as disk:
        folder = begin(config)
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        before = folder.config.read_text()
        for _ in range(2):
            assert open_run(config) == folder
        config.steps += 1
        with pytest.raises(StorageError) as caught:
            open_run(config)
        told = str(caught.value)
        assert told.startswith(f"{folder.path} cannot be written (No space left on device): ") and "0.0 kB free there" in told
        assert "make room on that disk, then give the same command again" in told and "choose another" not in told
        assert folder.config.read_text() == before


def test_a_config_that_is_the_same_is_not_written_again(config: ConfigDict) -> None:
    file = begin(config).config
    before = file.stat()
    assert open_run(config).config.stat().st_ino == before.st_ino
    config.steps += 1
    assert open_run(config).config.stat().st_ino != before.st_ino


def test_a_start_that_failed_early_does_not_hold_the_folder(config: ConfigDict) -> None:
    open_run(config)
    config.seed = 5
    assert json.loads(open_run(config).config.read_text())["seed"] == 5


def test_tuples_in_a_config_are_no_difference(config: ConfigDict) -> None:
    assert isinstance(config.data.tasks.complex_arithmetic.operations_weights, tuple)
    begin(config)
    open_run(config)


def test_replace_moves_the_old_run_aside(config: ConfigDict) -> None:
    folder = begin(config)
    config.seed = 5
    config.on_existing = "replace"
    for number in (1, 2):
        folder.events.write_text(f"{number}\n")
        open_run(config)
        assert not folder.events.exists()
        assert (folder.path.with_name(f"quickstart.old-{number}") / "events.jsonl").read_text() == f"{number}\n"


@pytest.mark.parametrize("names", [("grading.solved_from",), ("data.overlong_prompts", "data.on_conflicting_answers"), ("filtering",)])
def test_a_run_of_before_a_field_goes_on_with_its_default_and_with_no_other_value(config: ConfigDict, names: tuple[str, ...]) -> None:
    file = begin(config).config
    stored = json.loads(file.read_text())
    for name in names:
        group, _, field = name.rpartition(".")
        del (stored[group] if group else stored)[field]
    file.write_text(json.dumps(stored))
    open_run(config)
    assert json.loads(file.read_text()) == json.loads(to_json(config))
    file.write_text(json.dumps(stored))
    with config.unlocked():
        config.grading.solved_from = 0.5
        config.data.overlong_prompts = "drop"
        config.filtering.rule = "off"
    with pytest.raises(ConfigError, match=names[0]):
        open_run(config)


def test_moving_aside_takes_the_first_free_name(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x.old-1").mkdir()
    assert move_aside(tmp_path / "x") == tmp_path / "x.old-2"


def test_a_name_that_another_process_takes_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x", "x.old-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "what").write_text(name)
    monkeypatch.setattr(run_folder.os.path, "lexists", lambda _: False)  # looked before the other process came
    assert move_aside(tmp_path / "x") == tmp_path / "x.old-2"
    assert [(tmp_path / name / "what").read_text() for name in ("x.old-1", "x.old-2")] == ["x.old-1", "x"]


def test_a_process_that_takes_the_place_of_a_run_moved_aside_is_named(config: ConfigDict, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(config)
    config.on_existing, move = "replace", run_folder.move_aside
    with ExitStack() as other:

        def move_and_come_first(path: Path) -> Path:
            moved = move(path)
            path.mkdir()
            other.enter_context(RunLock(path))
            return moved

        monkeypatch.setattr(run_folder, "move_aside", move_and_come_first)
        with pytest.raises(RunLockedError, match=rf"is in use by process {os.getpid()} on "):
            open_run(config)


def test_what_a_killed_process_was_writing_is_removed_at_the_next_start(config: ConfigDict) -> None:
    folder = begin(config)
    (folder.path / f"config.json.{HOST}-1-0123abcd.writing").write_text("{")
    (folder.path / f"model.{HOST}-1-0123abcd.writing").mkdir()
    (folder.path / "mine.writing").mkdir()
    open_run(config)
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "config.json", "events.jsonl", "mine.writing"]


LONGER = {"rollout.max_response_tokens": 80, "batch.row_tokens": 104}


def staged(config: ConfigDict, *rows: dict, accept: str = "") -> ConfigDict:
    changed = config.copy_and_resolve_references()
    changed.stages, changed.checkpoint.accept = rows, accept
    return changed


def refused_stages(config: ConfigDict) -> str:
    with pytest.raises(ConfigError) as caught:
        open_run(config)
    return str(caught.value)


def test_a_stage_that_changes_the_length_of_exams_must_be_accepted_by_name(config: ConfigDict) -> None:
    folder = begin(staged(config, stage("one", 5)))
    rows = stage("one", 5), stage("two", 5, LONGER)
    words = refused_stages(staged(config, *rows, accept="stages.1"))
    assert words.startswith("rollout.max_response_tokens: validation and evaluation go by the largest of all stages, which was ")
    assert "would be 80" in words and len(json.loads(folder.config.read_text())["stages"]) == 1, "the run's config stays as it was"
    open_run(staged(config, stage("one", 5), stage("two", 5), accept="stages.1"))
    open_run(
        staged(
            config,
            *rows,
            accept="stages.1,stages.1.changes.rollout.max_response_tokens,rollout.max_response_tokens,"
            "stages.1.changes.batch.row_tokens,stages.1.changes",
        )
    )


def test_stages_that_have_begun_stay_as_they_are(config: ConfigDict) -> None:
    old = stage("one", 5), stage("two", 5), stage("three", 5)
    folder = begin(staged(config, *old))
    folder.events.write_text('{"step": 0, "kind": "stage", "number": 1}\n{"step": 5, "kind": "stage", "number": 2}\n')
    accept = "stages.0.steps,stages.1.steps,stages.2.steps,stages.2,stages.1"
    for number in (0, 1):
        rows = [row | {"steps": 9} if index == number else row for index, row in enumerate(old)]
        assert refused_stages(staged(config, *rows, accept=accept)).startswith(f"stages.{number}: ")
    assert refused_stages(staged(config, old[0], accept=accept)).startswith("stages.1: ")
    open_run(staged(config, *old[:2], old[2] | {"steps": 9}, accept=accept))


def test_stages_may_be_added_to_a_run_without_them_if_the_first_changes_nothing(config: ConfigDict) -> None:
    begin(config)
    accept = "stages,stages.0,stages.1"
    changed = stage("one", 5, {"batch.prompts": 8})
    assert refused_stages(staged(config, changed, accept=accept)).startswith("stages.0: ")
    open_run(staged(config, stage("one", 5), changed | {"name": "two"}, accept=accept))


def test_an_interruption_says_whether_anything_was_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    assert what_comes_next(folder) == "there is no checkpoint yet, the same command starts over"
    (folder.checkpoints / "step_4.orbax-checkpoint-tmp").mkdir(parents=True)
    assert "starts over" in what_comes_next(folder)
    (folder.checkpoints / "step_10.commit.json").write_text("{}")
    assert what_comes_next(folder) == "the same command goes on from the last checkpoint, of step 10"
