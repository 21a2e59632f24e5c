"""Places that cannot be written are refused in one line before long work, and what can be done without writing is done."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_run
from places import read_only

from jaxprorl.config import validate
from jaxprorl.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG = "a" * 300
CONFIG = f"--config={tiny_run.ROOT}/tests/tiny_run.py:"


def launch(place: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(tiny_run.ROOT / "launch" / script), *arguments], cwd=place, env=tiny_run.user_environment(),
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("script", ["train.py", "warmstart.py"])
@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ("a_file", "a_file is no folder"),
        ("a_file/below", "a_file is no folder, and the base model has to be made and kept there"),
        (LONG, "File name too long, and the base model has to be made and kept there"),
    ],
)
def test_a_cache_that_could_not_hold_the_base_model_is_refused(tmp_path: Path, script: str, cache: str, words: str) -> None:
    (tmp_path / "a_file").write_text("")
    assert_refused(
        launch(tmp_path, script, CONFIG, f"--config.cache_dir={cache}"), f"cache_dir = '{cache}': ", words, "--config.cache_dir="
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


@pytest.mark.parametrize("script", ["train.py", "warmstart.py"])
def test_a_cache_without_permission_is_refused(tmp_path: Path, script: str) -> None:
    (tmp_path / "cache").mkdir()
    with read_only(tmp_path / "cache"):
        assert_refused(
            launch(tmp_path, script, CONFIG, "--config.cache_dir=cache"), "cache_dir = 'cache': ", "the base model has to be made"
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("runs", "words"), [("a_file", "a_file is no folder"), (LONG, "File name too long"), ("/proc/nothing", "/proc/nothing")]
)
def test_a_folder_of_runs_that_cannot_be_written_is_refused(tmp_path: Path, runs: str, words: str) -> None:
    (tmp_path / "a_file").write_text("")
    assert_refused(launch(tmp_path, "train.py", CONFIG, f"--config.runs_dir={runs}"), f"runs_dir = '{runs}': ", words, "choose another one")


def test_a_folder_of_runs_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with read_only(tmp_path / "runs"):
        assert_refused(launch(tmp_path, "train.py", CONFIG), "runs_dir = 'runs': ", "choose another one")


def test_a_name_that_no_file_system_takes_is_refused_at_once() -> None:
    config = tiny_run.tiny()
    config.run_name = "a" * 200
    validate(config)
    for name in ("a" * 201, LONG):
        config.run_name = name
        with pytest.raises(ConfigError, match=f"run_name = .*: has {len(name)} characters, use 200 at most"):
            validate(config)


def test_an_ablation_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    for change, words in (
        (f"ablations_dir={tmp_path}/a_file", f"{tmp_path}/a_file is no folder"),
        (f"ablations_dir={tmp_path}/{LONG}", "File name too long"),
        (f"name={LONG}", "use 100 characters at most"),
    ):
        done = launch(tiny_run.ROOT, "ablate.py", "--config=configs/ablations/reset.py", "--plan", f"--config.{change}")
        assert_refused(done, change.partition("=")[0], words)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and the cache that it was made with, none of which is shared."""
    folder = tiny_run.new_home(tmp_path_factory)
    tiny_run.train(folder, "steps=2")
    return folder


@pytest.fixture
def archive(home: Path) -> Iterator[Path]:
    """The same, and its runs can only be read."""
    with read_only(home / "runs"):
        yield home


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("replay.py --run runs/tiny", "valid for the whole run"),
        ("sample.py --run runs/tiny --prompts 1", "of 2 solved"),
        ("checkpoints.py list runs/tiny", "step      2"),
        ("checkpoints.py verify runs/tiny", "step      2  sound"),
        ("checkpoints.py show runs/tiny", '"step": 2'),
        ("checkpoints.py diff runs/tiny runs/tiny", "equal, bit for bit"),
        ("report.py --run runs/tiny --output OUT", "tensorboard (2 steps)"),
        ("export_hf.py --run runs/tiny --output OUT/model", "step 2, float32"),
    ],
)
def test_of_a_run_that_can_only_be_read_is_shown_what_can_be_shown(archive: Path, tmp_path: Path, command: str, words: str) -> None:
    done = launch(archive, *command.replace("OUT", str(tmp_path)).split())
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_a_finished_run_that_can_only_be_read_prints_its_table_and_nothing_else_is_started(archive: Path) -> None:
    done = launch(archive, "train.py", CONFIG, "--config.steps=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "number_filtering" in done.stdout and done.stdout.endswith("2 steps are done; report: runs/tiny/report.html\n")
    for change in ("steps=4", "on_existing=replace", "run_name=other"):
        assert_refused(launch(archive, "train.py", CONFIG, "--config.steps=2", f"--config.{change}"), "runs_dir = 'runs': ")
    assert_refused(
        launch(archive, "train.py", CONFIG, "--config.seed=5", "--config.steps=2"), "holds a run of another config (seed was 0, now 5)"
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("report.py --run runs/tiny", "name another folder with --output"),
        ("report.py --run runs/tiny --output runs/other", "name another folder with --output"),
        ("export_hf.py --run runs/tiny --output runs/model", "cannot be written"),
        ("reset.py --run runs/unfinished", "command.json cannot be written ("),
    ],
)
def test_what_would_have_to_be_written_there_is_refused(home: Path, command: str, words: str) -> None:
    unfinished = home / "runs/unfinished"
    if not unfinished.exists():
        unfinished.mkdir()
        shutil.copy(home / "runs/tiny/config.json", unfinished)
    with read_only(home / "runs"):
        assert_refused(launch(home, *command.split()), words)


def test_a_cache_that_can_only_be_read_serves_and_an_empty_one_is_done_without(home: Path, tmp_path: Path) -> None:
    """The second run goes on from a checkpoint, and needs no base model."""
    shutil.copytree(home / ".cache", tmp_path / "full")
    (tmp_path / "empty").mkdir()
    with read_only(tmp_path / "full"), read_only(tmp_path / "empty"):
        done = launch(tmp_path, "train.py", CONFIG, "--config.steps=2", "--config.cache_dir=full")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("WARNING: full (cache_dir): ") == 1 and "warm start" not in done.stdout
        done = launch(tmp_path, "train.py", CONFIG, "--config.steps=4", "--config.cache_dir=empty")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("WARNING: empty (cache_dir): ") == 1 and "going on from the checkpoint of step 2" in done.stdout
    run, reference = tmp_path / "runs/tiny", home / "runs/tiny"
    assert tiny_run.timeless_metrics(run)[:2] == tiny_run.timeless_metrics(reference)
