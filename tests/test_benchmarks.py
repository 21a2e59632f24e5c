"""What the benchmarks compute around their runs; the runs themselves take minutes and a quiet machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer

from benchmarks import scaling, step, variants, workload
from benchmarks.run import fallen, jobs, ratios, table
from jaxprorl import config as config_module
from jaxprorl.data.prompts import Item, build_prompt
from jaxprorl.data.tokenizer import load_tokenizer
from jaxprorl.errors import UserError
from jaxprorl.models import hf
from jaxprorl.models.compute import Compute
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.sizes import with_micro_batch_rows

PEERS = {"trl": "", "tunix": "", "torch": "", "vllm": ""}


def result(system: str, seconds: float, memory: int = 100, batch: int | None = None) -> dict:
    speed = {"step_s": seconds, "completion_tokens_per_s": 16384 / seconds}
    if batch:
        speed = {"batch": batch, "generation_s": seconds, "completion_tokens_per_s": batch * 128 / seconds}
    return {"system": system, "dtype": "float32", "peak_memory_bytes": memory, **speed}


def test_ratios_above_one_mean_that_we_are_ahead() -> None:
    results = [
        result("jaxprorl", 5.0, 200), result("trl", 15.0, 300), result("jaxprorl", 2.0, batch=128), result("vllm", 1.0, batch=128),
        result("jaxprorl", 0.5, batch=16), result("vllm", 1.0, batch=16),
    ]  # fmt: skip
    assert ratios(results) == {
        "float32.trl.step": 3.0, "float32.trl.memory": 1.5, "float32.vllm.generation_128": 0.5, "float32.vllm.generation_16": 2.0,
    }  # fmt: skip
    assert [line.split()[:2] for line in table(results).splitlines()[1:3]] == [["jaxprorl", "float32"], ["trl", "float32"]]


def test_a_ratio_falls_when_it_is_below_the_recorded_one_by_more_than_the_margin() -> None:
    recorded = {"a": 2.0, "b": 2.0, "c": 2.0, "not measured now": 9.0}
    (line,) = fallen({"a": 1.5, "b": 1.49, "c": 5.0, "new": 0.1}, recorded, margin=0.25)
    assert line == "b: 1.49, recorded 2.00, at least 1.50 is right"


def test_peers_without_an_interpreter_are_left_out() -> None:
    assert [Path(command[1]).name for command in jobs(PEERS, ["float32"])] == ["step.py"]
    names = [Path(command[1]).name for command in jobs(PEERS | {"tunix": "py", "vllm": "py"}, ["float32", "bfloat16"])]
    assert names.count("run_tunix.py") == 1  # it has no bfloat16
    assert (names.count("step.py"), names.count("generation.py"), names.count("run_vllm.py")) == (2, 6, 6)
    sampling = [command[1:4] for command in jobs(PEERS | {"torch": "py"}, ["float32"])[1:]]
    assert [(Path(script).name, *size) for script, *size in sampling] == [
        ("generation.py", "--batch", "128"), ("run_transformers.py", "--batch", "128"),
    ]  # fmt: skip


def test_prompts_are_different_and_of_the_length_that_is_promised(tmp_path: Path) -> None:
    workload.write_tokenizer(tmp_path)
    tokenizer, texts = load_tokenizer(tmp_path), workload.prompts(600)
    assert len(set(texts)) == 600
    for text in (texts[0], texts[-1]):
        prompt = build_prompt(tokenizer, Item("", "", ({"role": "user", "content": text},), "", ""), 0)
        assert prompt.token_ids.shape == (workload.WORK["prompt_tokens"],)
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (workload.PAD_ID, (workload.STOP_ID,))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() <= workload.WORK["model"]["vocab_size"]


@pytest.mark.parametrize(("text", "expected"), [("", 0.0), ("aaaa", 0.25), ("abcd", 1.0), ("abab", 0.5)])
def test_the_reward_by_hand(text: str, expected: float) -> None:
    assert workload.score(text, None) == expected


def test_the_model_folder_is_one_and_has_the_workloads_size(tmp_path: Path) -> None:
    shape = step.model_shape(step.get_config())
    step.write_model(tmp_path, shape)
    assert hf.read_config(tmp_path) == shape
    hf.check_tensors(tmp_path, shape)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    layer = 3 * 256 * 1024 + 2 * 256 * 256 + 2 * 256 * 128 + 512 + 2 * 256  # MLP; q and o; k and v; their biases; norms
    assert sum(value.size for value in tensors.values()) == 512 * 256 + 4 * layer + 256
    assert np.std(tensors["model.embed_tokens.weight"]) == pytest.approx(0.02, rel=0.01)


def test_work_other_than_the_workload_is_refused() -> None:
    workload.require("tokens", (16, 192), (16, 192))
    with pytest.raises(SystemExit, match=r"not the workload: tokens 191, 192 wanted"):
        workload.require("tokens", 191, 192)


def test_the_axes_of_the_scaling_curves_meet() -> None:
    """The point that two axes share is the same run: it is measured once."""
    points = [tuple(scaling.overrides(fields)) for axis in scaling.POINTS.values() for fields in axis.values()]
    assert len(points) == 12 and len(set(points)) == 10


@pytest.mark.parametrize(("axis", "value"), [(axis, value) for axis, values in scaling.POINTS.items() for value in values])
def test_every_point_of_the_scaling_curves_is_a_valid_config(axis: str, value: int, tmp_path: Path) -> None:
    config = config_module.load([f"--config={step.__file__}", *scaling.overrides(scaling.POINTS[axis][value])])
    config.model.path, config.data.source = str(tmp_path), f"jsonl:{tmp_path / 'questions.jsonl'}"
    step.write_questions(tmp_path / "questions.jsonl", config.batch.prompts)
    config_module.validate(config)
    tokens = step.step_tokens(config)
    assert tokens == {"batch": 128 * value, "length": 16384, "vocabulary": 32 * 128}[axis]
    rows = config.batch.prompts * config.rollout.samples_per_prompt
    chosen = with_micro_batch_rows(config, Compute(mesh=make_mesh("dp")))
    assert rows % chosen.batch.micro_batch_rows == 0 == rows - config.rollout.slots


def test_random_groups_of_a_variant_fill_the_workload() -> None:
    config = step.get_config()
    groups, again = (variants.random_groups(config) for _ in range(2))
    assert [len(group.completions) for group in groups] == [8] * 16
    for group, other in zip(groups, again, strict=True):
        assert len(group.prompt.token_ids) == 64 and {len(c.token_ids) for c in group.completions} == {128}
        assert len({score.value for score in group.scores}) == 8
        np.testing.assert_array_equal(group.prompt.token_ids, other.prompt.token_ids)
        assert max(int(c.token_ids.max()) for c in group.completions) < workload.PAD_ID


def test_a_variants_ratio_is_that_of_the_same_round() -> None:
    assert variants.compared([2.0, 8.0, 3.0], [1.0, 8.0, 2.0]) == "3.000 s (1.50)"


@pytest.mark.slow
def test_variants_are_compared_and_profiled() -> None:
    small = ["batch.prompts=2", "batch.refill_prompts=2", "rollout.slots=16", "workload.model.num_hidden_layers=2"]
    command = [sys.executable, variants.__file__, "--rounds", "1", "--profile", *(f"--config.{change}" for change in small)]
    command += ["--vary", "as it is:", "--vary", "scanned:unroll_max_layers=1,batch.micro_batch_rows=2"]
    refused = subprocess.run([*command, "--vary", "odd:batch.micro_batch_rows=1"], capture_output=True, text=True, check=False)
    if os.cpu_count() != 1:
        assert refused.returncode == 1 and refused.stderr.splitlines()[-1].startswith("error: batch.micro_batch_rows = 1: must divide by")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    lines = done.stdout.splitlines()
    assert lines[0].startswith("as it is: 1 x 8 x 321 tokens, naive") and lines[1].startswith("scanned: 4 x 2 x 321 tokens, naive")
    assert re.fullmatch(r"as it is: log-probs \d\.\d{3} s \(1\.00\), update \d\.\d{3} s \(1\.00\)", lines[2])
    for line, name in zip(lines[4:6], ("log-probs", "update"), strict=True):
        total_s, *parts = map(float, re.findall(r" (\d+\.\d+)", line))
        assert line.startswith(f"as it is, seconds of {name} per device: ")
        assert 0.8 * total_s < sum(parts) <= total_s + 0.01 and parts == sorted(parts, reverse=True)


@pytest.mark.parametrize(("field", "value"), [("model.path", "m"), ("data.source", "jsonl:q.jsonl"), ("runs_dir", "r")])
def test_fields_that_the_benchmark_fills_in_itself_are_refused(field: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{field} = '{value}': the benchmark makes its own; leave the field out"):
        step.prepare(tmp_path, [f"--config.{field}={value}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("step.py", ["--config.runs_dir=r"], "error: runs_dir = 'r': "),
        ("generation.py", ["--config.rollout.slots=0"], "error: rollout.slots = 0: "),
        ("generation.py", ["--batch", "12"], "generation.py: error: --batch 12: must be a multiple of 8"),
        ("checkpoints.py", ["--config=configs/quickstart.py", "--config.mesh.cpu_devices=-1"], "error: mesh.cpu_devices = -1: "),
    ],
)
def test_bad_input_is_one_line(script: str, arguments: list[str], said: str) -> None:
    command = [sys.executable, str(Path(step.__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=step.ROOT)
    assert done.returncode != 0 and done.stderr.splitlines()[-1].startswith(said) and "Traceback" not in done.stderr
