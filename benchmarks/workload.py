"""The work that every system of the comparison gets, from workload.json. Imports neither JAX nor torch: peers have their own environments.

One step: sample `prompts` x `samples_per_prompt` answers of exactly `response_tokens` tokens, score them, take the reference's
log-probs, make one optimizer update.
"""

import json
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

WORK: dict[str, Any] = json.loads((Path(__file__).parent / "workload.json").read_text())
PAD, STOP = "<|pad|>", "<|stop|>"
PAD_ID, STOP_ID = 256, 257
NEEDS_ANSWER = False  # as a reward, it looks at the completion alone
STEP_TOKENS = WORK["prompts"] * WORK["samples_per_prompt"] * WORK["response_tokens"]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of one token per byte, ids 0 to 255, in Hugging Face form; a prompt is rendered as it stands."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, STOP])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": STOP, "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


def prompts(count: int = WORK["prompts"]) -> list[str]:
    """Different texts of exactly `prompt_tokens` bytes."""
    return [f"{number:04d} times {number + 7} is?".ljust(WORK["prompt_tokens"], ".") for number in range(count)]


def score(completion_text: str, prompt: Any) -> float:
    """A cheap reward in [0, 1] that differs between samples: the share of characters that did not occur before."""
    return len(set(completion_text)) / max(1, len(completion_text))


def require(name: str, found: Any, wanted: Any) -> None:
    """Ends the process unless a system does the work that it was given."""
    if found != wanted:
        raise SystemExit(f"not the workload: {name} {found}, {wanted} wanted")


def report_generation(system: str, dtype: str, batch: int, seconds: Sequence[float], distributions: Sequence[str], **more: Any) -> None:
    """The same for sampling alone, `batch` completions at a time. `seconds`: of repetitions after warm-up."""
    median_s = statistics.median(seconds)
    versions = {"python": platform.python_version()} | {name: version(name) for name in distributions}
    result = {
        "system": system, "dtype": dtype, "batch": batch, "generation_s": round(median_s, 3),
        "generations_s": [round(s, 3) for s in seconds],
        "completion_tokens_per_s": round(batch * WORK["response_tokens"] / median_s, 1), **more, "versions": versions,
    }  # fmt: skip
    print(json.dumps(result), flush=True)


def report(system: str, dtype: str, tokens: int, step_s: Sequence[float], distributions: Sequence[str], **more: Any) -> None:
    """Prints the result as one line of JSON. `tokens`: completion tokens of a step. `step_s`: seconds of the steps after warm-up."""
    median_s = statistics.median(step_s)
    versions = {"python": platform.python_version()} | {name: version(name) for name in distributions}
    result = {
        "system": system, "dtype": dtype, "step_s": round(median_s, 3), "steps_s": [round(s, 3) for s in step_s],
        "completion_tokens_per_s": round(tokens / median_s, 1), **more, "versions": versions,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
