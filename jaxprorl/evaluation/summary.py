"""`summary.json`: what a finished run reached and what it cost, in one small file that scripts can read."""

import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from jaxprorl.files import write_atomically

_SECONDS = ("warm_start", "rl", "evaluation", "total")


def _side(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a `solve_summary` that the file holds; the total's n is the sum over tasks and not repeated.

    An `evaluation_before.json` of an older version has no `ungraded`: its grader errors are zeros in the rates.
    """
    try:
        per_task = {
            task: {key: part[key] for key in ("solve_rate", "mean_score", "ci95", "n")} | {"ungraded": part.get("ungraded", 0)}
            for task, part in result["per_task"].items()
        }
        total = {key: result[key] for key in ("solve_rate", "mean_score", "ci95")} | {"ungraded": result.get("ungraded", 0)}
        return total | {"per_task": per_task}
    except KeyError as error:
        raise ValueError(f"{name} lacks the field {error}: pass a result of solve_summary") from error


def build_summary(
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    greedy_before: Mapping[str, Any],
    greedy_after: Mapping[str, Any],
    steps: int,
    resets: int,
    completion_tokens_per_s: float,
    seconds: Mapping[str, float],
    peak_memory_bytes: int,
    seed: int,
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        before, after: results of `solve_summary` on the held-out split, sampled.
        greedy_before, greedy_after: the same, decoded greedily.
        steps: RL steps done, over all interruptions.
        resets: resets done.
        completion_tokens_per_s: sampled tokens of the RL phase over its sampling time.
        seconds: wall-clock of `warm_start`, `rl`, `evaluation` and `total`.
        peak_memory_bytes: see the function of that name.
        seed: of the run.

    Raises:
        ValueError: a missing or extra entry of `seconds`, or a result without the expected fields.
    """
    if set(seconds) != set(_SECONDS):
        raise ValueError(f"seconds has {sorted(seconds)}, expected {sorted(_SECONDS)}")
    return {
        "before": _side("before", before),
        "after": _side("after", after),
        "steps": int(steps),
        "resets": int(resets),
        "completion_tokens_per_s": float(completion_tokens_per_s),
        "seconds": {name: float(seconds[name]) for name in _SECONDS},
        "peak_memory_bytes": int(peak_memory_bytes),
        "seed": int(seed),
        "greedy": {"before": _side("greedy_before", greedy_before), "after": _side("greedy_after", greedy_after)},
    }


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """Writes `summary.json` into the run's folder, whole or not at all.

    Raises:
        ValueError: NaN or infinity inside.
    """
    path = Path(run_dir) / "summary.json"
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    write_atomically(path, text)
    return path


def _high_water_bytes(pid: int) -> int | None:
    """Linux's VmHWM of a process: the most resident memory it ever had; None where there is none to read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_memory_bytes() -> int:
    """Peak resident memory of this process plus that of its living descendants (grader workers), so call it while they live.

    Each process's own peak is added up, and pages shared between them count in each: an upper bound for the processes counted.
    Children that have ended are not counted. Without /proc: this process's peak, and the descendants' present memory.
    """
    own = _high_water_bytes(os.getpid())
    if own is None:
        # ru_maxrss is only the fall-back: on Linux it survives exec, so a small process shows the peak of whoever started it.
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    total = own
    for child in psutil.Process().children(recursive=True):
        try:
            total += _high_water_bytes(child.pid) or child.memory_info().rss
        except psutil.Error:  # ended meanwhile
            continue
    return total
