import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from factories import make_group, make_prompt
from ml_collections import ConfigDict

from configs.base import get_config
from jaxprorl import streams
from jaxprorl.errors import CheckpointError, StorageError
from jaxprorl.monitoring import events, metrics, samples
from jaxprorl.monitoring.progress import Progress
from jaxprorl.monitoring.recorder import NO_LINES, Recorder
from jaxprorl.rollout.collect import RolloutBatch
from jaxprorl.run_folder import RunFolder


class FakeTokenizer:
    """Ids as text."""

    def decode(self, ids: object) -> str:
        return " ".join(str(int(number)) for number in ids)  # type: ignore[attr-defined]


@pytest.fixture
def config() -> ConfigDict:
    config = get_config()
    config.monitoring.progress = False
    return config


def recorder(config: ConfigDict, path: Path, step: int = 0, offsets: dict[str, int] = NO_LINES) -> Recorder:
    return Recorder(config, RunFolder(path), Progress(10, False), ["task"], ["domain"], step, offsets)


def batch() -> RolloutBatch:
    """A kept group, one without spread, and a surplus one."""
    groups = [
        make_group(make_prompt(11), [(1, 2), (3,)], [1.0, 0.0]),
        make_group(make_prompt(12), [(4,), (5,)], [0.0, 0.0]),
        make_group(make_prompt(13), [(6,), (7,)], [None, 1.0]),
    ]
    return RolloutBatch(groups, kept=[True, False, False], has_signal=[True, False, True], refills=[2], positions=3)


def test_a_rollout_becomes_events_and_samples(config: ConfigDict, tmp_path: Path) -> None:
    with recorder(config, tmp_path) as log:
        log.rollout(4, batch(), np.array([[0.5, -0.5]]), FakeTokenizer())  # type: ignore[arg-type]
    assert events.read(tmp_path / "events.jsonl") == [
        {"step": 4, "kind": "drop", "prompt_ids": [12]},
        {"step": 4, "kind": "refill", "prompts": 2, "round": 1},
    ]
    rows = samples.read_samples(samples.sample_path(tmp_path / "samples", 4))
    assert [(row["prompt_id"], row["sample"], row["completion"], row["score"], row["kept"], row["advantage"]) for row in rows] == [
        (11, 0, "1 2", 1.0, True, 0.5),
        (11, 1, "3", 0.0, True, -0.5),
        (12, 0, "4", 0.0, False, None),
        (12, 1, "5", 0.0, False, None),
        (13, 0, "6", None, False, None),
        (13, 1, "7", 1.0, False, None),
    ]


def test_groups_left_over_from_an_earlier_step_are_recorded_first(config: ConfigDict, tmp_path: Path) -> None:
    carried = batch()
    carried.carried = [make_group(make_prompt(9), [(8,), (9,)], [0.0, 1.0])]
    with recorder(config, tmp_path) as log:
        log.rollout(4, carried, np.array([[-1.0, 1.0], [0.5, -0.5]]), FakeTokenizer())  # type: ignore[arg-type]
    rows = samples.read_samples(samples.sample_path(tmp_path / "samples", 4))
    assert [(row["prompt_id"], row["sample"], row["kept"], row["advantage"]) for row in rows[:4]] == [
        (9, 0, True, -1.0),
        (9, 1, True, 1.0),
        (11, 0, True, 0.5),
        (11, 1, True, -0.5),
    ]


def test_opening_cuts_back_what_was_written_after_the_checkpoint(config: ConfigDict, tmp_path: Path) -> None:
    with recorder(config, tmp_path) as log:
        log.step(0, {"reward.mean": 0.25})
        log.event(0, "swap", policy_version=1)
        log.rollout(0, batch(), np.zeros((1, 2)), FakeTokenizer())  # type: ignore[arg-type]
        offsets = log.offsets()
        for step in (1, 2):
            log.step(step, {"reward.mean": 0.5})
            log.event(step, "swap", policy_version=step + 1)
            log.rollout(step, batch(), np.zeros((1, 2)), FakeTokenizer())  # type: ignore[arg-type]
    kept = {name: (tmp_path / f"{name}.jsonl").read_bytes()[: offsets[name]] for name in ("metrics", "events")}
    with recorder(config, tmp_path, step=1, offsets=offsets) as log:
        assert {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in kept} == kept
        assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_000000.parquet"]
        log.step(1, {"reward.mean": 0.75})
    assert [(row["step"], row["reward.mean"]) for row in metrics.read(tmp_path / "metrics.jsonl")] == [(0, 0.25), (1, 0.75)]


def test_a_start_from_nothing_forgets_a_run_that_had_no_checkpoint(config: ConfigDict, tmp_path: Path) -> None:
    with recorder(config, tmp_path) as log:
        log.step(0, {"reward.mean": 0.25})
        log.rollout(0, batch(), np.zeros((1, 2)), FakeTokenizer())  # type: ignore[arg-type]
    with recorder(config, tmp_path):
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "events.jsonl").read_bytes() == b""
    assert list((tmp_path / "samples").iterdir()) == []


