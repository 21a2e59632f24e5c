"""Two CPU devices, the second environment for parity tests, and the order and counting of tests."""

import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

# Before any backend starts: tests mean the CPU unless told otherwise, and sharding needs more than one device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import psutil
import pytest
from places import NO_MOUNT

jax.config.update("jax_num_cpu_devices", 2)
# A shell has its background jobs ignore Ctrl-C, nohup a closed terminal, and so would all processes that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).parent.parent
NO_REFERENCE = "no second environment"
NO_TIME = "no time left for long tests"
NO_ROOM = "too little memory or disk is free"
NO_COMPILER = "no accelerator compiler"
START = pytest.StashKey[float]()

# The reference computes in float32 on one thread (more threads fight over busy cores), eagerly, and asks no hub.
REFERENCE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long-until-minute",
        type=float,
        default=float("inf"),
        help="skip (and count) long tests that would start later than this after the beginning; they run last",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[START] = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "reference_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.vllm)
        # One process runs all of a file, whose tests share fixtures; its long ones are taken up apart from the others.
        item.add_marker(pytest.mark.xdist_group(f"{os.path.relpath(item.path, ROOT)}{', long' * is_long(item)}"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    # Stable: long ones last. Files with slow tests first, so that all processes have something to do to the end.
    items.sort(key=lambda item: (is_long(item), item.path not in slow))


def is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = (time.monotonic() - item.config.stash[START]) / 60
    if item.get_closest_marker("long") and minutes > item.config.getoption("--long-until-minute"):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skips that hide something are counted where they cannot be missed."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    hidden = (
        (NO_REFERENCE, "parity tests"),
        (NO_TIME, "long tests"),
        (NO_ROOM, "large tests"),
        (NO_COMPILER, "compile tests"),
        (NO_MOUNT, "tests of full or read-only disks"),
    )
    for words, meaning in hidden:
        count = sum(words in reason for reason in reasons)
        if count:
            terminalreporter.write_sep("!", f"{count} {meaning} SKIPPED: {words}", red=True, bold=True)


@pytest.fixture
def require_room(tmp_path: Path) -> Callable[[float, float], None]:
    """Skips the test, counted, where less is free: `require_room(memory_gb, disk_gb)`."""

    def require(memory_gb: float, disk_gb: float) -> None:
        memory, disk = psutil.virtual_memory().available / 1e9, psutil.disk_usage(str(tmp_path)).free / 1e9
        if memory < memory_gb or disk < disk_gb:
            pytest.skip(f"{NO_ROOM}: {memory:.1f} GB memory and {disk:.1f} GB disk, {memory_gb} and {disk_gb} are needed")

    return require


@pytest.fixture(scope="session")
def reference_python() -> Path:
    """The second environment's Python, with torch, transformers and vLLM; without it the test is skipped, or fails if required."""
    named = os.environ.get("JAXPRORL_VLLM_PYTHON")
    if named:
        python, problem = Path(named), f"JAXPRORL_VLLM_PYTHON={named} does not run"
        ready = os.access(python, os.X_OK) and subprocess.run([python, "-c", ""], check=False).returncode == 0
    else:
        python, problem = ROOT / ".venv-vllm/bin/python", ".venv-vllm is not there; `bash launch/test.sh` makes it"
        ready = (ROOT / ".venv-vllm/.ready-requirements-vllm.txt").exists() and os.access(python, os.X_OK)
    if ready:
        return python
    if named or os.environ.get("JAXPRORL_REQUIRE_VLLM") == "1":
        pytest.fail(f"{NO_REFERENCE}: {problem}")
    pytest.skip(f"{NO_REFERENCE}: {problem}")


@pytest.fixture
def run_reference(reference_python: Path, tmp_path: Path) -> Callable[..., dict[str, np.ndarray]]:
    """Runs a script in the second environment: `run_reference(script, timeout_s=240, **arrays) -> arrays`.

    The script is Python text. It finds the named arrays in the dict `inputs`, and whatever it puts into the dict `outputs` comes back.
    Arrays travel as .npz files, so bfloat16 must be cast first; paths go in as strings: `str(inputs["path"])`. Its working directory is
    the test's `tmp_path`. An exception in it fails the test and shows its traceback.

        out = run_reference("import torch; outputs['y'] = torch.from_numpy(inputs['x']).softmax(-1).numpy()", x=x_BV)
        np.testing.assert_allclose(softmax(x_BV), out["y"], rtol=1e-6)
    """
    calls = 0

    def run(script: str, timeout_s: float = 240, **arrays: np.ndarray | str | float) -> dict[str, np.ndarray]:
        nonlocal calls
        calls += 1
        paths = [tmp_path / f"reference_{calls}{suffix}" for suffix in (".py", "_in.npz", "_out.npz")]
        # os._exit: tearing torch and vLLM down takes several seconds and tells nothing.
        program = (
            "import os, sys\nimport numpy as np\ninputs, outputs = dict(np.load(sys.argv[1])), {}\n"
            + textwrap.dedent(script)
            + "\nnp.savez(sys.argv[2], **outputs)\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"
        )
        paths[0].write_text(program)
        np.savez(paths[1], **{name: np.asarray(array) for name, array in arrays.items()})
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | REFERENCE_ENVIRONMENT
        done = subprocess.run(
            [reference_python, *paths], cwd=tmp_path, env=environment, timeout=timeout_s, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.fail(f"the reference script failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        with np.load(paths[2]) as out:
            return dict(out)

    return run


@pytest.fixture
def import_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[int, str, str]]:
    """launch/import_hf.py in this process: (status, stdout, stderr)."""
    script = str(Path(__file__).parents[1] / "launch/import_hf.py")

    def start(folder: Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, "--source", str(folder)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(script, run_name="__main__")
        return int(end.value.code or 0), *capsys.readouterr()

    return start
