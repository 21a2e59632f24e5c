import json
from pathlib import Path
from typing import Any

import pytest
from factories import random_params, tiny_config, tiny_model
from ml_collections import ConfigDict

from jaxprorl.data.duplicates import Finding
from jaxprorl.data.prompts import Item
from jaxprorl.data.splits import SPLITS, Items, Splits
from jaxprorl.data.tokenizer import load_tokenizer
from jaxprorl.errors import ConfigError, DataError
from jaxprorl.inputs import ROWS_IN_EVENT, check_items, read_inputs, read_prompts, record_findings
from jaxprorl.models import hf
from jaxprorl.run_folder import RunFolder
from jaxprorl.warmstart.tokenizer import build_tokenizer


def test_a_mix_must_suffice_for_a_batch() -> None:
    train = tuple(Item("d", task, ({"role": "user", "content": str(i)},), "", "here") for i, task in enumerate("aaab"))
    items = Items(train, (), (), {})
    check_items(tiny_config(), items)
    check_items(tiny_config(data__mix=("a", "b")), items)
    with pytest.raises(ConfigError, match=r"batch\.prompts = 4: the train split holds 3 prompts of a only; lower it, or add data"):
        check_items(tiny_config(data__mix=("a",)), items)
    with pytest.raises(ConfigError, match=r"data\.mix: c: the data has no such domain or task"):
        check_items(tiny_config(data__mix=("c",)), items)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer that has a token for every byte."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer([Item("d", "t", ({"role": "user", "content": "1"},), "2", "here")], folder / "tokenizer")
    c = tiny_model(vocab_size=tokenizer.vocab_size)
    hf.write_folder(folder / "model", c, random_params(c), folder / "tokenizer", tokenizer.stop_ids, tokenizer.pad_id)
    return folder / "model"


def with_rows(folder: Path, model: Path, long_ones: int, **overrides: Any) -> ConfigDict:
    """Four rows for each split, and so many in train that are longer than the limit."""
    rows = [{"prompt": f"q{n}", "answer": str(n), "split": SPLITS[n % 3]} for n in range(12)]
    rows += [{"prompt": f"long {n}", "answer": "1", "split": "train"} for n in range(long_ones)]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides |= {"data__source": f"jsonl:{folder / 'q.jsonl'}", "model__path": str(model), "rollout__max_prompt_tokens": 5}
    return tiny_config(reward="jaxprorl.rewards.text:exact_match", evaluation__reward="", **overrides)


def prompts(config: ConfigDict) -> Splits:
    return read_prompts(config, load_tokenizer(config.model.path), read_inputs(config))


def test_long_rows_are_refused_or_left_out_as_soon_as_there_is_a_tokenizer(tmp_path: Path, model: Path) -> None:
    assert len(prompts(with_rows(tmp_path, model, 0)).train) == 4
    with pytest.raises(DataError, match=r"q\.jsonl, line 13: the prompt has 8 tokens, rollout\.max_prompt_tokens = 5"):
        prompts(with_rows(tmp_path, model, 1))
    assert len(prompts(with_rows(tmp_path, model, 1, data__overlong_prompts="drop")).train) == 4


def test_what_is_left_without_long_rows_must_suffice_for_a_batch(tmp_path: Path, model: Path) -> None:
    config = with_rows(tmp_path, model, 2, data__overlong_prompts="drop", batch__prompts=5)
    with pytest.raises(ConfigError, match=r"batch\.prompts = 5: the train split holds 4 prompts only"):
        prompts(config)
    config.batch.prompts = 4
    splits = prompts(config)
    assert [finding.place[-7:] for finding in splits.findings] == ["line 13", "line 14"]


def test_the_event_lists_rows_and_a_file_has_them_all_where_they_are_many(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert record_findings([], run) == {}
    few = [Finding("duplicate", "q, line 2", "q, line 1"), Finding("overlong", "q, line 3", detail="9 tokens")]
    told = record_findings(few, run)
    assert told["findings"] == {"duplicate": 1, "overlong": 1}
    assert told["rows"][0] == {"kind": "duplicate", "place": "q, line 2", "other": "q, line 1", "detail": ""}
    assert list(tmp_path.iterdir()) == []
    many = [Finding("look_alike", f"q, line {n}", "q, line 1", "train and held_out") for n in range(50)]
    told = record_findings(many, run)
    assert told["findings"] == {"look_alike": 50} and len(told["rows"]) == ROWS_IN_EVENT
    rows = [json.loads(line) for line in (tmp_path / "data_findings.jsonl").read_text().splitlines()]
    assert [row["place"] for row in rows] == [f"q, line {n}" for n in range(50)] and rows[:ROWS_IN_EVENT] == told["rows"]
