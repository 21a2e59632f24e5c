"""The parts of conftest.py that other tests rely on."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

INNER = """
import pytest

def test_parity(run_reference): ...

def test_large(require_room):
    require_room(memory_gb=1e9, disk_gb=0)

@pytest.mark.long
def test_long(): ...

def test_other(): ...
"""


def run_inner(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Runs a small suite under a copy of conftest.py, in a checkout that has no second environment."""
    (folder / "tests").mkdir(exist_ok=True)
    for name in ("conftest.py", "places.py"):
        shutil.copy(Path(__file__).parent / name, folder / "tests")
    shutil.copy(Path(__file__).parent.parent / "pyproject.toml", folder)
    (folder / "tests/test_inner.py").write_text(INNER)
    environment = {name: value for name, value in os.environ.items() if name not in ("JAXPRORL_REQUIRE_VLLM", "JAXPRORL_VLLM_PYTHON")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *arguments],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_there_are_two_cpu_devices() -> None:
    if jax.default_backend() == "cpu":
        assert jax.device_count() == 2


def test_skipped_parity_long_and_large_tests_are_counted(tmp_path: Path) -> None:
    status, output = run_inner(tmp_path, "--long-until-minute=-1")
    assert status == 0
    assert "1 parity tests SKIPPED" in output
    assert "1 long tests SKIPPED" in output
    assert "1 large tests SKIPPED" in output
    assert output.index("test_other") < output.index("test_long")
    assert "1 passed, 3 skipped" in output.splitlines()[-1]


@pytest.mark.slow
def test_one_process_runs_all_of_a_file_and_its_long_tests_come_apart_and_last(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    text = "import pytest\n@pytest.mark.parametrize('n', range(6))\ndef test_short(n): ...\n@pytest.mark.long\ndef test_long(): ...\n"
    for name in "abcd":
        (tmp_path / f"tests/test_{name}.py").write_text(text)
    status, output = run_inner(tmp_path, "-n", "2", "-k", "test_short or test_long", "--ignore=tests/test_inner.py")
    assert status == 0
    passed = re.findall(r"\[(gw\d)\].*PASSED tests/test_(\w)\.py::test_(short|long)", output)
    assert len(passed) == 28 and {worker for worker, _, _ in passed} == {"gw0", "gw1"}
    for name in "abcd":
        assert len({worker for worker, file, kind in passed if (file, kind) == (name, "short")}) == 1
    assert {kind for _, _, kind in passed[-2:]} == {"long"}


def test_required_parity_tests_fail_without_the_second_environment(tmp_path: Path) -> None:
    status, output = run_inner(tmp_path, "-m", "vllm", JAXPRORL_REQUIRE_VLLM="1")
    assert status == 1
    assert "launch/test.sh" in output


def test_a_named_second_python_must_run(tmp_path: Path) -> None:
    status, output = run_inner(tmp_path, "-m", "vllm", JAXPRORL_VLLM_PYTHON="/no/such/python")
    assert status == 1
    assert "JAXPRORL_VLLM_PYTHON=/no/such/python does not run" in output


@pytest.mark.slow
def test_reference_scripts_get_and_give_arrays(run_reference: Callable[..., dict[str, np.ndarray]]) -> None:
    x_BV = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    out = run_reference(
        """
        import torch
        assert str(inputs["note"]) == "hello"
        outputs["y"] = torch.from_numpy(inputs["x"]).softmax(-1).numpy()
        """,
        x=x_BV,
        note="hello",
    )
    np.testing.assert_allclose(out["y"], jax.nn.softmax(x_BV), rtol=1e-6)


def test_a_failing_reference_script_fails_the_test(run_reference: Callable[..., dict[str, np.ndarray]]) -> None:
    with pytest.raises(pytest.fail.Exception, match="ZeroDivisionError"):
        run_reference("1 / 0")
