"""A real run of three stages: a change of mix, of samples, of the response limit; ends by steps, by a plateau and by a person."""

import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tiny_run

from jaxprorl import commit
from jaxprorl.checkpoint_diff import compare
from jaxprorl.resets.commands import TAKEN
from jaxprorl.resets.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMITS = {1: 48, 2: 48, 3: 60}
SAMPLES = {1: 4, 2: 8, 3: 4}
# The stages begin before steps 0, 1 (the first has one step), and 3 (after two validations), and the run ends before step 5, as told:
COMMAND = '{"step": 5, "id": "a", "kind": "next_stage", "reason": "enough"}\n'


def place_in(folder: Path, home: Path) -> Path:
    """A user's folder with the command in the list of a run that is yet to start, and the cache of `home`."""
    if folder != home:
        (folder / ".cache").symlink_to(home / ".cache")
    run = folder / "runs/staged"
    run.mkdir(parents=True)
    (run / TAKEN).write_text(COMMAND)
    return folder


def train(place: Path, *overrides: str) -> tiny_run.Ended:
    return tiny_run.train(place, *overrides, recipe="stages")


def kill(place: Path, point: str) -> None:
    program = [str(tiny_run.ROOT / "tests/kill_at.py"), point, "--"]
    ended = tiny_run.Command(place, program=program, recipe="stages").wait()
    assert ended.status == -signal.SIGKILL, f"{point} was not reached: {ended.status}\n{ended.stdout}\n{ended.stderr}"


def assert_same_numbers(run: Path, reference: Path) -> None:
    assert tiny_run.timeless_metrics(run) == tiny_run.timeless_metrics(reference)
    assert tiny_run.files(run / "samples") == tiny_run.files(reference / "samples")
    assert tiny_run.files(run / "model") == tiny_run.files(reference / "model")
    assert compare(run / "checkpoints", 5, reference / "checkpoints", 5) == []


def assert_same_run(run: Path, reference: Path) -> None:
    assert_same_numbers(run, reference)
    assert tiny_run.timeless_events(run, "resume", "compile") == tiny_run.timeless_events(reference, "resume", "compile")
    assert commit.committed_steps(run / "checkpoints") == commit.committed_steps(reference / "checkpoints")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.new_home(tmp_path_factory)
    train(place_in(folder, folder))
    return folder


@pytest.fixture(scope="module")
def staged(home: Path) -> Path:
    """The uninterrupted run."""
    return home / "runs/staged"


def events_of(run: Path, kind: str) -> list[dict]:
    return [event for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == kind]


def test_stages_follow_one_another_and_the_last_ends_the_run(staged: Path) -> None:
    assert [row["stage"] for row in tiny_run.lines(staged / "metrics.jsonl")] == [1, 2, 2, 3, 3]
    begun = [(event["step"], event["number"], event["name"]) for event in events_of(staged, "stage")]
    assert begun == [(0, 1, "one task"), (1, 2, "both"), (3, 3, "longer")]
    assert [(e["step"], e["steps"], e["trigger"], e["signals"]) for e in events_of(staged, "stage_end")] == [
        (0, 1, "steps", "step"), (2, 2, "plateau", "validation"), (4, 2, "manual", "person"),
    ]  # fmt: skip
    assert events_of(staged, "stage")[1]["changes"] == {"data.mix": [], "rollout.samples_per_prompt": 8}
    assert [event["steps"] for event in events_of(staged, "run_end")] == [5]
    assert commit.committed_steps(staged / "checkpoints") == [1, 3, 5], "every boundary, and nothing else"


def test_what_a_stage_changes_holds_in_its_steps(staged: Path) -> None:
    rows = tiny_run.lines(staged / "metrics.jsonl")
    assert all(("reward.number_filtering" in row) == (row["stage"] > 1) for row in rows), "the mix"
    assert [row["updates"] for row in rows] == [2, 2, 2, 1, 1]
    assert all(row["learning_rate"] == pytest.approx(2e-3) for row in rows), "a change stays"
    assert all(row["response_tokens.max"] <= LIMITS[row["stage"]] for row in rows)
    for row in rows:
        samples = pq.read_table(staged / f"samples/step_{row['step']:06d}.parquet").to_pylist()
        assert len({(sample["prompt_id"], sample["sample"]) for sample in samples}) == len(samples)
        assert {sample["sample"] for sample in samples} == set(range(SAMPLES[row["stage"]]))


