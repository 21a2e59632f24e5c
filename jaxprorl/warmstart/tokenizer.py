"""The tokenizer of the warm-start model, made from the train questions: bytes, Qwen's special tokens, whole fixed phrases.

A byte-level BPE without merges, so digits and letters of the payload stay one token each. What the questions of a task have in
common ("Spell this word backward (example: sun -> nus): ") and the chat template's headers are added tokens: prompts are short,
and the model need not learn to read English.

Nothing normalises the text: decode(encode(x)) == x for any x. (transformers 5 loads every folder whose model is a Qwen2 with an NFC
normaliser of its own, so there text that is not NFC gets the ids of its NFC form.)
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxprorl.data.prompts import Item
from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer

PAD_TOKEN = "<|endoftext|>"
END_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, "<|im_start|>", END_TOKEN)
TAG_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")  # not special, so that decoders show them
TEMPLATE_PHRASES = (
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)

PHRASE_SHARE = 0.1  # a phrase is fixed text if this share of a task's items holds it ...
ANSWER_WORD_SHARE = 0.01  # ... and none of its words is the answer of this share (multiple choice letters, yes, no)
PHRASES_PER_TASK = 24
SAMPLED_ITEMS = 400  # of each task, the first ones
VOCABULARY_MULTIPLE = 64  # sizes that matrix units like

_PIECE = re.compile(r"[^\W\d_]+|.", re.DOTALL)  # a word, or any one other character
_DIGITS = re.compile(r"\d+")


def build_tokenizer(items: Iterable[Item], folder: Path, system_prompt: str = "") -> Tokenizer:
    """Writes the tokenizer's part of a Hugging Face folder from train items and loads it back.

    The files depend on the arguments alone, byte for byte.
    """
    backend = _backend(find_phrases(items, system_prompt))
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END_TOKEN, "pad_token": PAD_TOKEN, "additional_special_tokens": list(SPECIAL_TOKENS)}
    stop_ids = [backend.token_to_id(END_TOKEN), backend.token_to_id(PAD_TOKEN)]
    config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,  # the model's config is what limits the context
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": stop_ids, "pad_token_id": stop_ids[1]})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return load_tokenizer(folder)


def find_phrases(items: Iterable[Item], system_prompt: str = "") -> tuple[str, ...]:
    """The fixed phrases of the questions and reference answers of each task, and of the system prompt; sorted, no duplicates."""
    by_task: dict[str, list[Item]] = {}
    for item in items:
        sample = by_task.setdefault(item.task, [])
        if len(sample) < SAMPLED_ITEMS:
            sample.append(item)
    phrases = {text for text in _DIGITS.split(system_prompt) if len(text) > 1}
    for sample in by_task.values():
        answers = [item.answer for item in sample]
        payload = _answer_words(answers)
        phrases.update(common_phrases([item.question for item in sample], payload))
        phrases.update(common_phrases(answers, payload))
    return tuple(sorted(phrases))


def common_phrases(texts: Sequence[str], payload: frozenset[str] = frozenset()) -> list[str]:
    """Greedily the longest phrase that a share of the texts holds, then the longest in what is left of them, and so on.

    A phrase consists of whole words and other characters, at least one of them neither letter nor digit (or it would match inside
    other words), and holds no digit and no word of `payload`.
    """
    needed = max(2, round(PHRASE_SHARE * len(texts)))
    # Runs of pieces without digits or payload -> how many texts hold each. Fixed text makes few different runs.
    runs = Counter(run for text in texts for run in set(_runs(text, payload)))
    found: list[str] = []
    while len(found) < PHRASES_PER_TASK:
        held: Counter[tuple[str, ...]] = Counter()
        for run, texts_with_it in runs.items():
            spans = {run[i:j] for i in range(len(run)) for j in range(i + 1, len(run) + 1)}
            held.update(dict.fromkeys(spans, texts_with_it))
        usable = ["".join(span) for span, n in held.items() if n >= needed and any(not piece.isalpha() for piece in span)]
        usable = [text for text in usable if len(text) > 1]
        if not usable:
            break
        best = min(usable, key=lambda text: (-len(text), text))
        found.append(best)
        left: Counter[tuple[str, ...]] = Counter()
        pieces = tuple(_PIECE.findall(best))
        for run, texts_with_it in runs.items():
            for part in _split(run, pieces):
                left[part] += texts_with_it
        runs = left
    return found


def _runs(text: str, payload: frozenset[str]) -> list[tuple[str, ...]]:
    runs: list[list[str]] = [[]]
    for piece in _PIECE.findall(text):
        if piece.isdecimal() or piece.isnumeric() or piece in payload:
            runs.append([])
        else:
            runs[-1].append(piece)
    return [tuple(run) for run in runs if run]


def _split(run: tuple[str, ...], phrase: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What is left of `run` around the occurrences of `phrase`."""
    parts, start, position = [], 0, 0
    while position + len(phrase) <= len(run):
        if run[position : position + len(phrase)] == phrase:
            parts.append(run[start:position])
            start = position = position + len(phrase)
        else:
            position += 1
    parts.append(run[start:])
    return [part for part in parts if part]


def _answer_words(answers: Sequence[str]) -> frozenset[str]:
    words = Counter(word for answer in answers for word in set(_PIECE.findall(answer)) if word.isalpha())
    return frozenset(word for word, n in words.items() if n >= max(2, ANSWER_WORD_SHARE * len(answers)))


def _backend(phrases: Sequence[str]) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_added(text, special=True) for text in SPECIAL_TOKENS])
    backend.add_tokens([_added(text, special=False) for text in TAG_TOKENS])
    backend.add_special_tokens([_added(text, special=True) for text in TEMPLATE_PHRASES])
    for phrase in phrases:
        trial = tokenizers.Tokenizer.from_str(backend.to_str())
        trial.add_tokens([_added(phrase, special=False)])
        # The byte decoder misreads added tokens such as "é": what would not come back as it went in stays bytes.
        if trial.decode(trial.encode(phrase).ids) == phrase:
            backend = trial
    # Names for the rows that fill up the vocabulary, so that every id the model can draw is known to every decoder.
    missing = -backend.get_vocab_size() % VOCABULARY_MULTIPLE
    backend.add_special_tokens([_added(f"<|unused_{i}|>", special=True) for i in range(missing)])
    return backend


def _added(text: str, special: bool) -> AddedToken:
    return AddedToken(text, normalized=False, special=special)


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
