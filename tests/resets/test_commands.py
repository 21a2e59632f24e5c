import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxprorl.errors import ConfigError, DataError
from jaxprorl.monitoring import jsonl
from jaxprorl.resets.commands import TAKEN, WAITING, Command, request, take_command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"resets": {"manual": True}, "stages": []}))
    return tmp_path


def request_reset(run: Path, reason: str) -> Path:
    return request(run, Command("reset", reason))


def take(run: Path, step: int) -> str | None:
    command = take_command(run, step, pytest.fail)
    assert command is None or command.kind == "reset"
    return command and command.reason


def taken(run: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["reason"]) for row in jsonl.read(run / TAKEN)]


def test_a_command_is_taken_once_and_written_down(run: Path) -> None:
    assert take(run, 3) is None
    path = request_reset(run, "stalled")
    assert path == run / WAITING and path.is_file()
    assert take(run, 4) == "stalled"
    assert not path.exists()
    assert taken(run) == [(4, "stalled")]
    assert take(run, 5) is None
    assert sorted(file.name for file in run.iterdir()) == [TAKEN, "config.json"]


def test_what_was_taken_is_repeated_at_its_step_and_nowhere_else(run: Path) -> None:
    request_reset(run, "first")
    take(run, 4)
    request_reset(run, "second")
    take(run, 7)
    assert [take(run, step) for step in range(2, 9)] == [None, None, "first", None, None, "second", None]
    assert taken(run) == [(4, "first"), (7, "second")]


def test_a_command_that_was_written_down_but_not_removed_is_not_taken_twice(run: Path) -> None:
    path = request_reset(run, "stalled")
    content = path.read_text()
    take(run, 4)
    path.write_text(content)  # killed between the two
    assert [take(run, step) for step in (2, 3)] == [None, None]
    assert not path.exists()
    path.write_text(content)
    assert [take(run, step) for step in (4, 5, 6)] == ["stalled", None, None]
    assert not path.exists() and taken(run) == [(4, "stalled")]


def test_a_command_that_comes_while_another_is_repeated_waits(run: Path) -> None:
    request_reset(run, "first")
    take(run, 4)
    request_reset(run, "second")
    assert [take(run, step) for step in (4, 5)] == ["first", "second"]


def test_a_torn_line_is_no_command(run: Path) -> None:
    (run / TAKEN).write_text('{"step": 4, "id": "a", "rea')
    assert take(run, 4) is None
    request_reset(run, "stalled")
    assert take(run, 5) == "stalled"
    assert taken(run) == [(5, "stalled")]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"id": "a"}', '"reset"', "\x00", '{"id": "a", "kind": "stop", "reason": "x"}'])
def test_a_file_that_is_no_command_is_said_and_removed(run: Path, text: str) -> None:
    (run / WAITING).write_text(text)
    said: list[str] = []
    assert take_command(run, 3, said.append) is None
    assert len(said) == 1 and WAITING in said[0]
    assert not (run / WAITING).exists() and not (run / TAKEN).exists()


def test_a_second_command_does_not_replace_one_that_waits(run: Path) -> None:
    request_reset(run, "first")
    with pytest.raises(ConfigError, match="waiting already"):
        request_reset(run, "second")
    assert json.loads((run / WAITING).read_text())["reason"] == "first"
    assert len(list(run.iterdir())) == 2


def test_commands_go_only_to_runs_that_take_them(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run there"):
        request_reset(tmp_path / "nowhere", "x")
    (run / "config.json").write_text(json.dumps({"resets": {"manual": False}, "stages": []}))
    with pytest.raises(ConfigError, match=r"resets\.manual = False"):
        request_reset(run, "x")


@pytest.mark.parametrize(
    "text", ["", '{"resets": {"manu', "[]", '{"resets": {"manual": true}}', '{"stages": []}', '{"resets": true, "stages": []}']
)
def test_a_config_that_is_torn_or_no_runs_is_refused(run: Path, text: str) -> None:
    (run / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json: "):
        request_reset(run, "x")
    assert [file.name for file in run.iterdir()] == ["config.json"]


def test_a_run_that_is_over_takes_no_command_until_it_goes_on(run: Path) -> None:
    (run / "summary.json").write_text('{"steps": 2}')
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"the run is over \(summary\.json\).*start it with more steps first"):
        request_reset(run, "x")
    assert not (run / WAITING).exists()
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2}\n')
    assert request_reset(run, "x").is_file(), "it was given more steps, its old summary is still there"
    (run / WAITING).unlink()
    (run / "summary.json").write_text('{"ste')
    with pytest.raises(DataError, match=r"summary\.json: "):
        request_reset(run, "x")


def test_a_command_for_the_next_stage_is_told_from_a_reset_also_when_it_is_repeated(run: Path) -> None:
    command = Command("next_stage", "flat")
    with pytest.raises(ConfigError, match=r"--run .*: it has no stages \(stages is empty\)"):
        request(run, command)
    (run / "config.json").write_text(json.dumps({"resets": {"manual": True}, "stages": [{"name": "a"}]}))
    request(run, command)
    assert [take_command(run, step, pytest.fail) for step in (4, 5, 4)] == [command, None, command]
    request_reset(run, "then")
    assert take_command(run, 6, pytest.fail) == Command("reset", "then")


def test_the_script(run: Path) -> None:
    script = [sys.executable, str(Path(__file__).resolve().parents[2] / "launch/reset.py"), "--run", str(run), "--reason", "odd"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{run / WAITING}: the run resets at its next step boundary\n")
    assert take(run, 1) == "odd"
    (run / "config.json").write_text(json.dumps({"resets": {"manual": True}, "stages": [{"name": "a"}]}))
    done = subprocess.run([*script, "--next-stage"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{run / WAITING}: the run ends its stage at its next step boundary\n")
    assert take_command(run, 2, pytest.fail) == Command("next_stage", "odd")
    (run / WAITING).write_text("{}")
    refused = subprocess.run(script, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("error: --run") and refused.stderr.count("\n") == 1
