"""The kernels compile for H100 and TPU v5e; only compilers are needed, see `accelerators.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerators import run_for


def compiled(target: str, attention: str, remat: str = "none") -> dict[str, Any]:
    program = Path(__file__).parent / "compile_for_accelerator.py"
    result: dict[str, Any] = json.loads(run_for(target, program, target, attention, remat).splitlines()[-1])
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
