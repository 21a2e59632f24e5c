"""What runs inside a grader process. Imports no JAX: a grader must start fast and hold no device."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jaxprorl import streams
from jaxprorl.lifetime import die_with
from jaxprorl.rewards import registry
from jaxprorl.types import Outcome, Prompt

MAX_DETAIL_CHARS = 500
SHOW_WITHIN_S = 0.5  # what a reward prints is lost when nobody reads for so long, which is less than a sensible time limit
# A cluster sends these to every process of a job. The parent then finishes its step, for which it needs its graders.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Row:
    """One completion to grade. token_ids: int32 [response_tokens]; drop_last: the last id is a stop id, not text."""

    prompt_id: int
    token_ids: np.ndarray
    drop_last: bool


@dataclass(frozen=True)
class Grade:
    """One completion graded: the parts of a Score that the process knows."""

    value: float
    outcome: Outcome
    seconds: float
    detail: str = ""


_reward: Callable[[str, Prompt], Any] | None = None  # users' functions may return anything
_tokenizer: Tokenizer | None = None
_start_error = ""


def start(spec: str, tokenizer_file: str, parent_pid: int) -> None:
    """Initializer of a grader process: ties its life to the parent's, then loads reward and tokenizer once.

    An error is kept and reported with the first batch: a worker that died here would be replaced forever, unheard.
    """
    global _reward, _tokenizer, _start_error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent
    for number in PREEMPTION:  # handled rather than ignored: programs that a reward starts would inherit that
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)
    die_with(parent_pid)
    streams.protect(SHOW_WITHIN_S)  # a reward may print, and must not fail because nobody reads it
    try:
        _reward = registry.load_reward(spec)
        registry.prepare_reward(spec)
        _tokenizer = Tokenizer.from_file(tokenizer_file)
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
    for row in rows:
        grades.append(_grade_one(prompts[row.prompt_id], row))
        if time.perf_counter() - began > enough_s:
            break
    return grades


def _grade_one(prompt: Prompt, row: Row) -> Grade:
    assert _reward is not None and _tokenizer is not None
    began = time.perf_counter()
    try:
        ids = row.token_ids[:-1] if row.drop_last else row.token_ids
        # The tags may be special tokens, so these must stay in the text.
        text = _tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        value = _reward(text, prompt)
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError(f"reward returned {type(value).__name__}, expected a float in [0, 1]")
        value = float(value)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"reward returned {value}, expected a float in [0, 1]")
    except BaseException as error:  # also SystemExit, RecursionError, MemoryError: one bad sample is one bad sample
        return Grade(0.0, "grader_error", time.perf_counter() - began, _describe(error))
    return Grade(value, "scored", time.perf_counter() - began)


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose __str__ raises
        text = type(error).__name__
    return text[:MAX_DETAIL_CHARS]
