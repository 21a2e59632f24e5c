"""`pip install -e .`, without a network: importable from everywhere, and a run from a folder of one's own."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BUILD_TOOLS = ("setuptools", "setuptools-*.dist-info", "pkg_resources", "_distutils_hack")  # all of them Python, of whatever version

RUN = """
from configs import base, quickstart
from jaxprorl.train import train

config = quickstart.get_config()
small = SMALL
config.update(small)
config.data.tasks = {"chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}}
result = train(config, reward=lambda completion, prompt: max(0.0, 1.0 - len(completion) / 100))
print(result.folder, result.summary["steps"])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has this package installed, and beside it the libraries of the one that tests run in."""
    place = tmp_path_factory.mktemp("installed")
    checkout, tools = place / "checkout", place / "tools"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("jaxprorl", "configs"):
        shutil.copytree(tiny_run.ROOT / name, checkout / name, ignore=ignored)
    for file in [*tiny_run.ROOT.glob("requirements*.txt"), *(tiny_run.ROOT / name for name in ("setup.py", "pyproject.toml"))]:
        shutil.copy(file, checkout)
    tools.mkdir()
    for found in build_tools():
        (tools / found.name).symlink_to(found)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "environment"], check=True)
    python = place / "environment/bin/python"
    packages = sysconfig.get_path("purelib", vars={"base": str(place / "environment")})
    (Path(packages) / "beside.pth").write_text(sysconfig.get_path("purelib"))
    command = [python, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "-e", checkout]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tools)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def build_tools() -> list[Path]:
    """setuptools, of this environment or of the second one."""
    own = importlib.util.find_spec("setuptools")
    places = (
        [Path(own.origin).parents[1]] if own and own.origin else sorted((tiny_run.ROOT / ".venv-vllm").glob("lib/python*/site-packages"))
    )
    found = [path for place in places for pattern in BUILD_TOOLS for path in place.glob(pattern)]
    if not found:
        pytest.skip("no setuptools here to build with")
    return found


def run(python: Path, place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run([python, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False)


def small() -> dict[str, object]:
    """The tiny run's fields without its tasks and its reward, which only tests can import."""
    fields = tiny_run.get_config().to_dict()
    del fields["data"]["tasks"], fields["reward"], fields["stages"]
    return fields | {"steps": 1}


def test_package_and_configs_are_importable_from_everywhere(python: Path, tmp_path: Path) -> None:
    program = "import configs.quickstart, jaxprorl; from jaxprorl.train import train; print(jaxprorl.__file__, configs.__file__)"
    done = run(python, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    assert [Path(file).parents[1].name for file in done.stdout.split()] == ["checkout", "checkout"]


def test_every_module_is_found(python: Path, tmp_path: Path) -> None:
    program = """
import importlib, pkgutil, configs, jaxprorl
for package in (jaxprorl, configs):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name != "jaxprorl.rollout.worker":
            print(importlib.import_module(found.name).__name__)
"""
    done = run(python, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    files = [path for name in ("jaxprorl", "configs") for path in (tiny_run.ROOT / name).rglob("*.py")]
    assert len(done.stdout.splitlines()) == len(files) - 3, "all but the two packages themselves, and what runs in the second environment"


def test_a_run_trains_in_a_folder_of_its_own(python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RUN.replace("SMALL", repr(small())))
    done = run(python, tmp_path, "mine.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{tmp_path / 'runs/tiny'} 1"
    assert {path.name for path in tmp_path.iterdir()} >= {"runs", ".cache"}


def test_a_path_that_starts_elsewhere_is_an_error_that_says_so(python: Path, tmp_path: Path) -> None:
    text = RUN.replace("SMALL", repr(small())).replace("result =", "config.rollout.engine = 'vllm'\nresult =")
    (tmp_path / "mine.py").write_text(text)
    done = run(python, tmp_path, "mine.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: rollout.vllm.python = '.venv-vllm/bin/python'" in last
    assert str(tmp_path) in last
    assert not (tmp_path / "runs").exists()
