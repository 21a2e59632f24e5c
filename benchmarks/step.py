"""The whole training step on the comparison's workload, through the engine, graders, batch and update that `train` uses.

.venv/bin/python benchmarks/step.py [--config.model.dtype=bfloat16 --config.FIELD=VALUE ...]

The loop runs twice: as it is, for the seconds of whole steps, and with log-probs and update waited for, for the seconds of the phases.
Prints one line of JSON with medians. The same file is the config (`get_config`), so that every field can be overridden; the line names
those that were, in `overrides`, because it is then not the comparison's workload any more (benchmarks/run.py refuses it).
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from benchmarks.workload import PAD_ID, STOP_ID, WORK, prompts, report, write_tokenizer
from configs import base
from jaxprorl import config as config_module
from jaxprorl.compilation import no_compilation
from jaxprorl.errors import UserError
from jaxprorl.evaluation.summary import peak_memory_bytes
from jaxprorl.fields import field_value
from jaxprorl.models.hf import hf_keys
from jaxprorl.models.hf.config import config_json
from jaxprorl.models.qwen2 import Qwen2Config, declarations
from jaxprorl.monitoring import jsonl
from jaxprorl.preemption import Preemption
from jaxprorl.run_folder import open_run
from jaxprorl.schema import EXPERIMENT, Schema
from jaxprorl.start import Training, start
from jaxprorl.train import loop

MADE = ("model.path", "data.source", "runs_dir")  # fields that the benchmark fills in


def get_config() -> ConfigDict:
    """base.py with the workload's sizes; model, questions and folders are filled in by `main`."""
    c = base.get_config()
    c.run_name = "step"
    c.workload = ConfigDict()
    c.workload.model = ConfigDict(WORK["model"])
    c.workload.warmup_steps = WORK["warmup_steps"]  # of each of the two loops, counted in `steps`
    c.steps = WORK["warmup_steps"] + WORK["steps"]  # of each of the two loops
    c.reward = c.evaluation.reward = "benchmarks.workload:score"
    c.filtering.rule = "off"
    c.batch.prompts = c.batch.refill_prompts = WORK["prompts"]
    c.batch.updates = 1
    c.batch.micro_batch_rows = c.mesh.cpu_devices = 0  # by rule
    c.batch.row_tokens = WORK["prompt_tokens"] - 1 + 2 * (1 + WORK["response_tokens"])  # a prompt and two of its samples
    c.rollout.samples_per_prompt = WORK["samples_per_prompt"]
    c.rollout.max_prompt_tokens = WORK["prompt_tokens"]
    c.rollout.min_response_tokens = c.rollout.max_response_tokens = WORK["response_tokens"]
    c.rollout.slots = WORK["prompts"] * WORK["samples_per_prompt"]
    c.rollout.decode_chunk_tokens = 32
    c.rollout.temperature = WORK["temperature"]
    c.algorithm.kl_coefficient = WORK["kl_coefficient"]
    c.algorithm.clip_low, c.algorithm.clip_high = WORK["clip_low"], WORK["clip_high"]
    c.optimizer.learning_rate = WORK["learning_rate"]
    c.validation.every_steps = 0
    c.checkpoint.every_steps = 1000
    c.monitoring.progress = False
    return c


SCHEMA = Schema("benchmark", "benchmarks/step.py and configs/base.py", get_config, EXPERIMENT.open)


def model_shape(config: ConfigDict) -> Qwen2Config:
    """The workload's model, its heads as wide as they share the hidden size, with room for the rows."""
    model = config.workload.model
    longest = max(model.max_position_embeddings, config.batch.row_tokens)
    shape = model.to_dict() | {"max_position_embeddings": longest, "head_dim": model.hidden_size // model.num_attention_heads}
    return Qwen2Config(**shape)


def overrides(config: ConfigDict, default: ConfigDict) -> dict[str, Any]:
    """Fields that differ from the default config, but for those that the benchmark fills in and the dtype, which the result has anyway.

    `config` is as `prepare` returns it: what a rule is to choose is still 0.
    """
    found = config_module.differences(config.to_dict(), default.to_dict())
    return {name: value for name, value, _ in found if name not in (*MADE, "model.dtype")}


def check_warmup(config: ConfigDict) -> None:
    """UserError unless steps are left to measure after those of warm-up."""
    warm, steps = config.workload.warmup_steps, config.steps
    if not 0 <= warm < steps:
        raise UserError(f"workload.warmup_steps = {warm}: must be 0 or more and less than steps = {steps}, which counts both")


def step_tokens(config: ConfigDict) -> int:
    """Completion tokens of one step."""
    return int(config.batch.prompts * config.rollout.samples_per_prompt * config.rollout.max_response_tokens)


def write_model(folder: Path, shape: Qwen2Config) -> None:
    """A random model as a Hugging Face folder, written without JAX: its devices are chosen later."""
    write_tokenizer(folder)
    random = np.random.RandomState(0)
    tensors: dict[str, np.ndarray] = {}
    for declaration in declarations(shape).values():
        size = {"normal": 0.02, "zeros": 0.0, "ones": 0.0}[declaration.init]
        values = ((declaration.init == "ones") + size * random.standard_normal(declaration.shape)).astype(np.float32)
        parts = values if declaration.axes[0] == "layers" else values[None]
        for key, part in zip(hf_keys(declaration), parts, strict=True):
            tensors[key] = np.ascontiguousarray(part.T if declaration.transposed else part)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(shape, "float32", (STOP_ID,), PAD_ID, None)))


