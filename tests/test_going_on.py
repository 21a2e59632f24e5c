"""What a run does about damaged, foreign, missing and unwritable checkpoints; through launch/train.py, as a user meets it."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_run
from saved_states import flip_a_bit, largest_file

from jaxprorl import commit
from jaxprorl.checkpoint import read_host

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4  # of the run that is made; going on means to 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run of four steps, checkpoints at 2 and 4. Tests change copies only."""
    folder = tiny_run.new_home(tmp_path_factory)
    tiny_run.train(folder, f"steps={STEPS}")
    return folder


@pytest.fixture
def place(home: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the run, which shares `home`'s cache."""
    (tmp_path / ".cache").symlink_to((home / ".cache").resolve())
    shutil.copytree(home / "runs/tiny", tmp_path / "runs/tiny")
    return tmp_path


def refused(folder: Path, *overrides: str) -> str:
    """The one line with which the command refuses; the run must be as it was."""
    before = snapshot(folder)
    command = tiny_run.Command(folder, *overrides)
    ended = command.wait()
    assert ended.status == 2, f"{ended.stdout}\n{ended.stderr}"
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert snapshot(folder) == before
    assert not command.left_behind()
    return ended.stderr


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file() and path.name != "config.json"}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip_a_bit, "has changed since it was written"),
    "truncated": (truncate, "were written"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_stops_the_run(place: Path, kind: str) -> None:
    make, words = DAMAGES[kind]
    make(largest_file(place / "runs/tiny/checkpoints", 4))
    message = refused(place)
    assert message.startswith("error: checkpoint step 4 is damaged: ")
    assert words in message
    assert "--config.checkpoint.on_damage=previous" in message


def test_with_previous_it_goes_on_from_the_one_before_says_so_and_equals_the_undamaged_run(home: Path, place: Path) -> None:
    run = place / "runs/tiny"
    flip_a_bit(largest_file(run / "checkpoints", 4))
    shutil.rmtree(run / "model")
    ended = tiny_run.train(place, f"steps={STEPS + 1}", "checkpoint.on_damage=previous", "checkpoint.keep=1", "checkpoint.keep_best=0")
    assert "WARNING: checkpoint step 4 is damaged: " in ended.stdout
    assert "going on from the checkpoint of step 2" in ended.stdout
    reference = tiny_run.timeless_metrics(home / "runs/tiny")
    assert tiny_run.timeless_metrics(run)[:STEPS] == reference
    samples = tiny_run.files(run / "samples")
    assert {name: samples[name] for name in tiny_run.files(home / "runs/tiny/samples")} == tiny_run.files(home / "runs/tiny/samples")
    (resume,) = [event for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == "resume"]
    assert resume["checkpoint_step"] == 2
    assert [commit.damage(run / "checkpoints", step) for step in commit.committed_steps(run / "checkpoints")] == [None] * 3


def test_nothing_sound_is_never_a_restart_from_zero(place: Path) -> None:
    """All damaged; all deleted; only their commit records deleted."""
    folder = place / "runs/tiny/checkpoints"
    for step in (2, 4):
        truncate(largest_file(folder, step))
    assert "error: no undamaged checkpoint in " in refused(place, "checkpoint.on_damage=previous")
    # A log that tells of three checkpoints (the last may have been cut short; the first one cannot have been).
    events = place / "runs/tiny/events.jsonl"
    (line,) = [line for line in events.read_text().splitlines(True) if '"checkpoint_step": 4' in line and '"checkpoint"' in line]
    events.write_text(events.read_text() + line)
    for step in (2, 4):
        commit.record_path(folder, step).unlink()
    message = refused(place)
    assert "holds no committed checkpoint, yet events.jsonl tells of 3" in message
    assert "--config.on_existing=replace" in message
    shutil.rmtree(folder)
    assert "holds no committed checkpoint" in refused(place)


def test_a_log_that_lost_lines_is_refused(place: Path) -> None:
    truncate(place / "runs/tiny/metrics.jsonl")
    assert "metrics.jsonl: offset" in refused(place)
    (place / "runs/tiny/metrics.jsonl").unlink()
    assert "metrics.jsonl: offset" in refused(place)


def edit_tokenizer(run: Path) -> None:
    path = run / "base_model/tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


def test_another_tokenizer_is_refused_and_can_be_accepted(place: Path) -> None:
    edit_tokenizer(place / "runs/tiny")
    message = refused(place)
    assert "the checkpoint was made with other tokenizer (tokenizer was " in message
    assert "--config.checkpoint.accept=tokenizer to go on all the same" in message
    ended = tiny_run.train(place, f"steps={STEPS + 1}", "checkpoint.accept=tokenizer")
    assert "going on from the checkpoint of step 4" in ended.stdout


def test_another_strategy_is_refused_and_can_be_accepted(place: Path) -> None:
    assert "--config.checkpoint.accept=mesh.strategy" in refused(place, "mesh.strategy=zero1")
    named = "profile_steps=(1,4)"  # one of them is done already
    ended = tiny_run.train(place, f"steps={STEPS + 1}", "mesh.strategy=zero1", "checkpoint.accept=mesh.strategy", named)
    assert "going on from the checkpoint of step 4" in ended.stdout
    assert "sums are in another order" not in ended.stdout
    assert "WARNING: profile_steps: step 1 is done already and leaves no trace; the next one is 4" in ended.stdout
    assert "step 4 is done already" not in ended.stdout
    assert [path.name for path in (place / "runs/tiny/profiles").iterdir()] == ["step_000004"]
    assert [line["step"] for line in tiny_run.lines(place / "runs/tiny/metrics.jsonl")] == list(range(STEPS + 1))


def test_other_sizes_are_told_by_a_warning_and_the_event(place: Path) -> None:
    accept = "checkpoint.accept=batch.micro_batch_rows,mesh.cpu_devices"
    ended = tiny_run.train(place, f"steps={STEPS + 1}", "batch.micro_batch_rows=0", "mesh.cpu_devices=1", accept)
    (told,) = [line for line in ended.stdout.splitlines() if "WARNING" in line]
    assert told.endswith("goes on with devices 1, micro_batch_rows 16; it had devices 2, micro_batch_rows 8, so sums are in another order")
    events = tiny_run.lines(place / "runs/tiny/events.jsonl")
    sizes = [(event["devices"], event["micro_batch_rows"]) for event in events if event["kind"] in ("run_start", "resume")]
    assert sizes == [(2, 8), (1, 16)]


def test_groups_that_wait_are_dropped_with_a_warning_when_another_temperature_is_accepted(home: Path, tmp_path: Path) -> None:
    (tmp_path / ".cache").symlink_to((home / ".cache").resolve())
    tiny_run.train(tmp_path, "rollout.max_staleness=1", "steps=1")
    host = read_host(tmp_path / "runs/tiny/checkpoints", 1)
    assert host.surplus and host.surplus_temperature == 1.2
    other = ("rollout.temperature=0.6", "checkpoint.accept=rollout.temperature")
    ended = tiny_run.train(tmp_path, "rollout.max_staleness=1", "steps=2", *other)
    assert (
        f"WARNING: {len(host.surplus)} surplus groups do not fit the changed config, data, tokenizer or reward; discarded" in ended.stdout
    )
    assert tiny_run.timeless_metrics(tmp_path / "runs/tiny")[1]["groups.carried"] == 0


def test_other_data_under_the_same_name_and_another_reward_are_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / ".cache").symlink_to((home / ".cache").resolve())
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b), "task": "sums"} for a in range(10) for b in range(10)]
    questions, reward = tmp_path / "mine.jsonl", tmp_path / "my_reward.py"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text("def score(text, prompt):\n    return 1.0 - min(1.0, len(text) / 100)\n")
    overrides = ["data.source=jsonl:mine.jsonl", "reward=my_reward:score", "evaluation.reward=my_reward:score"]
    tiny_run.train(tmp_path, *overrides, "steps=2")

    questions.write_text(questions.read_text().replace('"18"', '"19"'))
    reward.write_text(reward.read_text() + "# a different source\n")
    message = refused(tmp_path, *overrides)
    assert "the checkpoint was made with other data and reward (data was " in message
    assert "; reward was my_reward:score@" in message
    assert "--config.checkpoint.accept=data,reward to go on all the same" in message
    assert "other reward (" in refused(tmp_path, *overrides, "checkpoint.accept=data")


