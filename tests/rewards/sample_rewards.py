"""Rewards, good and evil, for the pool's tests: what a completion says decides what happens."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from fractions import Fraction
from typing import Any

import numpy as np

from jaxprorl.rewards import Graded
from jaxprorl.types import Prompt

not_callable = 3


def length(text: str, prompt: Prompt) -> float:
    return min(len(text), 100) / 100


def echo_mismatch(text: str, prompt: Prompt) -> float:
    if text != prompt.answer:
        raise AssertionError(f"got {text!r}")
    return 1.0


def one_parameter(text: str) -> float:
    return 0.0


async def asynchronous(text: str, prompt: Prompt) -> float:
    return 0.0


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def acts(text: str, prompt: Prompt) -> Any:
    """0.5, unless the text names a misdeed."""
    match text:
        case "raise":
            raise KeyError("lost")
        case "unprintable":
            raise UnprintableError
        case "recursion":
            return acts("recursion", prompt)
        case "memory":
            raise MemoryError
        case "exit":
            sys.exit(3)
        case "nan":
            return float("nan")
        case "huge":
            return 10**400
        case "none":
            return None
        case "text":
            return "1.0"
        case "sleep":
            time.sleep(60)
        case "swallow":  # swallows whatever is raised into it
            while True:
                with contextlib.suppress(BaseException):
                    time.sleep(1)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        case "c_code":  # never gives the interpreter lock back
            ctypes.PyDLL(None).sleep(60)
        case "die":
            os._exit(7)
        case "die_quietly":
            os._exit(0)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "slow":
            time.sleep(0.25)
        case "jitter":
            time.sleep((prompt.prompt_id * 7 % 5) * 0.01)
    return 0.5


def no_jax(text: str, prompt: Prompt) -> float:
    return 0.0 if any(name.split(".")[0] in ("jax", "jaxlib") for name in sys.modules) else 1.0


def ignores_ctrl_c(text: str, prompt: Prompt) -> float:
    os.kill(os.getpid(), signal.SIGINT)
    return 1.0 if threading.current_thread() is threading.main_thread() else 0.0


def always_dies(text: str, prompt: Prompt) -> float:
    os._exit(5)


def pops(text: str, prompt: Prompt) -> float:
    """1 for the first of the options, which it takes away."""
    return float(prompt.item["options"].pop(0) == "a")


def scribbles(text: str, prompt: Prompt) -> float:
    """1 if nothing that it may write on has been written on."""
    clean = prompt.item == {"nested": {"lists": [[1], [2]]}} and prompt.token_ids.tolist() == [5, 6, 7] and prompt.answer == "answer"
    prompt.item["nested"]["lists"][1].append(3)
    prompt.item["seen"] = True
    prompt.token_ids.flags.writeable = True
    prompt.token_ids[0] = 9
    object.__setattr__(prompt, "answer", "other")
    return float(clean)


def negative(text: str, prompt: Prompt) -> Fraction:
    return Fraction(-len(text), 2)


def right_but_long(text: str, prompt: Prompt) -> Graded:
    return Graded(np.float32(1 - len(text)), solved=True)


def always_raises(text: str, prompt: Prompt) -> float:
    raise KeyError("gold")


def always_hangs(text: str, prompt: Prompt) -> None:
    time.sleep(60)


def sums_only(text: str, prompt: Prompt) -> None:
    """A function without a return."""


def needs_a_number(text: str, prompt: Prompt) -> bool:
    return float(text.rpartition("<answer>")[2].partition("</answer>")[0]) == float(prompt.answer)


def talkative(text: str, prompt: Prompt) -> float:
    print("→" * 100_000, flush=True)
    return 1.0
