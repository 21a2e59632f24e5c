import json
from itertools import islice
from typing import Any

import pytest
import reasoning_gym as rg

from jaxprorl.data import reasoning_gym
from jaxprorl.errors import DataError


def _first(task: str, count: int = 20, seed: int = 5, **arguments: Any) -> list[Any]:
    return list(islice(reasoning_gym.items(task, arguments, seed), count))


def test_item_is_the_generators_item() -> None:
    dataset = rg.create_dataset("chain_sum", seed=5, size=30, max_terms=3)
    for index, item in enumerate(_first("chain_sum", 30, max_terms=3)):
        entry = dataset[index]
        assert (item.domain, item.task, item.question, item.answer) == ("arithmetic", "chain_sum", entry["question"], entry["answer"])
        assert item.item == json.loads(json.dumps({"task": "chain_sum", "entry": entry}))
        assert item.place == f"data.tasks.chain_sum: item {index} of seed 5"


def test_streams_of_near_seeds_overlap() -> None:
    """Why the splits' seeds must be far apart."""
    assert [i.question for i in _first("chain_sum", 10, seed=6)] == [i.question for i in _first("chain_sum", 11, seed=5)][1:]


def test_stored_entries_score_like_new_ones() -> None:
    for task in ("spell_backward", "number_filtering", "complex_arithmetic", "gcd", "leg_counting", "graph_color"):
        scorer = rg.get_score_answer_fn(task)
        for item in _first(task):
            if item.answer:
                assert scorer(item.answer, item.item["entry"]) == 1.0


def test_no_oracle_gives_an_empty_answer() -> None:
    assert _first("graph_color", 1)[0].answer == ""


@pytest.mark.parametrize("task", ["arc_agi", "rearc"])
def test_entries_that_json_breaks_are_refused(task: str) -> None:
    with pytest.raises(
        DataError, match=rf"data\.tasks\.{task}: item \d+ of seed 5: its reference answer scores 1.0 but 0.05.*remove the task"
    ):
        _first(task)


def test_entries_that_are_not_json(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.factory import DATASETS

    monkeypatch.setattr(DATASETS["gcd"][0], "__getitem__", lambda self, index: {"question": "q", "answer": "1", "metadata": {1, 2}})
    with pytest.raises(DataError, match=r"data\.tasks\.gcd: item 0 of seed 5: its entry cannot be stored as JSON"):
        _first("gcd")


def test_generator_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.factory import DATASETS

    monkeypatch.setattr(DATASETS["gcd"][0], "__getitem__", lambda self, index: {}["x"])
    with pytest.raises(DataError, match=r"data\.tasks\.gcd: item 0 of seed 5: the generator failed: KeyError"):
        _first("gcd")


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("chainsum", {}, r"data\.tasks\.chainsum: reasoning-gym has no such task; did you mean chain_sum"),
        ("zzzzzz", {}, r"data\.tasks\.zzzzzz: reasoning-gym has no such task; known: ab, "),
        ("chain_sum", {"min_term": 3}, r"data\.tasks\.chain_sum\.min_term = 3: not an argument of this task; did you mean min_terms"),
        ("chain_sum", {"seed": 3}, r"data\.tasks\.chain_sum\.seed = 3: set data\.\*_seed"),
        ("chain_sum", {"size": 3}, r"data\.tasks\.chain_sum\.size = 3: set data\.\*_seed and data\.\*_per_task"),
        ("chain_sum", {"min_terms": -1}, r"data\.tasks\.chain_sum: the generator refuses min_terms=-1: min_terms must be positive"),
        ("chain_sum", {"min_terms": "a"}, r"data\.tasks\.chain_sum: the generator refuses min_terms='a'"),
        ("composite", {}, r"data\.tasks\.composite: the generator refuses the defaults"),
    ],
)
def test_errors_name_the_field(task: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        next(reasoning_gym.items(task, arguments, 0))


@pytest.mark.parametrize("value", [None, "random", ""])
def test_hash_seed_tasks_need_a_fixed_hash_seed(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    for task in reasoning_gym.HASH_SEED_TASKS:
        with pytest.raises(DataError, match=rf"data\.tasks\.{task}: .*PYTHONHASHSEED=0"):
            _first(task)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(_first("ransom_note", 2)) == 2
