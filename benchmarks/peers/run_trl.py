"""TRL's GRPOTrainer with transformers' generate on the workload. Its own environment: requirements-trl.txt, Python 3.11.

python benchmarks/peers/run_trl.py [--dtype bfloat16]     (bfloat16: autocast, float32 parameters, which is TRL's way)
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trl
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2ForCausalLM, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.peers.measuring import peak_memory_bytes, timed
from benchmarks.peers.qwen2 import save_model
from benchmarks.workload import STEP_TOKENS, WORK, prompts, report, require, score

ROWS = WORK["prompts"] * WORK["samples_per_prompt"]
STEPS = WORK["warmup_steps"] + WORK["steps"] + 1


class StepEnds(TrainerCallback):
    """The clock at the end of every step."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Called by the trainer."""
        self.ends_s.append(time.perf_counter())


def settings(folder: str, dtype: str) -> trl.GRPOConfig:
    """The workload in TRL's words: one optimizer step per batch of completions, constant rate, no checkpoints."""
    return trl.GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=dtype == "bfloat16", gradient_checkpointing=False,
        per_device_train_batch_size=ROWS, num_generations=WORK["samples_per_prompt"],
        steps_per_generation=1, max_steps=STEPS, max_completion_length=WORK["response_tokens"],
        generation_kwargs={"min_new_tokens": WORK["response_tokens"]}, temperature=WORK["temperature"], top_k=0,
        loss_type="dapo", beta=WORK["kl_coefficient"], epsilon=WORK["clip_low"], epsilon_high=WORK["clip_high"],
        learning_rate=WORK["learning_rate"], lr_scheduler_type="constant", save_strategy="no", report_to=[], logging_steps=1000,
        disable_tqdm=True,
    )  # fmt: skip


class Trainer(trl.GRPOTrainer):
    """Looks at every batch that is trained on."""

    losses = 0

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        """Called by the trainer, once per update."""
        mask = inputs["completion_mask"]
        require("batch", (tuple(mask.shape), int(mask.sum())), ((ROWS, WORK["response_tokens"]), STEP_TOKENS))
        require("prompt tokens", (inputs["prompt_mask"].shape[1], int(inputs["prompt_mask"].min())), (WORK["prompt_tokens"], 1))
        require("reference's log-probs", tuple(inputs["ref_per_token_logps"].shape), tuple(mask.shape))
        self.losses += 1
        return super().compute_loss(model, inputs, **more)


def rewards(completions: list[str], **_: Any) -> list[float]:
    """The workload's reward, for each text of the batch."""
    return [score(text, None) for text in completions]


def main() -> None:
    """Trains, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    dtype = parser.parse_args().dtype
    clock = StepEnds()
    generation_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), "float32")
        # From a folder: the trainer reads its reference where the policy says that it comes from.
        model, tokenizer = Qwen2ForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        trainer = Trainer(
            model=model, reward_funcs=rewards, args=settings(folder, dtype), processing_class=tokenizer, callbacks=[clock],
            train_dataset=Dataset.from_dict({"prompt": prompts()}),
        )  # fmt: skip
        trainer.model.generate = timed(trainer.model.generate, generation_s)
        trainer.train()
        require("updates, batches, generations", (trainer.state.global_step, trainer.losses, len(generation_s)), (STEPS, STEPS, STEPS))
    step_s = [end - start for start, end in itertools.pairwise(clock.ends_s)][-WORK["steps"] :]
    report(
        "trl", dtype, STEP_TOKENS, step_s, ("trl", "transformers", "torch"), peak_memory_bytes=peak_memory_bytes(),
        phases_s={"generation": round(sorted(generation_s[-WORK["steps"] :])[WORK["steps"] // 2], 3)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
