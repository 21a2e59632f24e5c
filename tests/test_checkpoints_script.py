import dataclasses
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import tiny_config, tiny_model
from saved_states import flip_a_bit, host_of, largest_file, new_state

from jaxprorl import commit
from jaxprorl.checkpoint import SCHEMA, Checkpoints
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.units import size_text

SCRIPT = str(Path(__file__).resolve().parent.parent / "launch/checkpoints.py")

Look = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Look:
    """The command in this process (starting JAX takes seconds each time), started in `folder`."""

    def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(SCRIPT, run_name="__main__")
        return subprocess.CompletedProcess(arguments, int(end.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a and b, equal at step 2 and not at step 4. Tests change copies only."""
    folder = tmp_path_factory.mktemp("home")
    state = new_state(tiny_model(), make_mesh("dp"))
    norm = "final_norm" if "final_norm" in state.params else sorted(state.params)[0]
    for run, step_4 in (("a", state), ("b", dataclasses.replace(state, params=state.params | {norm: state.params[norm] + 1.0}))):
        with Checkpoints(folder / run / "checkpoints", tiny_config(checkpoint__keep=3)) as checkpoints:
            checkpoints.save(state, host_of(2), 0.25, False, 3)
            checkpoints.save(step_4, host_of(4), None, True)
    return folder


@pytest.fixture
def damaged(home: Path, tmp_path: Path) -> Path:
    """A copy whose run a has a flipped bit in step 4."""
    shutil.copytree(home, tmp_path / "home")
    flip_a_bit(largest_file(tmp_path / "home/a/checkpoints", 4))
    return tmp_path / "home"


def test_list_shows_a_line_for_each(look: Look, home: Path) -> None:
    done = look(home, "list", "a")
    assert (done.returncode, done.stderr) == (0, "")
    sizes = [f"{size_text(commit.read_record(home / 'a/checkpoints', step).bytes):>10}" for step in (2, 4)]
    assert done.stdout.splitlines() == [
        f"step      2  {sizes[0]}  validation 0.250 (3 ungraded)",
        f"step      4  {sizes[1]}  before a reset",
    ]


def test_show_tells_everything_about_one_the_newest_by_default(look: Look, home: Path) -> None:
    for arguments, step in ((["show", "a"], 4), (["show", "a", "--step", "2"], 2)):
        done = look(home, *arguments)
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert (shown["step"], shown["schema"], shown["run"]["step"]) == (step, SCHEMA, step)
        assert set(shown["identity"]) == {"data", "tokenizer", "reward"}
        assert sum(shown["files"].values()) == shown["bytes"]


def test_verify_reads_every_byte(look: Look, home: Path, damaged: Path) -> None:
    done = look(home, "verify", "a")
    assert (done.returncode, done.stdout) == (0, "step      2  sound\nstep      4  sound\n")
    done = look(damaged, "verify", "a")
    assert done.returncode == 1
    assert done.stdout.startswith("step      2  sound\nstep      4  a/checkpoints/step_4/")
    assert done.stdout.endswith("has changed since it was written (sha256 differs)\n")


def test_a_damaged_record_is_listed_as_such_beside_the_others(look: Look, damaged: Path) -> None:
    commit.record_path(damaged / "a/checkpoints", 2).write_text("{")
    for command in ("list", "verify"):
        done = look(damaged, command, "a")
        assert done.returncode == 1
        assert "step      2  a/checkpoints/step_2.commit.json is damaged: " in done.stdout
        assert "step      4  " in done.stdout


def test_diff_of_equal_ones_ends_well(look: Look, home: Path) -> None:
    done = look(home, "diff", "b", "b")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "b/checkpoints step 4 against b/checkpoints step 4: equal, bit for bit\n"


def test_diff_prints_the_worst_leaf_last_and_exits_with_one(look: Look, home: Path) -> None:
    done = look(home, "diff", "a", "b")
    assert done.returncode == 1, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "a/checkpoints step 4 against b/checkpoints step 4: 1 differences, the worst one last"
    assert last.startswith("['params']['") and last.endswith("values differ, by 1 at most")

    done = look(home, "diff", "b", "2", "4")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "b/checkpoints step 2 against b/checkpoints step 4: 2 differences, the worst one last"
    assert "run.step: 2 against 4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "c"], "error: c: no run there, or no checkpoint committed yet"),
        (["show", "a", "--step", "3"], "error: a/checkpoints holds no committed checkpoint of step 3"),
        (["diff", "a"], "error: diff a: give RUN_A RUN_B, or RUN STEP_A STEP_B"),
        (["diff", "a", "2", "b"], "error: diff a 2 b: give RUN_A RUN_B, or RUN STEP_A STEP_B"),
        (["diff", "a", "2", "3"], "error: a/checkpoints holds no committed checkpoint of step 3"),
        (["erase", "a"], "invalid choice: 'erase'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_bad_input_is_told(look: Look, home: Path, arguments: list[str], words: str) -> None:
    done = look(home, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_diff_as_a_command_prints_nothing_else(home: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "diff", "a", "b"], cwd=home, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (1, "", 2)


def test_looking_needs_no_jax_but_for_diff_and_show(home: Path) -> None:
    program = f"import runpy, sys; sys.argv = ['x', 'list', 'a']\ntry: runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    program += "except SystemExit as end: print(end.code, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=home, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n0 False\n")
