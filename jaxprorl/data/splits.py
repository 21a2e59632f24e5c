"""Train, validation and held-out prompts, proven disjoint before anything runs.

Train feeds the updates; validation feeds gates, weights and the periodic series; held-out is looked at before and after only.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise

from ml_collections import ConfigDict

from jaxprorl.data import jsonl
from jaxprorl.data.duplicates import SHOWN, Finding, check_disjoint, distinct_rows, prompt_ids
from jaxprorl.data.prompts import Item, build_prompt, question_hash
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import DataError
from jaxprorl.rewards.registry import needs_answer
from jaxprorl.types import Prompt

SPLITS = jsonl.SPLITS
DRAW_FACTOR = 4  # items drawn at most, as a multiple of the distinct questions wanted: small tasks repeat themselves


@dataclass(frozen=True)
class Items:
    """The questions of each split before rendering.

    `counts` says per split what became of the items drawn: {"kept", "duplicates", "in_other_split"}. `findings` are of rows that a user
    wrote: what was left out, and what looks alike.
    """

    train: tuple[Item, ...]
    validation: tuple[Item, ...]
    held_out: tuple[Item, ...]
    counts: Mapping[str, Mapping[str, int]]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Splits:
    """The prompts of each split, grouped by task in a fixed order; `counts` as in `Items`, `findings` of long prompts too."""

    train: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


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
        drawn = _jsonl(config, source.removeprefix("jsonl:"))
    else:
        raise DataError(f"data.source = {source!r}: use 'reasoning_gym' or 'jsonl:PATH'")
    items, counts, findings = drawn
    findings += check_disjoint(items)
    return Items(**{name: tuple(items[name]) for name in SPLITS}, counts=counts, findings=tuple(findings))


def load_splits(config: ConfigDict, tokenizer: Tokenizer, items: Items | None = None) -> Splits:
    """Renders the questions of `load_items` (or of `items`, to save drawing them again).

    Raises:
        DataError: see `load_items`; or prompts are longer than `rollout.max_prompt_tokens` and `data.overlong_prompts` is "error", or none
            is left without them.
    """
    items = load_items(config) if items is None else items
    limit, data = config.rollout.max_prompt_tokens, config.data
    by_split = {name: getattr(items, name) for name in reversed(SPLITS)}  # held-out first: its ids do not depend on what is trained on
    ids = prompt_ids(by_split)
    prompts: dict[str, tuple[Prompt, ...]] = {}
    overlong: list[Finding] = []
    for name in by_split:
        rendered = []
        for item, prompt_id in zip(by_split[name], ids[name], strict=True):
            prompt = build_prompt(tokenizer, item, prompt_id, data.system_prompt, data.control_tokens_in_text)
            if len(prompt.token_ids) > limit:
                overlong.append(Finding("overlong", item.place, detail=f"{len(prompt.token_ids)} tokens"))
            else:
                rendered.append(prompt)
        prompts[name] = tuple(rendered)
    if overlong and data.overlong_prompts == "error":
        first, *others = overlong
        also = ", ".join(f"{finding.place} has {finding.detail}" for finding in others[: SHOWN - 1])
        more = f" ({len(others)} more are longer: {also}{', ...' * (len(others) >= SHOWN)})" if others else ""
        raise DataError(
            f"{first.place}: the prompt has {first.detail}, rollout.max_prompt_tokens = {limit}{more}; "
            "raise the field, or set data.overlong_prompts = 'drop' to leave such prompts out"
        )
    emptied = next(_emptied(by_split, prompts, data.source), None)
    if emptied:
        raise DataError(f"rollout.max_prompt_tokens = {limit}: all prompts of {emptied} are longer; raise it")
    return Splits(**prompts, counts=items.counts, findings=items.findings + tuple(overlong))


def _emptied(items: Mapping[str, tuple[Item, ...]], prompts: Mapping[str, tuple[Prompt, ...]], source: str) -> Iterator[str]:
    """What has lost all its prompts: splits, and tasks that the config names (those of a file may go)."""
    for name in items:
        if items[name] and not prompts[name]:
            yield f"the {name} split"
        elif source == "reasoning_gym":
            for task in sorted({item.task for item in items[name]} - {prompt.task for prompt in prompts[name]}):
                yield f"data.tasks.{task} in the {name} split"


def fingerprint(splits: Splits) -> str:
    """Hex sha256 of everything that matters in the prompts: ids, tokens, answers, items and their order."""
    digest = hashlib.sha256()
    for name in SPLITS:
        digest.update(f"{name} {len(getattr(splits, name))}\n".encode())
        for prompt in getattr(splits, name):
            row = [prompt.prompt_id, prompt.domain, prompt.task, prompt.answer, prompt.token_ids.tolist(), prompt.item]
            digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


Drawn = tuple[dict[str, list[Item]], dict[str, dict[str, int]], list[Finding]]


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
    return items, counts, []


def _jsonl(config: ConfigDict, path: str) -> Drawn:
    lines = jsonl.read(path)
    for reward in dict.fromkeys((config.reward, config.evaluation.reward or config.reward)):
        jsonl.check_answers(lines, path, needs_answer(reward), reward)
    assigned = jsonl.assign(lines, path)
    items, counts, findings = {}, {}, list[Finding]()
    for name in SPLITS:
        kept, left_out = distinct_rows(assigned[name], config.data.on_conflicting_answers)
        counts[name] = {"kept": len(kept), "duplicates": len(left_out), "in_other_split": 0}
        items[name] = sorted(kept, key=lambda item: item.task)  # stable: the file's order within a task
        findings += left_out
    return items, counts, findings


def _distinct(stream: Iterator[Item], wanted: int, elsewhere: set[str], counts: dict[str, int]) -> tuple[list[Item], set[str]]:
    """The first `wanted` items with a new question that is not `elsewhere`; what is passed over is added to `counts`.

    A generator makes others, so what only looks like a question that is there (`Lota`, `lota`) is passed over too.
    """
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