def test_another_model_is_refused_by_field_and_by_shape(place: Path) -> None:
    message = refused(place, "model.hidden_size=64")
    assert "model.hidden_size was 32, now 64" in message
    assert "--config.checkpoint.accept=model.hidden_size" in message
    path = place / "runs/tiny/base_model/config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 64', '"intermediate_size": 96'))
    assert "does not fit this model and optimizer" in refused(place)


def test_another_schema_is_refused(place: Path) -> None:
    folder = place / "runs/tiny/checkpoints"
    commit.write_record(folder, 4, 99, None, False)
    assert "checkpoint step 4 in runs/tiny/checkpoints has schema 99, this version of jaxprorl reads " in refused(place)


def test_two_runs_in_one_folder_the_second_is_refused_and_a_stale_lock_taken_over(place: Path) -> None:
    first = tiny_run.Command(place)
    try:
        first.until(lambda: (place / "runs/tiny/.lock").read_text() != "")
        second = tiny_run.Command(place).wait()
    finally:
        first.process.kill()
        first.wait()
    assert second.status == 2
    assert second.stderr.startswith(f"error: runs/tiny is in use by process {first.process.pid} on ")
    ended = tiny_run.train(place, f"steps={STEPS + 1}")
    assert f"process {first.process.pid} on " in ended.stdout
    assert "was killed or interrupted here; its lock is taken over" in ended.stdout


