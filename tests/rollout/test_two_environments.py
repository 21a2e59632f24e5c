"""Trainer and worker share two rings and a weight segment, and no package: neither side ever imports what the other is made of."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from jaxprorl.rollout.worker_process import BOOTSTRAP, ENVIRONMENT

ROOT = Path(__file__).parents[2]
WORKERS = {"torch", "transformers", "vllm"}
TRAINERS = {"jax", "jaxlib", "flax", "optax", "orbax", "ml_collections"}


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


def loaded(python: Path, program: str, *arguments: str) -> set[str]:
    """Top-level modules after a program has run in a process of its own."""
    program += "\nprint('loaded:', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [python, "-c", program, *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**ENVIRONMENT, "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_only_the_worker_imports_torch_and_vllm() -> None:
    users = {path.name for path in (ROOT / "jaxprorl").rglob("*.py") if imported(path) & WORKERS}
    assert users == {"worker.py"}


@pytest.mark.slow
def test_the_trainer_never_imports_torch_or_vllm() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import jaxprorl.train, jaxprorl.rollout.engines"
    modules = loaded(Path(sys.executable), program)
    assert {"jax", "ml_collections"} <= modules
    assert not modules & WORKERS


def worker_program() -> str:
    """What starts a worker, up to its main function."""
    return BOOTSTRAP.replace("main(argument)", "")


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["trainer's Python", "worker's Python"])
def test_the_worker_never_imports_jax(own: bool, request: pytest.FixtureRequest) -> None:
    """In the trainer's Python it could: there it must not. In its own it can import vLLM, which must not bring jax either."""
    python = Path(sys.executable) if own else request.getfixturevalue("reference_python")
    program = worker_program() + ("" if own else "\nimport vllm.v1.engine.llm_engine")
    modules = loaded(python, program, str(ROOT / "jaxprorl"), "{}")
    assert "numpy" in modules
    assert ("vllm" in modules) == (not own)
    assert not modules & TRAINERS


def test_the_worker_finds_the_package_alone(tmp_path: Path) -> None:
    """Installed, the package lies beside the trainer's other packages, built for another Python."""
    (tmp_path / "jaxprorl").symlink_to(ROOT / "jaxprorl")
    (tmp_path / "beside_it.py").write_text("")
    program = worker_program() + "\nimport importlib.util\nassert importlib.util.find_spec('beside_it') is None"
    assert "jaxprorl" in loaded(Path(sys.executable), program, str(tmp_path / "jaxprorl"), "{}")
