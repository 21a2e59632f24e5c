"""Train, validation and held-out prompts, proven disjoint before anything runs.

Train feeds the updates; validation feeds gates, weights and the periodic series; held-out is looked at before and after only.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from ml_collections import ConfigDict

from jaxprorl.data import jsonl
from jaxprorl.data.prompts import Item, build_prompt, question_hash
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import DataError
from jaxprorl.types import Prompt

SPLITS = jsonl.SPLITS
DRAW_FACTOR = 4  # items drawn at most, as a multiple of the distinct questions wanted: small tasks repeat themselves


@dataclass(frozen=True)
class Items:
    """The questions of each split before rendering.

    `counts` says per split what became of the items drawn: {"kept", "duplicates", "in_other_split"}.
    """

    train: tuple[Item, ...]
    validation: tuple[Item, ...]
    held_out: tuple[Item, ...]
    counts: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Splits:
    """The prompts of each split, grouped by task in a fixed order; `counts` as in `Items`."""

    train: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def load_items(config: ConfigDict) -> Items:
    """The questions that `config.data` names, without duplicates.

    Of a reasoning-gym task every split gets `*_per_task` distinct questions, or fewer if DRAW_FACTOR times as many draws hold no
    more. Questions of the held-out split are kept out of the others, those of validation out of train.

    Raises:
        DataError: names the field (or file and line), the value and the remedy.
    """
    source = config.data.source
    if source == "reasoning_gym":
        drawn = _reasoning_gym(config)
    elif source.startswith("jsonl:"):
        drawn = _jsonl(source.removeprefix("jsonl:"))
    else:
        raise DataError(f"data.source = {source!r}: use 'reasoning_gym' or 'jsonl:PATH'")
    items, counts = drawn
    check_disjoint({name: [item.question for item in items[name]] for name in SPLITS})
    return Items(**{name: tuple(items[name]) for name in SPLITS}, counts=counts)


def load_splits(config: ConfigDict, tokenizer: Tokenizer, items: Items | None = None) -> Splits:
    """Renders the questions of `load_items` (or of `items`, to save drawing them again).

    Raises:
        DataError: see `load_items`; or a prompt is longer than `rollout.max_prompt_tokens`.
    """
    items = load_items(config) if items is None else items
    limit = config.rollout.max_prompt_tokens
    taken: set[int] = set()
    prompts: dict[str, tuple[Prompt, ...]] = {}
    for name in reversed(SPLITS):  # held-out first: its ids do not depend on how much is trained on
        rendered = []
        for item in getattr(items, name):
            prompt = build_prompt(tokenizer, item, _prompt_id(item, taken), config.data.system_prompt)
            if len(prompt.token_ids) > limit:
                raise DataError(
                    f"{item.place}: the prompt has {len(prompt.token_ids)} tokens, rollout.max_prompt_tokens = {limit}; "
                    "raise the field or leave out the item"
                )
            rendered.append(prompt)
        prompts[name] = tuple(rendered)
    return Splits(**prompts, counts=items.counts)


def check_disjoint(questions: Mapping[str, Iterable[str]]) -> None:
    """Compares the normalised question hashes of every pair of splits.

    Raises:
        DataError: some splits share questions; says how many and shows one.
    """
    hashes = {name: {question_hash(text): text for text in texts} for name, texts in questions.items()}
    names = list(hashes)
    for position, first in enumerate(names):
        for second in names[position + 1 :]:
            shared = sorted(hashes[first].keys() & hashes[second].keys())
            if shared:
                raise DataError(
                    f"the splits {first} and {second} share {len(shared)} questions, e.g. {hashes[first][shared[0]][:200]!r}; "
                    "what is trained on must not be measured on: remove them from one of the two"
                )


def fingerprint(splits: Splits) -> str:
    """Hex sha256 of everything that matters in the prompts: ids, tokens, answers, items and their order."""
    digest = hashlib.sha256()
    for name in SPLITS:
        digest.update(f"{name} {len(getattr(splits, name))}\n".encode())
        for prompt in getattr(splits, name):
            row = [prompt.prompt_id, prompt.domain, prompt.task, prompt.answer, prompt.token_ids.tolist(), prompt.item]
            digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


Drawn = tuple[dict[str, list[Item]], dict[str, dict[str, int]]]


def _reasoning_gym(config: ConfigDict) -> Drawn:
    from jaxprorl.data import reasoning_gym

    data = config.data
    tasks = data.tasks.to_dict()
    if not tasks:
        raise DataError("data.tasks is empty: name reasoning-gym tasks with their arguments, e.g. data.tasks.chain_sum = {}")
    wanted = {name: data[f"{name}_per_task"] for name in SPLITS}
    seeds = {name: data[f"{name}_seed"] for name in SPLITS}
    _check_ranges(seeds, wanted)
    items: dict[str, list[Item]] = {name: [] for name in SPLITS}
    counts = {name: {"kept": 0, "duplicates": 0, "in_other_split": 0} for name in SPLITS}
    for task in sorted(tasks):
        elsewhere: set[str] = set()
        for name in reversed(SPLITS):
            stream = islice(reasoning_gym.items(task, tasks[task], seeds[name]), wanted[name] * DRAW_FACTOR)
            kept, hashes = _distinct(stream, wanted[name], elsewhere, counts[name])
            if not kept:
                raise DataError(
                    f"data.tasks.{task}: no question is left for the {name} split: the task makes too few different ones; "
                    f"widen its arguments or lower data.validation_per_task and data.held_out_per_task"
                )
            items[name] += kept
            elsewhere |= hashes
    return items, counts


def _jsonl(path: str) -> Drawn:
    assigned = jsonl.assign(jsonl.read(path), path)
    items, counts = {}, {}
    for name in SPLITS:
        counts[name] = {"kept": 0, "duplicates": 0, "in_other_split": 0}
        kept, _ = _distinct(iter(assigned[name]), len(assigned[name]), set(), counts[name])
        items[name] = sorted(kept, key=lambda item: item.task)  # stable: the file's order within a task
    return items, counts


def _distinct(stream: Iterator[Item], wanted: int, elsewhere: set[str], counts: dict[str, int]) -> tuple[list[Item], set[str]]:
    """The first `wanted` items with a new question that is not `elsewhere`; what is passed over is added to `counts`."""
    kept: list[Item] = []
    hashes: set[str] = set()
    for item in stream:
        digest = question_hash(item.question)
        if digest in elsewhere:
            counts["in_other_split"] += 1
        elif digest in hashes:
            counts["duplicates"] += 1
        else:
            kept.append(item)
            hashes.add(digest)
            if len(kept) == wanted:
                break
    counts["kept"] += len(kept)
    return kept, hashes


def _check_ranges(seeds: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    for name in SPLITS:
        if wanted[name] < 1:
            raise DataError(f"data.{name}_per_task = {wanted[name]}: must be at least 1")
        if seeds[name] < 0:
            raise DataError(f"data.{name}_seed = {seeds[name]}: must not be negative")
    ordered = sorted(SPLITS, key=lambda name: seeds[name])
    for lower, upper in pairwise(ordered):
        reach = wanted[lower] * DRAW_FACTOR
        if seeds[upper] - seeds[lower] <= reach:
            raise DataError(
                f"data.{lower}_seed = {seeds[lower]} and data.{upper}_seed = {seeds[upper]} are too close: item i uses seed + i, and up to "
                f"{reach} items are drawn ({DRAW_FACTOR} x data.{lower}_per_task); set data.{upper}_seed above {seeds[lower] + reach}"
            )


def _prompt_id(item: Item, taken: set[int]) -> int:
    """A number from the question itself, below 2^31 so that random generators can fold it in; on a clash the next hash decides."""
    key: list[Any] = [item.domain, item.task, question_hash(item.question)]
    for attempt in range(len(taken) + 1000):
        digest = hashlib.sha256(json.dumps([*key, attempt]).encode()).digest()
        prompt_id = int.from_bytes(digest[:4], "big") >> 1
        if prompt_id not in taken:
            taken.add(prompt_id)
            return prompt_id
    raise DataError(f"{item.place}: no free prompt id")
