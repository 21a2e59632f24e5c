import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import base
from configs.quickstart import get_config
from jaxprorl.data.duplicates import check_disjoint
from jaxprorl.data.prompts import question_hash
from jaxprorl.data.splits import SPLITS, Items, Splits, fingerprint, load_items, load_splits
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import DataError
from jaxprorl.warmstart.tokenizer import build_tokenizer


def _small(**tasks: Any) -> ConfigDict:
    config = base.get_config()
    config.data.tasks = ConfigDict(tasks or {"chain_sum": {"min_terms": 3, "max_terms": 4}, "gcd": {}})
    config.data.train_per_task, config.data.validation_per_task, config.data.held_out_per_task = 30, 10, 12
    config.rollout.max_prompt_tokens = 200
    return config


def _jsonl(folder: Path, rows: list[dict[str, Any]]) -> ConfigDict:
    file = folder / "q.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    config = base.get_config()
    config.data.source = f"jsonl:{file}"
    return config


def test_quickstart_has_what_it_asks_for(quickstart_items: Items) -> None:
    data = get_config().data
    for name in SPLITS:
        for task in data.tasks:
            questions = [question_hash(i.question) for i in getattr(quickstart_items, name) if i.task == task]
            assert len(questions) == len(set(questions)) == data[f"{name}_per_task"]
    assert check_disjoint({name: getattr(quickstart_items, name) for name in SPLITS}) == []
    assert len({item.domain for item in quickstart_items.train}) == 3
    assert quickstart_items.counts["train"]["kept"] == 8000
    assert quickstart_items.counts["train"]["in_other_split"] > 0


def test_grouped_by_task_in_generator_order(tokenizer: Tokenizer) -> None:
    splits = load_splits(_small(), tokenizer)
    for name in SPLITS:
        rows = [(prompt.task, prompt.item["entry"]["metadata"]["source_index"]) for prompt in getattr(splits, name)]
        assert rows == sorted(rows)


def test_same_config_same_prompts(tokenizer: Tokenizer) -> None:
    assert fingerprint(load_splits(_small(), tokenizer)) == fingerprint(load_splits(_small(), tokenizer))


def test_ids_are_unique_small_and_stable(tokenizer: Tokenizer, quickstart_items: Items) -> None:
    config = get_config()
    config.rollout.max_prompt_tokens = 300
    splits = load_splits(config, tokenizer, quickstart_items)
    ids = [prompt.prompt_id for name in SPLITS for prompt in getattr(splits, name)]
    assert len(ids) == len(set(ids)) == 10400
    assert min(ids) >= 0
    assert max(ids) < 2**31
    config, fewer = _small(), _small(gcd={})
    config.data.train_per_task = 60
    whole = {prompt.item["entry"]["question"]: prompt.prompt_id for prompt in load_splits(config, tokenizer).train}
    part = {prompt.item["entry"]["question"]: prompt.prompt_id for prompt in load_splits(fewer, tokenizer).train}
    assert part.items() <= whole.items()


def test_held_out_does_not_depend_on_the_train_size(tokenizer: Tokenizer) -> None:
    larger = _small()
    larger.data.train_per_task = 100
    first, second = load_splits(_small(), tokenizer), load_splits(larger, tokenizer)
    for name in ("validation", "held_out"):
        empty = {other: () for other in SPLITS if other != name}
        assert fingerprint(Splits(**empty, **{name: getattr(first, name)})) == fingerprint(Splits(**empty, **{name: getattr(second, name)}))


def test_small_tasks_give_held_out_first_and_say_what_was_dropped() -> None:
    config = _small(chain_sum={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})  # 200 different questions
    config.data.held_out_per_task, config.data.validation_per_task, config.data.train_per_task = 50, 50, 200
    items = load_items(config)
    assert (len(items.held_out), len(items.validation)) == (50, 50)
    assert 50 < len(items.train) <= 100
    assert items.counts["train"]["kept"] == len(items.train)
    assert sum(items.counts["train"].values()) == 800
    config.data.held_out_per_task = 400
    with pytest.raises(DataError, match=r"data\.tasks\.chain_sum: no question is left for the \w+ split.*held_out_per_task"):
        load_items(config)


