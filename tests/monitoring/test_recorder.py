from pathlib import Path

import numpy as np
import pytest
from factories import make_group, make_prompt
from ml_collections import ConfigDict

from configs.base import get_config
from jaxprorl.errors import CheckpointError
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