def test_a_run_starts_from_the_policy_of_another_with_a_fresh_optimizer_and_a_reference_in_bfloat16(place: Path) -> None:
    overrides = ["model.path=runs/tiny", "run_name=next", "steps=2", "model.reference_dtype=bfloat16", "data.train_seed=2000000"]
    tiny_run.train(place, *overrides, "optimizer.learning_rate=1e-30")  # so that the policy stays what it was
    first, other = place / "runs/tiny", place / "runs/next"
    weights = "model.safetensors"
    from safetensors.numpy import load_file

    old, new = load_file(first / "model" / weights), load_file(other / "model" / weights)
    assert old.keys() == new.keys() and all((old[name] == new[name]).all() for name in old)
    host = read_host(other / "checkpoints", 2)
    assert (host.run.step, host.run.policy_version) == (2, 2)
    assert host.identity["data"] != read_host(first / "checkpoints", 4).identity["data"]
    assert "warm_start" not in {event["kind"] for event in tiny_run.lines(other / "events.jsonl")}
    from jaxprorl.checkpoint import restore_arrays

    arrays = restore_arrays(other / "checkpoints", 2)
    assert {array.dtype.name for array in arrays["reference"].values()} == {"bfloat16"}
    assert {array.dtype.name for array in arrays["params"].values()} == {"float32"}

    shutil.rmtree(first / "checkpoints")
    (first / "checkpoints").mkdir()
    ended = tiny_run.Command(place, "model.path=runs/tiny", "run_name=third").wait()
    assert (ended.status, ended.stderr) == (2, "error: model.path = 'runs/tiny': this run has no checkpoint yet\n")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which can be filled and made read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("mounting needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_or_read_only_disk_is_told_and_earlier_checkpoints_are_untouched(place: Path, small_disk: Path) -> None:
    shutil.copytree(place / "runs", small_disk / "runs")
    runs = f"runs_dir={small_disk / 'runs'}"
    (small_disk / "filler").write_bytes(bytes(100 << 20))
    before = {path: path.read_bytes() for path in (small_disk / "runs/tiny/checkpoints").rglob("*") if path.is_file()}
    ended = tiny_run.Command(place, runs).wait()
    assert ended.status == 2, ended.stderr
    assert "a checkpoint needs" in ended.stderr and "make room" in ended.stderr
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = tiny_run.Command(place, runs).wait()
    assert ended.status == 2, ended.stderr
    assert f"error: runs_dir = '{small_disk / 'runs'}': " in ended.stderr and "is on a read-only file system; allow writing" in ended.stderr
    assert {path: path.read_bytes() for path in (small_disk / "runs/tiny/checkpoints").rglob("*") if path.is_file()} == before
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    (small_disk / "filler").unlink()
    ended = tiny_run.train(place, runs, f"steps={STEPS + 1}")
    assert "going on from the checkpoint of step 4" in ended.stdout
