"""What runs inside a grader process. Imports no JAX: a grader must start fast and hold no device."""

import math
import pickle
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from jaxprorl import streams
from jaxprorl.lifetime import die_with
from jaxprorl.rewards import registry
from jaxprorl.rewards.graded import LARGEST, Verdict, is_solved, verdict
from jaxprorl.types import Outcome, Prompt

MAX_DETAIL_CHARS = 500
SHOW_WITHIN_S = 0.5  # what a reward prints is lost when nobody reads for so long, which is less than a sensible time limit
# A cluster sends these to every process of a job. The parent then finishes its step, for which it needs its graders.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Row:
    """One completion to grade. response: int32 [response_tokens], or its text; drop_last: the last id is a stop id, not text."""

    prompt_id: int
    response: np.ndarray | str
    drop_last: bool


@dataclass(frozen=True)
class Grade:
    """One completion graded: the parts of a Score that the process knows."""

    value: float
    solved: bool
    outcome: Outcome
    seconds: float
    detail: str = ""


_reward: tuple[registry.Weighted, ...] = ()
_solved_from = math.nan
_tokenizer: Tokenizer | None = None
_start_error = ""


def start(spec: str, solved_from: float, tokenizer_file: str, parent_pid: int) -> None:
    """Initializer of a grader process: ties its life to the parent's, then loads reward and tokenizer once.

    An error is kept and reported with the first batch: a worker that died here would be replaced forever, unheard.
    """
    global _reward, _solved_from, _tokenizer, _start_error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent
    for number in PREEMPTION:  # handled rather than ignored: programs that a reward starts would inherit that
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)
    die_with(parent_pid)
    streams.protect(SHOW_WITHIN_S)  # a reward may print, and must not fail because nobody reads it
    try:
        _reward, _solved_from = registry.load_parts(spec), solved_from
        registry.prepare_reward(spec)
        _tokenizer = Tokenizer.from_file(tokenizer_file) if tokenizer_file else None
    except BaseException as error:  # kept, and told to the parent with the first batch: a process that dies here would only be replaced
        _start_error = _describe(error)


def grade(prompts: Mapping[int, Prompt], rows: Sequence[Row], enough_s: float) -> list[Grade] | str:
    """Grades rows in order, at least one; returns early once `enough_s` seconds have passed, the caller sends the rest again.

    Returns:
        One Grade per row of a non-empty prefix of `rows`; or a text if this process could not start.
    """
    if _start_error:
        return _start_error
    began = time.perf_counter()
    grades: list[Grade] = []
    # A reward may change whatever it is given. Each call therefore gets a prompt of its own, made from these bytes.
    packed = {prompt_id: pickle.dumps(prompt) for prompt_id, prompt in prompts.items()}
    for row in rows:
        grades.append(_grade_one(packed[row.prompt_id], row))
        if time.perf_counter() - began > enough_s:
            break
    return grades


def _grade_one(prompt: bytes, row: Row) -> Grade:
    began = time.perf_counter()
    try:
        value, solved = _weighted_sum(_text(row), prompt)
        solved = is_solved(value, solved, _solved_from)
    except BaseException as error:  # also SystemExit, RecursionError, MemoryError: one bad sample is one bad sample
        return Grade(0.0, False, "grader_error", time.perf_counter() - began, _describe(error))
    return Grade(value, solved, "scored", time.perf_counter() - began)


def _text(row: Row) -> str:
    if isinstance(row.response, str):
        return row.response
    assert _tokenizer is not None
    ids = row.response[:-1] if row.drop_last else row.response
    # The tags may be special tokens, so these must stay in the text.
    text: str = _tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


def _weighted_sum(text: str, prompt: bytes) -> Verdict:
    """The parts' values times their weights; the first part that says whether the answer is right speaks for the sum."""
    total, solved = 0.0, None
    for part in _reward:
        said = verdict(part.function(text, pickle.loads(prompt)))
        total += part.weight * said.value
        solved = said.solved if solved is None else solved
    if not abs(total) <= LARGEST:
        raise ValueError(f"the weighted sum of the rewards is {total}, beyond float32 (about 3.4e38)")
    return Verdict(total, solved)


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose __str__ raises
        text = type(error).__name__
    return text[:MAX_DETAIL_CHARS]
