"""Seconds and memory of peers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function; what each call took is appended to `seconds`."""

    def call(*arguments: Any, **named: Any) -> Any:
        started_s = time.perf_counter()
        result = function(*arguments, **named)
        seconds.append(time.perf_counter() - started_s)
        return result

    return call


def peak_memory_bytes() -> int:
    """Peak resident memory of this process plus that of its living descendants, as `jaxprorl.evaluation.summary` takes it; Linux only."""
    processes = (psutil.Process(), *psutil.Process().children(recursive=True))
    lines = [line for process in processes for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()]
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
