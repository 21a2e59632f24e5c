"""The kernels compile for H100 and TPU v5e; only compilers are needed, `pip install '.[gpu-compiler]'` or '.[tpu]'."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_COMPILER

HERE = Path(__file__).parent
PACKAGES = {"h100": ("jax_cuda12_plugin", "gpu-compiler"), "v5e": ("libtpu", "tpu")}
EVERYWHERE = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3"}
ENVIRONMENT = {
    # XLA's own Triton matmuls are chosen by trying them on a GPU; without one some cannot be compiled.
    "h100": EVERYWHERE | {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"},
    # Nothing asks for a host's metadata, and other processes may use libtpu at the same time.
    "v5e": EVERYWHERE | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
}


def compiled(target: str, attention: str, remat: str = "none") -> dict[str, Any]:
    package, extra = PACKAGES[target]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{NO_COMPILER}: {package} is not installed; it is in the extra '{extra}'")
    program = [sys.executable, HERE / "compile_for_accelerator.py", target, attention, remat]
    done = subprocess.run(program, env=os.environ | ENVIRONMENT[target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("target", "kernel"), [("h100", "triton"), ("v5e", "splash")])
def test_kernels_and_chunks_compile_and_hold_no_array_of_scores(target: str, kernel: str) -> None:
    chunked, by_kernel, again = compiled(target, "chunked"), compiled(target, kernel), compiled(target, kernel, "full")
    assert chunked["platform"] == {"h100": "gpu", "v5e": "tpu"}[target]
    assert chunked["kernels"] == 0
    assert by_kernel["kernels"] == 3  # one forward; two in the backward pass
    assert again["kernels"] == 4  # and the forward one again
    assert chunked["score_arrays"] == by_kernel["score_arrays"] == 0
    assert again["temp_bytes"] < by_kernel["temp_bytes"] / 2
    scores_bytes = 12 * 2560**2 * 4 * 6  # of one row's twelve heads in all six layers; everything kept together is less
    assert chunked["temp_bytes"] < scores_bytes and by_kernel["temp_bytes"] < scores_bytes
