"""Items of reasoning-gym's procedural tasks. The library is imported when first needed: it takes over a second."""

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from jaxprorl.data.prompts import Item
from jaxprorl.errors import DataError
from jaxprorl.interrupts import safe_point

# Their generators iterate over sets of strings, whose order changes with Python's hash seed (measured in reasoning-gym 0.1.25).
HASH_SEED_TASKS = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})
CHECKED_ITEMS = 16  # items of each stream whose scores are compared before and after JSON


def items(task: str, arguments: Mapping[str, Any], seed: int) -> Iterator[Item]:
    """The endless stream of a task's items; item i is what the generator makes of seed + i.

    `Prompt.item` of these is {"task": name, "entry": the generator's entry as it comes out of JSON}.

    Raises:
        DataError: unknown task or argument, a value that the generator refuses, an entry that JSON changes, or a task that
            needs a fixed PYTHONHASHSEED.
    """
    dataset = _create(task, arguments, seed)
    scorer = _scorer(task)
    for index in count():
        safe_point()
        place = f"data.tasks.{task}: item {index} of seed {seed}"
        try:
            entry = dataset[index]
        except Exception as error:  # whatever a generator raises, the user must learn which task it was
            raise DataError(f"{place}: the generator failed: {type(error).__name__}: {error}") from error
        stored = _through_json(entry, place)
        if index < CHECKED_ITEMS:
            _check_score(scorer, entry, stored, place)
        answer = stored["answer"]
        yield Item(
            domain=dataset.category,
            task=task,
            messages=({"role": "user", "content": stored["question"]},),
            answer="" if answer is None else str(answer),
            place=place,
            item={"task": task, "entry": stored},
        )


def _create(task: str, arguments: Mapping[str, Any], seed: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        raise DataError(f"data.tasks.{task}: reasoning-gym has no such task{_close(task, DATASETS)}")
    if task in HASH_SEED_TASKS and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        raise DataError(f"data.tasks.{task}: its items change with Python's hash seed; start with PYTHONHASHSEED=0 in the environment")
    fields = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for name, value in arguments.items():
        if name in ("seed", "size"):
            raise DataError(f"data.tasks.{task}.{name} = {value!r}: set data.*_seed and data.*_per_task instead")
        if name not in fields:
            raise DataError(f"data.tasks.{task}.{name} = {value!r}: not an argument of this task{_close(name, fields)}")
    try:
        return create_dataset(task, seed=seed, size=1, **arguments)
    except Exception as error:  # generators check their arguments with assert, and also fail on wrong types
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "the defaults"
        raise DataError(f"data.tasks.{task}: the generator refuses {given}: {error or type(error).__name__}") from error


def _close(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known: {', '.join(sorted(known))}"


def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _through_json(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(entry))
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: its entry cannot be stored as JSON ({error}); remove the task") from error


def _check_score(scorer: Callable[..., float], entry: Mapping[str, Any], stored: Mapping[str, Any], place: str) -> None:
    """Refuses tasks whose scorer needs what JSON loses, e.g. tuples (arc_agi, rearc in reasoning-gym 0.1.25)."""
    probe = "0" if entry["answer"] is None else str(entry["answer"])
    before, after = _score(scorer, probe, entry), _score(scorer, probe, stored)
    if before != after:
        raise DataError(f"{place}: its reference answer scores {before} but {after} once the entry went through JSON; remove the task")


def _score(scorer: Callable[..., float], answer: str, entry: Mapping[str, Any]) -> float | str:
    try:
        return scorer(answer, entry)
    except Exception as error:  # some scorers raise on wrong answers; here only sameness counts
        return type(error).__name__
