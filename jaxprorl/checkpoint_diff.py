"""Two checkpoints compared: bookkeeping field by field, arrays leaf by leaf."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxprorl.checkpoint import Host, read_host, restore_arrays

# Seconds, reported only and never equal, and the offsets of the logs, whose lines carry seconds.
CLOCK_FIELDS = re.compile(r"run\.rl_s|run\.rollout_s|offsets\..*|surplus\.\d+\.scores\.\d+\.seconds")


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        name: path of the leaf or field.
        text: how it differs.
        size: largest absolute difference of an array; infinite for anything else (missing, another shape, dtype or field).
    """

    name: str
    text: str
    size: float


def compare(folder_a: Path, step_a: int, folder_b: Path, step_b: int) -> list[Difference]:
    """Every difference between two checkpoints, the smallest first and the worst last; empty if they are equal to the bit.

    Seconds are not compared, nor the offsets of the logs (lines carry seconds).

    Raises:
        CheckpointError: one of them does not exist or cannot be read.
    """
    found = compare_hosts(read_host(folder_a, step_a), read_host(folder_b, step_b))
    found += compare_arrays(restore_arrays(folder_a, step_a), restore_arrays(folder_b, step_b))
    return sorted(found, key=lambda difference: (difference.size, difference.name))


def compare_hosts(a: Host, b: Host) -> list[Difference]:
    """Differences of the bookkeeping."""
    left, right = _flat(dataclasses.asdict(a)), _flat(dataclasses.asdict(b))
    names = [name for name in sorted(left.keys() | right.keys()) if not CLOCK_FIELDS.fullmatch(name)]
    return [
        Difference(name, f"{left.get(name)!r} against {right.get(name)!r}", float("inf"))
        for name in names
        if left.get(name) != right.get(name)
    ]


def compare_arrays(a: Any, b: Any) -> list[Difference]:
    """Differences of two trees of arrays, bit by bit (so that equal NaNs are equal and 0.0 is not -0.0)."""
    left, right = _leaves(a), _leaves(b)
    found = []
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            found.append(Difference(name, f"only in {'the first' if name in left else 'the second'}", float("inf")))
        elif left[name].shape != right[name].shape or left[name].dtype != right[name].dtype:
            shapes = (f"{array.dtype}{list(array.shape)}" for array in (left[name], right[name]))
            found.append(Difference(name, " against ".join(shapes), float("inf")))
        elif left[name].tobytes() != right[name].tobytes():
            gap = np.abs(left[name].astype(np.float64) - right[name].astype(np.float64))
            size = float(gap.max()) if np.isfinite(gap).all() else float("inf")
            changed = np.count_nonzero(left[name] != right[name])
            found.append(Difference(name, f"{changed} of {gap.size} values differ, by {size:.3g} at most", size))
    return found


def _leaves(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {name: leaf for key, value in tree.items() for name, leaf in _flat(value, f"{prefix}{key}.").items()}
