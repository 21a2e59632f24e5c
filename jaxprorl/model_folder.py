"""A model folder as a whole: config, tensors, tokenizer and chat template, each checked and against one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxprorl.data.prompts import check_chat_template, render
from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer
from jaxprorl.errors import ModelError
from jaxprorl.models import hf
from jaxprorl.models.qwen2 import Qwen2Config

QUESTION = "How many are 2 and 3?"


@dataclass(frozen=True)
class ModelFolder:
    """What a checked folder holds.

    Attributes:
        scalars: dtype of tensors -> number of values.
        prompt_ids: a short question, rendered by the chat template.
    """

    config: Qwen2Config
    scalars: Mapping[str, int]
    tokenizer: Tokenizer
    prompt_ids: list[int]


def check_folder(path: Path) -> ModelFolder:
    """Checks all that training would need of the folder, every value of every tensor included; cheap things first.

    Raises:
        ModelError: config.json, the tensors, or tokenizer and model together cannot be used.
        DataError: the tokenizer, its stop tokens or the chat template cannot be used.
    """
    config = hf.read_config(path)
    tokenizer = load_tokenizer(path)
    check_vocabulary(config, tokenizer)
    check_chat_template(tokenizer)
    prompt_ids = render(tokenizer, [{"role": "user", "content": QUESTION}])
    return ModelFolder(config, hf.check_tensors(path, config), tokenizer, prompt_ids)


def doubtful_stops(tokenizer: Tokenizer) -> list[str]:
    """Stop ids that are ordinary text, one line each: an answer ends wherever the model writes it."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return [
        f"{tokenizer.path}: stop id {stop} is {tokenizer.decode([stop])!r}, a token of ordinary text; every answer ends at the first one. "
        "If that is not meant, name the end of a turn as eos_token_id in generation_config.json"
        for stop in tokenizer.stop_ids
        if stop not in added
    ]


def check_vocabulary(config: Qwen2Config, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer with more tokens than the embedding has rows: JAX would clamp the indices and say nothing."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{tokenizer.path}: tokenizer.json has {tokenizer.vocab_size} tokens, config.json vocab_size = {config.vocab_size}; "
            "they do not belong together"
        )