def test_groups_that_do_not_fit_the_next_stage_are_dropped_and_counted(staged: Path) -> None:
    first, second = tiny_run.lines(staged / "metrics.jsonl")[:2]
    told = events_of(staged, "stage")[1]
    assert told["surplus_dropped"] == first["groups.surplus"] > 0 and second["groups.carried"] == 0
    samples = pq.read_table(staged / "samples/step_000000.parquet").to_pylist()
    without_signal = {number for event in events_of(staged, "drop") if event["step"] == 0 for number in event["prompt_ids"]}
    waiting = [sample for sample in samples if not sample["kept"] and sample["prompt_id"] not in without_signal]
    assert told["tokens_wasted"] == sum(sample["response_tokens"] for sample in waiting)


def test_a_stages_reset_is_one_of_what_it_says_and_kl_starts_at_zero(staged: Path) -> None:
    fields = ("step", "reference", "optimizer", "trigger", "reason", "signals", "blind")
    assert [tuple(event[field] for field in fields) for event in events_of(staged, "reset")] == [
        (1, True, "all", "stage", "stage both", "step", False),
        (3, True, "none", "stage", "stage longer", "validation", False),
    ]
    rows = tiny_run.lines(staged / "metrics.jsonl")
    assert [row["reference.age_steps"] for row in rows] == [0, 0, 1, 0, 1]
    # One update: the policy is still its reference. Two executables computed their log-probs, so sums are rounded differently.
    assert abs(rows[3]["kl.k1"]) < 1e-6 and rows[3]["kl.k2"] < 1e-9 < rows[4]["kl.k2"]
    assert [(e["step"], e["trigger"]) for e in events_of(staged, "reset_effect")] == [(1, "stage"), (3, "stage")]


def test_programs_are_compiled_once_and_before_the_loop(staged: Path) -> None:
    names = [event["name"] for event in events_of(staged, "compile")]
    assert names == [
        "engine 1", "engine 2", "log_probs of stage one task", "train_step of stage one task", "reset of reference and optimizer",
        "log_probs of stage both", "train_step of stage both", "log_probs of stage longer", "train_step of stage longer",
        "reset of reference",
    ]  # fmt: skip


def test_a_replay_follows_the_stages(staged: Path) -> None:
    result = replay(staged)
    assert (result.last, result.differs_at) == (5, None)
    assert [(f.firing.step, f.firing.trigger, f.outcome) for f in result.fired] == [(1, "stage", "reset"), (3, "stage", "reset")]
    assert replay(staged, {"at_steps": [2]}).differs_at == 2


def test_the_report_parts_the_stages(staged: Path) -> None:
    report = (staged / "report.html").read_text()
    assert "<h2>Stages</h2>" in report and 'id="stage-2"' in report and "command: enough" in report


def test_a_run_whose_last_stage_has_ended_is_over(staged: Path, home: Path) -> None:
    before = (staged / "events.jsonl").read_bytes()
    assert "5 steps are done" in train(home).stdout
    assert (staged / "events.jsonl").read_bytes() == before


def test_a_run_that_stopped_at_a_boundary_goes_on_into_the_next_stage(staged: Path, home: Path, tmp_path: Path) -> None:
    place = place_in(tmp_path, home)
    train(place, "steps=1")
    assert [event["number"] for event in events_of(place / "runs/staged", "stage")] == [1]
    train(place)
    assert_same_numbers(place / "runs/staged", staged)


def test_killed_before_a_boundarys_checkpoint_and_right_after_the_next_boundary_it_equals_the_uninterrupted_run(
    staged: Path, home: Path, tmp_path: Path
) -> None:
    place = place_in(tmp_path, home)
    kill(place, "record")  # the stage has ended, and no checkpoint tells of it
    assert not commit.committed_steps(place / "runs/staged/checkpoints")
    kill(place, "stage:2")  # the third stage has begun
    train(place)
    assert_same_run(place / "runs/staged", staged)


@pytest.mark.long
def test_killed_all_around_the_boundaries_it_equals_the_uninterrupted_run(staged: Path, home: Path, tmp_path: Path) -> None:
    place = place_in(tmp_path, home)
    folder = place / "runs/staged/checkpoints"
    for point in ("just_after_saving", "stage", "reset", "update", "samples", "record"):  # from the first boundary to the second
        kill(place, point)
        assert commit.committed_steps(folder) == [1]
    for point in ("just_after_saving", "stage", "validation"):  # from there on
        kill(place, point)
        assert commit.committed_steps(folder) == [1, 3]
    train(place)
    assert_same_run(place / "runs/staged", staged)