def test_offsets_of_another_run_are_refused(config: ConfigDict, tmp_path: Path) -> None:
    with recorder(config, tmp_path) as log:
        log.step(0, {"reward.mean": 0.25})
    with pytest.raises(CheckpointError, match="not of the same run"):
        recorder(config, tmp_path, step=5, offsets={"metrics": 9999, "events": 0})


def test_a_metric_of_an_unknown_task_is_refused(config: ConfigDict, tmp_path: Path) -> None:
    with recorder(config, tmp_path) as log, pytest.raises(ValueError, match=r"reward\.other"):
        log.step(0, {"reward.other": 1.0})


@pytest.mark.parametrize("wanted", [True, False])
def test_tensorboard_is_written_when_wanted(config: ConfigDict, tmp_path: Path, wanted: bool) -> None:
    config.monitoring.tensorboard = wanted
    with recorder(config, tmp_path) as log:
        log.step(0, {"reward.mean": 0.25})
        log.event(0, "reset", reference=True, optimizer="all", reason="test")
    assert (tmp_path / "tensorboard").exists() is wanted


def test_files_are_closed_when_an_error_passes(config: ConfigDict, tmp_path: Path) -> None:
    with pytest.raises(KeyError), recorder(config, tmp_path) as log:
        raise KeyError("x")
    with pytest.raises(ValueError, match="closed"):
        log.event(0, "swap", policy_version=1)


# Records steps with files that may not grow over 3000 bytes; tells how far it came.
FILES_OVER_THE_LIMIT = """
import resource, sys
from pathlib import Path
from test_recorder import get_config, recorder
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
with recorder(get_config(), Path(sys.argv[1])) as log:
    for step in range(20):
        log.step(step, {"reward.mean": 0.25, "reward.solve_rate": 0.5, "entropy": 1.0, "kl.k1": 0.0, "kl.k2": 0.0, "kl.k3": 0.0})
print("all steps are recorded")
"""


def test_a_tensorboard_file_that_cannot_grow_holds_nothing_up_and_hides_nothing(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root}/tests:{root}/tests/monitoring"}
    done = subprocess.run(
        [sys.executable, "-c", FILES_OVER_THE_LIMIT, tmp_path], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("all steps are recorded\n")
    assert done.stdout.count("WARNING: TensorBoard failed and is left out from here on: OSError: [Errno 27] File too large\n") == 1
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 20
    (event,) = events.read(tmp_path / "events.jsonl")
    assert (event["kind"], event["view"]) == ("view_failed", "TensorBoard")


def test_a_tensorboard_folder_that_cannot_be_made_is_an_event_and_all_else_is_recorded(config: ConfigDict, tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file in the folder's place")
    with recorder(config, tmp_path) as log:
        log.step(0, {"reward.mean": 0.25})
        log.event(0, "swap", policy_version=1)
    assert [(event["kind"], event.get("view")) for event in events.read(tmp_path / "events.jsonl")] == [
        ("view_failed", "TensorBoard"),
        ("swap", None),
    ]
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 1


def test_a_report_that_cannot_be_made_is_an_event(config: ConfigDict, tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with recorder(config, tmp_path) as log:
        assert log.view(3, "report", (tmp_path / "report.html").write_text, "report") is None
    (event,) = events.read(tmp_path / "events.jsonl")
    assert (event["step"], event["view"]) == (3, "report")
    assert event["error"].startswith("IsADirectoryError: ")


def test_a_stream_that_was_lost_is_an_event_and_a_line_on_standard_error(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streams, "lost", {"standard output": "Broken pipe"})
    with recorder(config, tmp_path) as log:
        log.step(0, {"reward.mean": 0.25})
        log.step(1, {"reward.mean": 0.25})
    (event,) = events.read(tmp_path / "events.jsonl")
    assert event == {"step": 0, "kind": "view_failed", "error": "Broken pipe", "view": "standard output"}
    assert capsys.readouterr().err == "WARNING: standard output failed and is left out from here on: Broken pipe\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "samples"])
def test_what_a_run_is_known_by_stops_it_when_it_cannot_be_written(config: ConfigDict, tmp_path: Path, name: str) -> None:
    def record() -> None:
        with recorder(config, tmp_path) as log:
            log.rollout(0, batch(), np.zeros((1, 2)), FakeTokenizer())  # type: ignore[arg-type]

    (tmp_path / name).write_text("") if name == "samples" else (tmp_path / name).mkdir()
    with pytest.raises(StorageError, match=rf"{name}.* cannot be written \(.*\): .* needed, .* free there; .*, then give the same command"):
        record()