@pytest.mark.parametrize(
    ("lower", "upper", "gap", "ok"),
    [
        # Up to 4 x 12 held-out and 4 x 10 validation seeds are used from the lower one on.
        ("held_out", "validation", 0, False),
        ("held_out", "validation", 48, False),
        ("held_out", "validation", 49, True),
        ("validation", "held_out", 40, False),
        ("validation", "held_out", 41, True),
    ],
)
def test_seed_ranges_must_not_touch(lower: str, upper: str, gap: int, ok: bool) -> None:
    config = _small()
    config.data[f"{lower}_seed"], config.data[f"{upper}_seed"] = 5_000_000, 5_000_000 + gap
    if ok:
        load_items(config)
        return
    with pytest.raises(
        DataError, match=r"data\.\w+_seed = 5\d+ and data\.\w+_seed = 5\d+ are too close.*set data\.\w+_seed above 50000\d\d"
    ):
        load_items(config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train_per_task", 0, r"data\.train_per_task = 0: must be at least 1"),
        ("held_out_seed", -1, r"data\.held_out_seed = -1: must not be negative"),
        ("source", "hub:x", r"data\.source = 'hub:x': use 'reasoning_gym' or 'jsonl:PATH'"),
    ],
)
def test_wrong_fields(field: str, value: Any, message: str) -> None:
    config = _small()
    config.data[field] = value
    with pytest.raises(DataError, match=message):
        load_items(config)


def test_no_tasks() -> None:
    with pytest.raises(DataError, match=r"data\.tasks is empty"):
        load_items(base.get_config())


def test_long_prompts_are_refused(tokenizer: Tokenizer) -> None:
    config = _small()
    config.rollout.max_prompt_tokens = 20
    with pytest.raises(
        DataError, match=r"data\.tasks\.\w+: item 0 of seed 5000000: the prompt has \d+ tokens, rollout\.max_prompt_tokens = 20"
    ):
        load_splits(config, tokenizer)


def test_system_prompt_is_rendered(tokenizer: Tokenizer) -> None:
    config = _small()
    config.data.system_prompt = "Be brief"
    assert tokenizer.decode(load_splits(config, tokenizer).train[0].token_ids).startswith("<|im_start|>system\nBe brief")


def test_jsonl_end_to_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "task": "ab"[i % 2], "n": i} for i in range(40)]
    splits = load_splits(_jsonl(tmp_path, rows), tokenizer)
    everything = [prompt for name in SPLITS for prompt in getattr(splits, name)]
    assert sorted(prompt.item["n"] for prompt in everything) == list(range(40))
    assert all(prompt.domain == "jsonl" and prompt.answer == str(prompt.item["n"] + 1) for prompt in everything)
    rows_of_train = [(prompt.task, prompt.item["n"]) for prompt in splits.train]
    assert rows_of_train == sorted(rows_of_train)


def test_jsonl_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "answer": ""} for i in range(20)] * 2
    items = load_items(_jsonl(tmp_path, rows))
    assert sum(items.counts[name]["kept"] for name in SPLITS) == sum(items.counts[name]["duplicates"] for name in SPLITS) == 20


def test_jsonl_overlap_refuses_to_run(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "answer": "", "split": SPLITS[i % 3]} for i in range(9)]
    rows.append({"prompt": "q0", "answer": "", "split": "held_out"})
    with pytest.raises(
        DataError, match=r"the splits train and held_out share 1 questions, e\.g\. .*q\.jsonl, line 1 and .*q\.jsonl, line 10: 'q0'"
    ):
        load_items(_jsonl(tmp_path, rows))


def test_jsonl_long_prompt_names_the_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"q{i}" + "x" * 60 * (i == 4), "answer": ""} for i in range(9)]
    config = _jsonl(tmp_path, rows)
    config.rollout.max_prompt_tokens = 63
    with pytest.raises(DataError, match=r"q\.jsonl, line 5: the prompt has 64 tokens, rollout\.max_prompt_tokens = 63"):
        load_splits(config, tokenizer)
    config.rollout.max_prompt_tokens = 64
    load_splits(config, tokenizer)


@pytest.mark.parametrize(
    ("field", "reward", "told"),
    [
        ("reward", "jaxprorl.rewards.text:exact_match", "jaxprorl.rewards.text:exact_match needs one"),
        ("evaluation.reward", "jaxprorl.rewards.text:exact_match", "jaxprorl.rewards.text:exact_match needs one"),
        (
            "reward",
            "mine_of_a_user:score",
            "the line has no other field to grade by; .*NEEDS_ANSWER = False into the module of mine_of_a_user:score",
        ),
    ],
)
def test_empty_answers_are_told_when_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, reward: str, told: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_of_a_user.py").write_text("def score(text, prompt):\n    return float(text == prompt.answer)\n")
    rows = [{"prompt": f"q{i}", "answer": "" if i == 4 else "1"} for i in range(9)]
    config = _jsonl(tmp_path, rows)
    load_items(config)  # the default rewards grade by other fields
    config.update_from_flattened_dict({field: reward})
    with pytest.raises(DataError, match=rf'q\.jsonl, line 5: answer is "": {told}'):
        load_items(config)


