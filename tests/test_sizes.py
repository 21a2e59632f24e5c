import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import tiny_config
from ml_collections import ConfigDict

from benchmarks import step
from configs import base
from jaxprorl import sizes
from jaxprorl.config import validate
from jaxprorl.models.compute import Compute, choose_compute
from jaxprorl.sizes import usable_cores, with_cpu_devices, with_micro_batch_rows

ROOT = Path(__file__).resolve().parents[1]


def mesh_of(platform: str, data: int = 1, fsdp: int = 1, context: int = 1) -> Any:
    devices = SimpleNamespace(flat=[SimpleNamespace(platform=platform)], size=data * fsdp * context)
    return SimpleNamespace(devices=devices, size=devices.size, shape={"data": data, "fsdp": fsdp, "tensor": 1, "context": context})


def undecided(**overrides: Any) -> ConfigDict:
    return tiny_config(**{"mesh__cpu_devices": 0, "batch__micro_batch_rows": 0, "warmstart__rows": 16, "rollout__slots": 64} | overrides)


@pytest.mark.parametrize(
    ("cores", "overrides", "expected"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (3, {}, 2),
        (6, {}, 4),
        (64, {}, 8),
        (64, {"warmstart__rows": 4}, 4),
        (64, {"warmstart__rows": 4, "model__path": "some"}, 8),  # then there is no warm start
        (64, {"rollout__slots": 30}, 2),
        (64, {"rollout__slots": 31}, 1),
        (64, {"batch__micro_batch_rows": 12}, 4),
        (1, {"mesh__fsdp": 4, "mesh__tensor": 2}, 8),  # what is asked for by name
        (64, {"mesh__cpu_devices": 3}, 3),
        (64, {"mesh__data": 1}, 1),  # the axis that would be filled is named
        (64, {"mesh__strategy": "fsdp", "mesh__fsdp": 1}, 1),
        (64, {"mesh__strategy": "fsdp"}, 8),
        (64, {"mesh__strategy": "tp"}, 1),  # heads may not divide
        (64, {"mesh__strategy": "no such"}, 1),  # refused later, by name
    ],
)
def test_host_devices_are_those_that_the_cores_serve_and_the_sizes_divide_by(
    monkeypatch: pytest.MonkeyPatch, cores: int, overrides: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(sizes, "usable_cores", lambda: cores)
    config = undecided(**overrides)
    before = config.to_dict()
    assert with_cpu_devices(config).mesh.cpu_devices == expected
    assert config.to_dict() == before


def test_the_sizes_of_all_stages_divide_by_the_host_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "usable_cores", lambda: 8)
    config = undecided(stages=(base.stage("a", 1), base.stage("b", 1, {"rollout.slots": 12})))
    assert with_cpu_devices(config).mesh.cpu_devices == 4
    config.rollout.slots = 6  # of the first stage
    assert with_cpu_devices(config).mesh.cpu_devices == 2


def test_what_is_chosen_for_a_run_before_takes_the_place_of_the_rule() -> None:
    assert with_cpu_devices(undecided(), 4).mesh.cpu_devices == 4
    assert with_cpu_devices(undecided(mesh__cpu_devices=2), 4).mesh.cpu_devices == 2


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", None), ("150000 100000", 2), ("20000 100000", 1), ("6400000 100000", None), ("", None)]
)
def test_cores_are_those_of_the_process_and_its_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int | None
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(sizes, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5), raising=False)
    assert usable_cores() == (expected or 5)
    monkeypatch.setattr(sizes, "CPU_QUOTA", tmp_path / "nowhere")
    assert usable_cores() == 5


def compute_on(platform: str, shared: bool = False, **axes: int) -> Compute:
    return Compute(mesh=mesh_of(platform, **axes), shared_prompts=shared)


@pytest.mark.parametrize(
    ("compute", "overrides", "expected"),
    [
        (compute_on("cpu"), {"row_tokens": 768}, 2),
        (compute_on("cpu"), {"row_tokens": 769}, 1),
        (compute_on("cpu", data=2), {"row_tokens": 321}, 8),
        (compute_on("cpu", data=2, fsdp=2), {"row_tokens": 321}, 16),
        (compute_on("cpu", data=2), {"row_tokens": 4160}, 2),  # one each at least
        (compute_on("cpu", fsdp=2, context=2), {"row_tokens": 768}, 8),  # each device has half of a row
        (compute_on("gpu", data=4, fsdp=2), {"row_tokens": 4096}, 16),
        (compute_on("cuda"), {"row_tokens": 2048}, 4),
        (compute_on("gpu"), {"row_tokens": 8000}, 1),
        (compute_on("tpu", fsdp=4), {"row_tokens": 20000}, 4),
        # 64 sequences of 20 tokens at most fill 4 rows of 360, 18 in each, or 64 unpacked ones
        (compute_on("gpu"), {"row_tokens": 360, "prompts": 16}, 4),
        (compute_on("gpu", data=3), {"row_tokens": 360, "prompts": 16}, 6),
        (compute_on("gpu"), {"row_tokens": 40, "prompts": 16, "packing": False}, 64),
        (compute_on("gpu"), {"row_tokens": 40, "prompts": 16}, 32),
        (compute_on("gpu"), {"row_tokens": 40, "prompts": 16, "updates": 16}, 2),
        (compute_on("gpu", shared=True), {"row_tokens": 60, "prompts": 1}, 1),  # prompts of 8 and 4 samples of 12: 7 + 4 x 13 = 59
        (compute_on("gpu"), {"row_tokens": 60, "prompts": 1}, 2),  # three of 20 in a row
    ],
)
def test_micro_batches_hold_so_many_tokens_per_device_and_no_more_than_there_are(
    compute: Compute, overrides: dict[str, Any], expected: int
) -> None:
    changes = {"prompts": 100_000, "updates": 1, "micro_batch_rows": 0} | overrides
    config = tiny_config(**{f"batch__{name}": value for name, value in changes.items()})
    chosen = with_micro_batch_rows(config, compute)
    assert (chosen.batch.micro_batch_rows, config.batch.micro_batch_rows) == (expected, 0)


def test_rows_that_are_named_stay() -> None:
    config = tiny_config(batch__micro_batch_rows=6)
    assert with_micro_batch_rows(config, compute_on("cpu", data=2)) is config


def test_the_benchmark_takes_sizes_that_were_measured(tmp_path: Path) -> None:
    config = step.get_config()
    config.model.path, config.data.source = str(tmp_path), f"jsonl:{tmp_path / 'questions.jsonl'}"
    step.write_questions(tmp_path / "questions.jsonl", config.batch.prompts)
    validate(config, step.SCHEMA)
    compute = choose_compute(config, 64, mesh_of("cpu", 2))
    config = with_micro_batch_rows(config, compute)
    assert (config.batch.micro_batch_rows, compute.attention, compute.shared_prompts) == (8, "naive", True)


def test_nothing_here_touches_jax() -> None:
    code = "import sys, jaxprorl.sizes; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
