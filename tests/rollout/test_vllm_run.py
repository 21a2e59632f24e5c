"""A run that samples with real vLLM workers, through launch/train.py, as a user starts it."""

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import tiny_run

from jaxprorl.rollout import segments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4  # with a reset before step 2, a validation after it, checkpoints of 2 and 4


@pytest.fixture(scope="module")
def vllm(reference_python: Path) -> tuple[str, ...]:
    """Overrides that choose the engine."""
    return "rollout.engine=vllm", f"rollout.vllm.python={reference_python}", "rollout.vllm.workers=2"


@pytest.fixture(scope="module")
def home(vllm: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with two finished runs, of workers and of the embedded engine."""
    folder = tiny_run.new_home(tmp_path_factory)
    command = tiny_run.Command(folder, *vllm, f"steps={STEPS}", "run_name=workers")
    ended = command.wait()
    assert ended.status == 0, ended.stderr
    assert command.left_behind() == []
    tiny_run.train(folder, f"steps={STEPS}", "run_name=embedded")
    return folder


def swaps(run: Path) -> list[dict[str, object]]:
    return [event for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == "swap"]


def test_the_engine_is_the_only_difference(home: Path) -> None:
    """The same steps, names of metrics (but for the engine's own), kinds of events and files of samples."""
    workers, embedded = home / "runs/workers", home / "runs/embedded"
    rows, others = tiny_run.lines(workers / "metrics.jsonl"), tiny_run.lines(embedded / "metrics.jsonl")
    assert [set(row) for row in rows] == [{name for name in row if not name.startswith("rollout.")} for row in others]
    assert [row["policy.version"] for row in rows] == list(range(STEPS))
    assert {event["kind"] for event in tiny_run.lines(workers / "events.jsonl")} == {
        event["kind"] for event in tiny_run.lines(embedded / "events.jsonl")
    }
    assert tiny_run.files(workers / "samples").keys() == tiny_run.files(embedded / "samples").keys()


def test_engine_and_trainer_agree_in_every_step(home: Path) -> None:
    rows = tiny_run.lines(home / "runs/workers/metrics.jsonl")
    assert max(row["mismatch.max"] for row in rows) < 1e-4
    assert all(row["samples.dropped_share"] == 0 for row in rows)
    for row in rows:
        table = pq.read_table(home / f"runs/workers/samples/step_{row['step']:06d}.parquet").to_pylist()
        assert {sample["policy_version_first"] for sample in table} == {row["step"]}


def test_the_first_batch_is_of_the_same_questions_and_about_as_good(home: Path) -> None:
    """Other random numbers, the same distribution: a share of 32 to 64 samples differs by less than four of its deviations."""
    for name in ("response.stop_share", "reward.mean"):
        first, second = (tiny_run.lines(home / f"runs/{run}/metrics.jsonl")[0][name] for run in ("workers", "embedded"))
        assert abs(first - second) < 4 * (0.25 * (1 / 32 + 1 / 32)) ** 0.5
    asked = [set(pq.read_table(home / f"runs/{run}/samples/step_000000.parquet")["prompt"].to_pylist()) for run in ("workers", "embedded")]
    assert asked[0] & asked[1]


def test_every_swap_is_logged_with_its_proof(home: Path) -> None:
    events = swaps(home / "runs/workers")
    assert [event["policy_version"] for event in events] == list(range(1, STEPS + 1))
    assert all(
        set(event)
        == {
            "kind",
            "step",
            "policy_version",
            "bytes",
            "probe_nats",
            "probe_mean_nats",
            "lost_workers",
            "time_load_s",
            "time_swap_s",
        }
        for event in events
    )
    assert all(0 <= event["probe_mean_nats"] <= event["probe_nats"] < 1e-4 for event in events)
    assert all(set(event) == {"kind", "step", "policy_version"} for event in swaps(home / "runs/embedded"))


def test_nothing_is_left_in_shared_memory(home: Path) -> None:
    assert list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(home / 'runs/workers')}-*")) == []


def test_a_killed_run_takes_its_workers_along_and_goes_on_as_if_nothing_had_happened(
    home: Path, vllm: tuple[str, ...], tmp_path: Path
) -> None:
    """Kill -9 of the trainer alone: the kernel ends the workers, the next start removes the segments, and no number differs."""
    (tmp_path / ".cache").symlink_to(home / ".cache")
    run, overrides = tmp_path / "runs/workers", (*vllm, f"steps={STEPS}", "run_name=workers")
    command = tiny_run.Command(tmp_path, *overrides)
    command.until(lambda: len(tiny_run.lines(run / "metrics.jsonl")) >= 3)
    workers = [
        process for process in psutil.Process(command.process.pid).children() if "jaxprorl.rollout.worker" in " ".join(process.cmdline())
    ]
    assert len(workers) == 2
    os.kill(command.process.pid, signal.SIGKILL)
    gone, _ = psutil.wait_procs(workers, timeout=10)
    assert len(gone) == 2
    command.wait()
    left = list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(run)}-*"))
    assert [path.name.split("-")[2] for path in left] == ["weights"], "the rings had lost their names already"

    ended = tiny_run.train(tmp_path, *overrides)
    assert f"removed {left[0]}" in ended.stdout + ended.stderr
    assert list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(run)}-*")) == []
    reference = home / "runs/workers"
    assert tiny_run.timeless_metrics(run) == tiny_run.timeless_metrics(reference)
    assert tiny_run.timeless_events(run, "resume", "compile") == tiny_run.timeless_events(reference, "resume", "compile")
    assert tiny_run.files(run / "samples") == tiny_run.files(reference / "samples")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_end_leaves_nothing(home: Path, vllm: tuple[str, ...], tmp_path: Path, number: signal.Signals) -> None:
    """To the whole group, as a terminal does: no worker, and no name in shared memory."""
    (tmp_path / ".cache").symlink_to(home / ".cache")
    run = tmp_path / "runs/workers"
    command = tiny_run.Command(tmp_path, *vllm, "steps=100", "run_name=workers")
    command.until(lambda: len(tiny_run.lines(run / "metrics.jsonl")) >= 1)
    os.killpg(command.process.pid, number)
    assert command.wait().status != 0
    assert command.left_behind() == []
    assert list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(run)}-*")) == []


def test_another_engine_is_another_run(home: Path, tmp_path: Path) -> None:
    (tmp_path / ".cache").symlink_to(home / ".cache")
    shutil.copytree(home / "runs/workers", tmp_path / "runs/workers")
    ended = tiny_run.Command(tmp_path, "steps=5", "run_name=workers").wait()
    assert ended.status == 2
    assert "rollout.engine was 'vllm', now 'jax'" in ended.stderr
    assert json.loads((tmp_path / "runs/workers/config.json").read_text())["rollout"]["engine"] == "vllm"


def test_a_missing_environment_is_said_before_anything_long(tmp_path: Path) -> None:
    ended = tiny_run.Command(tmp_path, "rollout.engine=vllm").wait()
    assert ended.status == 2
    assert "rollout.vllm.python = '.venv-vllm/bin/python': no such program (the path starts at the current folder, " in ended.stderr
    assert ended.seconds < 30
    assert not (tmp_path / "runs").exists()