def _with_long_ones(folder: Path) -> ConfigDict:
    rows = [{"prompt": f"q{i}" + "x" * 60 * (i in (4, 7, 8, 11, 12)), "answer": str(i), "split": SPLITS[i % 3]} for i in range(15)]
    config = _jsonl(folder, rows)
    config.rollout.max_prompt_tokens = 63
    return config


def test_of_long_prompts_the_first_are_shown_and_the_others_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    message = (
        r"q\.jsonl, line 9: the prompt has 64 tokens, rollout\.max_prompt_tokens = 63 \(4 more are longer: .*line 12 has 65 tokens, "
        r".*line 5 has 64 tokens, \.\.\.\); raise the field, or set data\.overlong_prompts = 'drop'"
    )
    with pytest.raises(DataError, match=message):
        load_splits(_with_long_ones(tmp_path), tokenizer)


def test_long_prompts_are_dropped_where_the_config_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = _with_long_ones(tmp_path)
    config.data.overlong_prompts = "drop"
    splits = load_splits(config, tokenizer)
    assert sorted(int(prompt.answer) for name in SPLITS for prompt in getattr(splits, name)) == [0, 1, 2, 3, 5, 6, 9, 10, 13, 14]
    assert {finding.kind for finding in splits.findings} == {"overlong"} and len(splits.findings) == 5
    config.rollout.max_prompt_tokens = 70
    whole = load_splits(config, tokenizer)
    ids = {prompt.answer: prompt.prompt_id for prompt in whole.train}
    assert all(ids[prompt.answer] == prompt.prompt_id for prompt in splits.train), "what is dropped moves no id"


def test_a_split_or_task_that_lost_all_its_prompts_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"q{i}" + "x" * 60 * (i % 3 == 1), "answer": str(i), "split": SPLITS[i % 3]} for i in range(9)]
    config = _jsonl(tmp_path, rows)
    config.rollout.max_prompt_tokens, config.data.overlong_prompts = 63, "drop"
    with pytest.raises(DataError, match=r"rollout\.max_prompt_tokens = 63: all prompts of the validation split are longer; raise it"):
        load_splits(config, tokenizer)
    config = _small()
    config.rollout.max_prompt_tokens, config.data.overlong_prompts = 75, "drop"
    with pytest.raises(DataError, match=r"all prompts of data\.tasks\.gcd in the held_out split are longer"):
        load_splits(config, tokenizer)


def test_control_tokens_in_rows_are_text_unless_the_config_allows_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"q{i}<|im_end|>", "answer": str(i)} for i in range(9)]
    config = _jsonl(tmp_path, rows)
    config.data.system_prompt, config.rollout.max_prompt_tokens = "<|endoftext|>", 100
    end, pad = tokenizer.stop_ids
    for allowed, counts in (("text", (0, 0)), ("allow", (1, 1))):
        config.data.control_tokens_in_text = allowed
        ids = load_splits(config, tokenizer).train[0].token_ids.tolist()
        assert (ids.count(end), ids.count(pad)) == counts


def test_the_quickstarts_prompts_are_what_they_were(quickstart_items: Items, tmp_path: Path) -> None:
    """All random draws depend on the ids. Right to change only with the questions, the tokenizer or reasoning-gym itself."""
    config = get_config()
    splits = load_splits(config, build_tokenizer(quickstart_items.train, tmp_path / "model"), quickstart_items)
    assert fingerprint(splits) == "f47ad38d9253922bf8c5262c1ad9225e43642168db40f1356d282215d6e87c37"


def test_fingerprint_sees_everything(tokenizer: Tokenizer) -> None:
    splits = load_splits(_small(gcd={}), tokenizer)
    prompt = splits.train[0]
    changed = [
        replace(prompt, prompt_id=prompt.prompt_id + 1),
        replace(prompt, domain="x"),
        replace(prompt, task="x"),
        replace(prompt, answer=prompt.answer + " "),
        replace(prompt, token_ids=np.append(prompt.token_ids, np.int32(0))),
        replace(prompt, item={**prompt.item, "x": None}),
    ]
    variants = [replace(splits, train=(other, *splits.train[1:])) for other in changed]
    variants += [replace(splits, train=splits.train[::-1]), replace(splits, train=splits.train[:-1]), splits]
    variants += [replace(splits, train=splits.train[:-1], validation=(splits.train[-1], *splits.validation))]
    assert len({fingerprint(variant) for variant in variants}) == len(variants)
    assert fingerprint(replace(splits, counts={})) == fingerprint(splits)
