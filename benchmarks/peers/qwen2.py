"""The workload's model and tokenizer for peers on torch."""

from pathlib import Path

import torch
import transformers

from benchmarks.workload import PAD_ID, STOP_ID, WORK, write_tokenizer


def load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """The workload's tokenizer, written into `folder` and read by transformers."""
    write_tokenizer(folder)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")


def new_model(dtype: str = "float32") -> transformers.Qwen2ForCausalLM:
    """A random model of the workload's shape. Its stop id can be drawn, but not before `min_new_tokens`."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**WORK["model"], pad_token_id=PAD_ID, eos_token_id=STOP_ID, bos_token_id=None)
    return transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval()


def save_model(folder: Path, dtype: str) -> None:
    """Model and tokenizer as one Hugging Face folder."""
    new_model(dtype).save_pretrained(folder)
    load_tokenizer(folder)
