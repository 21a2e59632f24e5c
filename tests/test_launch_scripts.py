"""The scripts' own logic, in a copy of the checkout's scripts and with stand-ins for every Python: nothing is downloaded."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ["awk", "bash", "cat", "chmod", "cmp", "cp", "dirname", "env", "flock", "grep", "mkdir", "mv", "rm", "sed", "sleep"]

# Answers as an interpreter would to what the scripts ask of one; `-m venv` copies it into the environment. Its calls are logged.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "VERSION $*" >>"$FAKE_LOG"
case "$*" in
  *ensurepip*) echo "ok VERSION $0" ;;
  *Python.h*) echo "${FAKE_COMPILER-bash}" ;;
  *purelib*) echo "${0%/bin/python}" ;;
  *version_info*) [ -x "$0" ] && echo VERSION ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install"*) sleep "${FAKE_PIP_SECONDS:-0}"; exit "${FAKE_PIP_STATUS:-0}" ;;
  "-m ruff check"*) exit "${FAKE_RUFF_STATUS:-0}" ;;
  *launch/train.py*) echo "trains in $PWD: $*" ;;
esac
"""


class Machine:
    """A bare machine: a home, a PATH of the few tools that scripts may use, a checkout, and the Pythons that a test puts on it."""

    def __init__(self, folder: Path) -> None:
        self.home, self.path, self.checkout, self.log = folder / "home", folder / "bin", folder / "check out", folder / "log"
        for path in (self.home, self.path, self.checkout):
            path.mkdir()
        self.log.touch()
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.path / tool).symlink_to(found)
        shutil.copytree(ROOT / "launch", self.checkout / "launch", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for file in ROOT.glob("requirements*.txt"):
            shutil.copy(file, self.checkout)

    def python(self, version: str, path: Path | None = None) -> Path:
        return self.program(path or self.path / f"python{version}", FAKE_PYTHON.replace("VERSION", version))

    def program(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def environment(self, **variables: str) -> dict[str, str]:
        return {"PATH": str(self.path), "HOME": str(self.home), "FAKE_LOG": str(self.log), **variables}

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.home,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def call(self, function: str, **variables: str) -> subprocess.CompletedProcess[str]:
        script = f'set -euo pipefail; cd "{self.checkout}"; . launch/environment.sh; {function}'
        return self.run("bash", "-c", script, **variables)

    def quickstart(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", self.checkout / "launch/quickstart.sh", *arguments, **variables)

    def test(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", self.checkout / "launch/test.sh", *arguments, **variables)

    def calls(self, words: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if words in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_scripts_are_valid_bash() -> None:
    for script in [*(ROOT / "launch").glob("*.sh"), ROOT / ".ci/run"]:
        subprocess.run(["bash", "-n", script], check=True)


def test_a_real_interpreter_passes_the_probe(machine: Machine) -> None:
    answer = machine.call(f"probe_python '{sys.executable}'").stdout.split()
    assert answer[0] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert os.access(answer[1], os.X_OK)


def test_the_newest_working_python_is_found(machine: Machine) -> None:
    machine.python("3.11")
    newest = machine.python("3.12")
    machine.program(machine.path / "python3.13", "#!/usr/bin/env bash\nexit 127\n")  # a shim of a version that is not active
    assert machine.call("choose_python").stdout == f"3.12 {newest}\n"


def test_an_unversioned_name_is_judged_by_what_it_is(machine: Machine) -> None:
    machine.python("3.11")
    plain = machine.python("3.13", machine.path / "python3")
    assert machine.call("choose_python").stdout == f"3.13 {plain}\n"


@pytest.mark.parametrize(
    ("place", "variable"),
    [
        (".pyenv/versions/3.12.4/bin/python", None),
        ("elsewhere/versions/3.12.4/bin/python", "PYENV_ROOT"),
        (".local/share/uv/python/cpython-3.12.4-linux-x86_64-gnu/bin/python3", None),
        ("elsewhere/cpython-3.12.4-linux-x86_64-gnu/bin/python3", "UV_PYTHON_INSTALL_DIR"),
    ],
)
def test_folders_of_version_managers_are_searched(machine: Machine, place: str, variable: str | None) -> None:
    python = machine.python("3.12", machine.home / place)
    machine.python("3.11")
    variables = {variable: str(machine.home / "elsewhere")} if variable else {}
    assert machine.call("choose_python", **variables).stdout == f"3.12 {python}\n"


def test_uv_is_asked(machine: Machine) -> None:
    python = machine.python("3.13", machine.home / "anywhere/python")
    machine.program(machine.path / "uv", f'#!/usr/bin/env bash\n[ "$*" = "python find --system 3.13" ] && echo "{python}"\n')
    assert machine.call("choose_python").stdout == f"3.13 {python}\n"


def test_without_any_python_the_error_says_what_was_tried_and_what_to_do(machine: Machine) -> None:
    machine.python("3.9", machine.path / "python3")
    machine.program(machine.path / "python3.13", "#!/usr/bin/env bash\nexit 127\n")
    machine.program(machine.path / "python3.12", "#!/usr/bin/env bash\necho 'is Python 3.12 without its module ensurepip'\n")
    result = machine.quickstart()
    assert result.returncode == 1
    assert "no working Python 3.13 or 3.12 or 3.11" in result.stderr
    assert "python3.13 does not run" in result.stderr
    assert "python3.12 is Python 3.12 without its module ensurepip" in result.stderr
    assert "python3 is Python 3.9" in result.stderr
    for remedy in ("apt install python3 python3-venv", "uv python install 3.13", "pyenv install 3.13", "JAXPRORL_PYTHON="):
        assert remedy in result.stderr
    assert not (machine.checkout / ".venv").exists()


def test_the_named_python_is_used_and_no_other(machine: Machine) -> None:
    machine.python("3.13")
    named = machine.python("3.11", machine.home / "my python")
    assert machine.call("choose_python", JAXPRORL_PYTHON=str(named)).stdout == f"3.11 {named}\n"


def test_a_named_python_that_will_not_do_is_an_error(machine: Machine) -> None:
    machine.python("3.13")
    old = machine.python("3.9")
    for value, problem in ((str(old), "is Python 3.9"), ("/no/such/python", "does not run")):
        result = machine.quickstart(JAXPRORL_PYTHON=value)
        assert result.returncode == 1
        assert f"JAXPRORL_PYTHON={value} {problem}" in result.stderr
        assert "3.13 or 3.12 or 3.11" in result.stderr


def test_quickstart_installs_once_and_passes_its_arguments_on(machine: Machine) -> None:
    machine.python("3.13")
    expected = f"trains in {machine.checkout}: launch/train.py --config=configs/quickstart.py --config.seed=3 --config.run_name=a b\n"
    for _ in range(2):
        result = machine.quickstart("--config.seed=3", "--config.run_name=a b")
        assert (result.returncode, result.stdout) == (0, expected), result.stderr
    assert len(machine.calls("-m pip install")) == 1
    assert "Installing" not in result.stderr


def test_changed_requirements_are_installed_into_the_same_environment(machine: Machine) -> None:
    machine.python("3.13")
    machine.quickstart()
    (machine.checkout / "requirements.txt").write_text("jax==0.13.0\n")
    machine.python("3.12")  # another Python that appeared since changes nothing
    machine.quickstart()
    machine.quickstart()
    assert len(machine.calls("-m venv")) == 1
    assert len(machine.calls("-m pip install")) == 2


def test_an_interrupted_installation_starts_afresh(machine: Machine) -> None:
    machine.python("3.13")
    failed = machine.quickstart(FAKE_PIP_STATUS="1")
    assert failed.returncode == 1
    assert "installing into .venv failed" in failed.stderr
    assert "trains" not in failed.stdout
    leftover = machine.checkout / ".venv/leftover"
    leftover.touch()
    assert machine.quickstart().returncode == 0
    assert not leftover.exists()


def test_an_environment_that_was_moved_or_lost_its_python_is_made_again(machine: Machine) -> None:
    machine.python("3.13")
    machine.quickstart()
    (machine.checkout / ".venv/bin/python").unlink()
    assert machine.quickstart().returncode == 0
    assert len(machine.calls("-m venv")) == 2


def test_another_version_is_made_when_it_is_named(machine: Machine) -> None:
    machine.python("3.13")
    machine.quickstart()
    older = machine.python("3.11")
    assert machine.quickstart(JAXPRORL_PYTHON=str(older)).returncode == 0
    assert machine.calls("3.11 launch/train.py")
    assert machine.quickstart(JAXPRORL_PYTHON=str(older)).returncode == 0
    assert len(machine.calls("-m venv")) == 2


def test_an_environment_made_by_hand_is_used_if_it_fits_and_never_removed(machine: Machine) -> None:
    machine.python("3.13")
    machine.python("3.12", machine.checkout / ".venv/bin/python")
    assert machine.quickstart().returncode == 0
    assert machine.calls("3.12 launch/train.py")
    for stamp in (machine.checkout / ".venv").glob(".ready-*"):
        stamp.unlink()
    machine.python("3.8", machine.checkout / ".venv/bin/python")
    result = machine.quickstart()
    assert result.returncode == 1
    assert "rm -r .venv" in result.stderr
    assert (machine.checkout / ".venv/bin/python").exists()


def together(machine: Machine, number: int, *script: str, pip_seconds: str = "1") -> list[subprocess.Popen[str]]:
    """So many of one script, started at the same time."""
    command, environment = ["bash", str(machine.checkout / script[0]), *script[1:]], machine.environment(FAKE_PIP_SECONDS=pip_seconds)
    return [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(number)
    ]


# With the flock command, and without one, as on macOS: there a Python takes the lock.
LOCKS = [pytest.param("flock", marks=pytest.mark.skipif(shutil.which("flock") is None, reason="there is no flock here")), "python"]


def lock_by(machine: Machine, lock: str) -> None:
    if lock == "python":
        (machine.path / "flock").unlink(missing_ok=True)
        (machine.path / "python3").symlink_to(sys.executable)


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("lock", LOCKS)
def test_scripts_at_once_install_once_and_the_others_name_whom_they_wait_for(machine: Machine, lock: str, number: int) -> None:
    machine.python("3.13")
    lock_by(machine, lock)
    runs = together(machine, number, "launch/quickstart.sh", pip_seconds="3")
    said = [run.communicate(timeout=60) for run in runs]
    assert all("trains" in out for out, _ in said), said
    assert len(machine.calls("-m pip install")) == 1
    (installer,) = [run.pid for run, (_, err) in zip(runs, said, strict=True) if "Installing" in err]
    waits = re.findall(r"^(.*); waiting for it\.$", "".join(err for _, err in said), re.M)
    assert f"Process {installer} on {socket.gethostname()} is installing into .venv" in waits
    assert all(wait.startswith("Process ") for wait in waits)


@pytest.mark.parametrize("lock", LOCKS)
def test_both_environments_are_installed_once_by_two_scripts_each(machine: Machine, lock: str) -> None:
    machine.python("3.13")
    machine.python("3.11")
    lock_by(machine, lock)
    runs = [*together(machine, 2, "launch/quickstart.sh"), *together(machine, 2, "launch/install_vllm.sh", "cpu")]
    assert all(run.wait(timeout=60) == 0 for run in runs), [run.communicate() for run in runs]
    for run in runs:
        run.communicate()
    assert len(machine.calls("3.13 -m pip install")) == len(machine.calls("3.11 -m pip install")) == 1
    assert len(machine.calls("-m venv .venv")) == 2


@pytest.mark.parametrize("lock", LOCKS)
def test_who_waits_for_a_script_that_is_killed_installs_afresh(machine: Machine, lock: str) -> None:
    machine.python("3.13")
    lock_by(machine, lock)
    (dying,) = together(machine, 1, "launch/quickstart.sh", pip_seconds="100")
    until(lambda: bool(machine.calls("-m pip install")))
    (waiting,) = together(machine, 1, "launch/quickstart.sh", pip_seconds="0")
    assert waiting.stderr and f"Process {dying.pid} on " in waiting.stderr.readline()
    (machine.checkout / ".venv/leftover").touch()
    os.killpg(dying.pid, signal.SIGKILL)
    dying.communicate()
    assert "trains" in waiting.communicate(timeout=60)[0]
    assert len(machine.calls("-m pip install")) == 2
    assert not (machine.checkout / ".venv/leftover").exists()


def test_where_nothing_can_be_locked_the_installation_goes_on_with_a_warning(machine: Machine) -> None:
    machine.python("3.13")
    (machine.path / "flock").unlink(missing_ok=True)
    machine.program(machine.path / "flock", "#!/usr/bin/env bash\nexit 71\n")  # as on a file system without locks
    result = machine.quickstart()
    assert "trains" in result.stdout
    assert "WARNING: .cache/install.venv.lock cannot be locked" in result.stderr


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_without_a_compiler_only_pycosat_is_left_out(machine: Machine) -> None:
    machine.python("3.13")
    result = machine.quickstart(FAKE_COMPILER="no-such-compiler")
    assert result.returncode == 0
    assert "zebra_puzzles" in result.stderr
    everything_else = (machine.checkout / ".venv/.without").read_text()
    assert "jax==" in everything_else
    assert "pycosat" not in everything_else
    assert (machine.checkout / ".venv/.alone").read_text().startswith("reasoning_gym==")
    assert len(machine.calls("--no-deps")) == 1
    stand_in: dict[str, object] = {}
    exec((machine.checkout / ".venv/pycosat.py").read_text(), stand_in)
    with pytest.raises(ImportError, match="C compiler"):
        stand_in["solve"]([[1]])  # type: ignore[operator]


def test_test_script_runs_the_tier_and_tells_of_a_missing_second_environment(machine: Machine) -> None:
    machine.python("3.13")
    quick = machine.test("--quick", "tests/test_update.py")
    assert quick.returncode == 0
    assert "Parity tests were SKIPPED" in quick.stderr
    assert machine.calls("-m pytest") == ["3.13 -m pytest -n 2 -m not slow and not long tests/test_update.py"]
    default = machine.test()  # no Python 3.11 here
    assert default.returncode == 0
    assert "Parity tests were SKIPPED" in default.stderr
    assert machine.calls("-m pytest")[-1] == "3.13 -m pytest -n 2 -m not long"
    machine.test("--long")
    assert machine.calls("-m pytest")[-1] == "3.13 -m pytest -n 2 -m "


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"JAXPRORL_REQUIRE_VLLM": "1"}])
def test_a_missing_second_environment_fails_where_it_is_required(machine: Machine, variables: dict[str, str]) -> None:
    machine.python("3.13")
    for tier in ([], ["--quick"]):
        result = machine.test(*tier, **variables)
        assert result.returncode == 1
        assert "second environment" in result.stderr
        assert not machine.calls("-m pytest")


def test_the_second_environment_is_made_on_its_own_python(machine: Machine) -> None:
    machine.python("3.13")
    machine.python("3.11")
    for _ in range(2):
        assert machine.test(CI="true").returncode == 0
    assert machine.calls("3.13 -m venv .venv")
    assert machine.calls("3.11 -m venv .venv-vllm")
    assert len(machine.calls("3.11 -m pip uninstall -y torchvision")) == 1
    assert len(machine.calls("3.11 -m pip install")) == 1


@pytest.mark.parametrize("arguments", [("--config.rollout.engine=vllm",), ("--config.rollout.engine", "vllm")])
def test_the_quickstart_makes_the_second_environment_only_for_vllm(machine: Machine, arguments: tuple[str, ...]) -> None:
    machine.python("3.13")
    machine.python("3.11")
    assert machine.quickstart().returncode == 0
    assert machine.quickstart("--config.rollout.engine=vllm", "--config.rollout.vllm.python=/elsewhere/python").returncode == 0
    assert machine.quickstart("--config.rollout.engine", "vllm", "--config.rollout.vllm.python", "/elsewhere/python").returncode == 0
    assert machine.quickstart("--config.rollout.engine", "jax", "--config.run_name", "vllm").returncode == 0
    assert not machine.calls(".venv-vllm")
    result = machine.quickstart(*arguments)
    assert "vllm" in result.stdout
    assert (machine.checkout / ".venv-vllm/.ready-requirements-vllm.txt").exists()


def test_the_second_environment_is_made_for_the_device_that_is_asked_for(machine: Machine) -> None:
    machine.python("3.11")
    install = machine.checkout / "launch/install_vllm.sh"
    refused = machine.run("bash", install)
    assert refused.returncode == 1
    assert "cpu|gpu|tpu" in refused.stderr
    for platform, file in (("cpu", "requirements-vllm.txt"), ("gpu", "requirements-vllm-gpu.txt"), ("tpu", "requirements-vllm-tpu.txt")):
        for _ in range(2):
            assert machine.run("bash", install, platform).returncode == 0
        assert machine.calls("-m pip install")[-1].endswith(f"-r {file} -qq --disable-pip-version-check --no-input")
        assert [path.name for path in (machine.checkout / ".venv-vllm").glob(".ready-*")] == [f".ready-{file}"]
    assert len(machine.calls("-m pip install")) == 3
    assert len(machine.calls("-m venv .venv-vllm")) == 3, "builds for two devices do not share an environment"
    assert len(machine.calls("-m pip uninstall")) == 1, "only the CPU build has packages that break it"


def test_a_failed_check_fails_the_script_after_the_others_ran(machine: Machine) -> None:
    machine.python("3.13")
    result = machine.test("--quick", FAKE_RUFF_STATUS="1")
    assert result.returncode == 1
    assert "failed: ruff check" in result.stderr
    assert machine.calls("-m pytest")