def write_questions(file: Path, count: int) -> None:
    """`count` prompts for training, and one more for each of the other splits, which a run must have."""
    *train, validation, held_out = prompts(count + 2)
    rows = [("train", text) for text in train] + [("validation", validation), ("held_out", held_out)]
    file.write_text("".join(json.dumps({"prompt": text, "answer": "", "split": split}) + "\n" for split, text in rows))


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, waiting for its results; how long that took is appended to `seconds`."""

    def call(*arguments: Any) -> Any:
        started_s = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - started_s)
        return result

    return call


def measure(training: Training, preemption: Preemption) -> tuple[list[float], dict[str, float]]:
    """Seconds of every whole step after warm-up, and medians of the phases."""
    config, warm, steps = training.config, training.config.workload.warmup_steps, training.config.steps
    tokens = step_tokens(config)
    log_probs_s: list[float] = []
    update_s: list[float] = []
    with no_compilation(), preemption.guarded():
        loop(training, preemption)
        compiled = training.setting.compiled
        compiled = dataclasses.replace(
            compiled, log_probs=timed(compiled.log_probs, log_probs_s), train_step=timed(compiled.train_step, update_s)
        )
        training.setting = dataclasses.replace(training.setting, compiled=compiled)
        with config.unlocked():
            config.steps = 2 * steps
        loop(training, preemption)
    rows = jsonl.read(training.folder.metrics)
    for row in rows:
        if (row["tokens.completion"], row["tokens.trained"], row["updates"]) != (tokens, tokens, 1):
            raise SystemExit(f"step {row['step']}: not the workload, {tokens} tokens sampled and trained in one update: {row}")
    whole_s = [row["time.step_s"] for row in rows[warm:steps]]
    waited = rows[steps + warm :]
    parts = {
        "generation": [row["time.rollout_s"] - row["time.grading_wait_s"] for row in waited],
        "grading_wait": [row["time.grading_wait_s"] for row in waited],
        "log_probs": log_probs_s[warm:],
        "update": update_s[warm:],
    }
    parts["rest"] = [row["time.step_s"] - sum(part[i] for part in parts.values()) for i, row in enumerate(waited)]
    return whole_s, {name: round(statistics.median(values), 3) for name, values in parts.items()}


def prepare(place: Path, argv: list[str]) -> ConfigDict:
    """Model and questions in the folder `place`, and the checked config of a run on them. Changes the current directory."""
    os.chdir(ROOT)  # where grader processes find the reward
    config, default = config_module.load([f"--config={__file__}", *argv], SCHEMA), get_config()
    for made in MADE:
        if (own := field_value(config, made)) != field_value(default, made):
            raise UserError(f"{made} = {own!r}: the benchmark makes its own; leave the field out")
    write_model(place / "model", model_shape(config))
    write_questions(place / "questions.jsonl", config.batch.prompts)
    config.runs_dir, config.model.path = str(place / "runs"), str(place / "model")
    config.data.source = f"jsonl:{place / 'questions.jsonl'}"
    config_module.validate(config, SCHEMA)
    return config


def main(argv: list[str]) -> None:
    """Makes model and questions in a temporary folder, runs, prints."""
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), argv)
        check_warmup(config)
        changed = overrides(config, get_config())
        with Preemption(config.checkpoint.save_within_s) as preemption, ExitStack() as stack:
            training = start(config, open_run(config, stack), stack)
            steps_s, phases_s = measure(training, preemption)
            training.checkpoints.wait()
            report(
                "jaxprorl", config.model.dtype, step_tokens(config), steps_s, ("jax", "jaxlib"), phases_s=phases_s,
                peak_memory_bytes=peak_memory_bytes(), attention=training.setting.compute.attention,
                micro_batch_rows=training.config.batch.micro_batch_rows, devices=len(jax.devices()), overrides=changed,
            )  # fmt: skip


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
