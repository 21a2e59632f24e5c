"""Programs compiled for H100 and TPU v5e where neither is there; only compilers are needed, `pip install '.[gpu-compiler]'` or '.[tpu]'."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import NO_COMPILER

HERE = Path(__file__).parent
PACKAGES = {"h100": ("jax_cuda12_plugin", "gpu-compiler"), "v5e": ("libtpu", "tpu")}
PYTHONPATH = os.pathsep.join(str(folder) for folder in (HERE.parent, HERE, HERE / "sharding"))
EVERYWHERE = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "3"}
ENVIRONMENT = {
    "cpu": EVERYWHERE,
    # XLA's own Triton matmuls are chosen by trying them on a GPU; without one some cannot be compiled.
    "h100": EVERYWHERE | {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"},
    # Nothing asks for a host's metadata, and other processes may use libtpu at the same time.
    "v5e": EVERYWHERE | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
}


def run_for(target: str, program: Path, *arguments: str) -> str:
    """What a Python program prints under the environment that compiles for `target`; the test is skipped without the compiler."""
    if target in PACKAGES:
        package, extra = PACKAGES[target]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{NO_COMPILER}: {package} is not installed; it is in the extra '{extra}'")
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT[target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def optimised_hlo(target: str, program: str, *arguments: str) -> str:
    """The HLO of MODULE:FUNCTION (see `compile_program.py`) for eight devices of "cpu", "h100" or "v5e"."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "hlo.txt"
        run_for(target, HERE / "compile_program.py", target, program, str(out), *arguments)
        return out.read_text()
