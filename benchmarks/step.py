"""The whole training step on the comparison's workload, through the engine, graders, batch and update that `train` uses.

.venv/bin/python benchmarks/step.py [--config.model.dtype=bfloat16 --config.FIELD=VALUE ...]

The loop runs twice: as it is, for the seconds of whole steps, and with log-probs and update waited for, for the seconds of the phases.
Prints one line of JSON with medians. The same file is the config (`get_config`), so that every field can be overridden.
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
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import jax
import numpy as np
from ml_collections import ConfigDict
from workload import COMPLETION_TOKENS, WORK, prompts, report, write_tokenizer

from configs import base
from jaxprorl import config as config_module
from jaxprorl.compilation import no_compilation
from jaxprorl.data.tokenizer import load_tokenizer
from jaxprorl.evaluation.summary import peak_memory_bytes
from jaxprorl.models import hf
from jaxprorl.models.qwen2 import Qwen2Config, declarations
from jaxprorl.monitoring import jsonl
from jaxprorl.preemption import Preemption
from jaxprorl.run_folder import open_run
from jaxprorl.start import Training, start
from jaxprorl.train import loop

SHAPE = Qwen2Config(head_dim=WORK["model"]["hidden_size"] // WORK["model"]["num_attention_heads"], **WORK["model"])


def get_config() -> ConfigDict:
    """base.py with the workload's sizes; model, questions and folders are filled in by `main`."""
    c = base.get_config()
    c.run_name = "step"
    c.steps = WORK["warmup_steps"] + WORK["steps"]  # of each of the two loops
    c.reward = c.evaluation.reward = "workload:score"
    c.filtering.rule = "off"
    c.batch.prompts = c.batch.refill_prompts = WORK["prompts"]
    c.batch.updates = 1
    c.batch.row_tokens = WORK["prompt_tokens"] + WORK["response_tokens"]
    c.batch.micro_batch_rows = 16
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


def write_model(folder: Path) -> None:
    """A random model of the workload's shape as a Hugging Face folder."""
    write_tokenizer(folder / "tokenizer")
    tokenizer, random = load_tokenizer(folder / "tokenizer"), np.random.RandomState(0)
    scale = {"normal": 0.02, "zeros": 0.0, "ones": 0.0}
    params = {
        name: (scale[d.init] * random.standard_normal(d.shape) + (d.init == "ones")).astype(np.float32)
        for name, d in declarations(SHAPE).items()
    }
    hf.write_folder(folder / "model", SHAPE, params, folder / "tokenizer", tokenizer.stop_ids, tokenizer.pad_id)


def write_questions(file: Path) -> None:
    """The workload's prompts for training, and one more for each of the other splits, which a run must have."""
    *train, validation, held_out = prompts(WORK["prompts"] + 2)
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
    config, warm, steps = training.config, WORK["warmup_steps"], training.config.steps
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
        if (row["tokens.completion"], row["tokens.trained"], row["updates"]) != (COMPLETION_TOKENS, COMPLETION_TOKENS, 1):
            raise SystemExit(f"step {row['step']}: not the workload, {COMPLETION_TOKENS} tokens sampled and trained in one update: {row}")
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


def main(argv: list[str]) -> None:
    """Makes model and questions in a temporary folder, runs, prints."""
    os.chdir(ROOT / "benchmarks")  # where grader processes find the reward
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_model(place)
        write_questions(place / "questions.jsonl")
        config = config_module.load(
            [
                f"--config={__file__}", f"--config.runs_dir={place / 'runs'}", f"--config.cache_dir={ROOT / '.cache'}",
                f"--config.model.path={place / 'model'}", f"--config.data.source=jsonl:{place / 'questions.jsonl'}", *argv,
            ]
        )  # fmt: skip
        config_module.validate(config)
        with Preemption(config.checkpoint.save_within_s) as preemption, ExitStack() as stack:
            training = start(config, open_run(config, stack), stack)
            steps_s, phases_s = measure(training, preemption)
            training.checkpoints.wait()
            report(
                "jaxprorl", config.model.dtype, steps_s, ("jax", "jaxlib"), phases_s=phases_s, peak_memory_bytes=peak_memory_bytes(),
                attention=training.compute.attention, micro_batch_rows=config.batch.micro_batch_rows, devices=len(jax.devices()),
            )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
