"""Every graded sample of a run, one Parquet file per step, so that any reward can be traced to the text that earned it.

A file appears whole or not at all, and the same rows give the same bytes (no time stamps inside).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxprorl import storage
from jaxprorl.files import scratch_in, write_atomically
from jaxprorl.types import Group

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("prompt_id", pa.int64()),
        ("domain", pa.string()),
        ("task", pa.string()),
        ("prompt", pa.string()),  # text, as rendered by the chat template
        ("answer", pa.string()),  # the reference
        ("sample", pa.int32()),  # index within the group
        ("completion", pa.string()),  # text
        ("response_tokens", pa.int32()),
        ("finish_reason", pa.string()),  # stop, length, aborted, error
        ("score", pa.float64()),  # the reward; null after a grader error, which is never a zero
        ("solved", pa.bool_()),  # whether the grader calls the answer right; null likewise
        ("outcome", pa.string()),  # scored, grader_error
        ("grader", pa.string()),
        ("grader_version", pa.string()),
        ("kept", pa.bool_()),  # trained on
        ("advantage", pa.float64()),  # null unless kept
        ("policy_version_first", pa.int64()),  # weights that made the first and the last token; null without tokens
        ("policy_version_last", pa.int64()),
    ]
)


def sample_path(folder: str | os.PathLike[str], step: int) -> Path:
    """The file of one step."""
    return Path(folder) / f"step_{step:06d}.parquet"


def group_rows(
    group: Group, prompt: str, completions: Sequence[str], kept: bool, advantages: Sequence[float] | None
) -> list[dict[str, Any]]:
    """The rows of one group for `write_samples`.

    Args:
        group: the group.
        prompt: text of the prompt.
        completions: text of each completion, in sample order.
        kept: whether the step trained on it.
        advantages: one per sample; None when not kept.
    """
    rows = []
    for index, (completion, score) in enumerate(zip(group.completions, group.scores, strict=True)):
        spans = completion.version_spans
        rows.append(
            {
                "prompt_id": group.prompt.prompt_id,
                "domain": group.prompt.domain,
                "task": group.prompt.task,
                "prompt": prompt,
                "answer": group.prompt.answer,
                "sample": completion.sample,
                "completion": completions[index],
                "response_tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "score": float(score.value) if score.outcome == "scored" else None,
                "solved": score.solved if score.outcome == "scored" else None,
                "outcome": score.outcome,
                "grader": score.grader,
                "grader_version": score.grader_version,
                "kept": kept,
                "advantage": None if advantages is None else float(advantages[index]),
                "policy_version_first": spans[0][0] if spans else None,
                "policy_version_last": spans[-1][0] if spans else None,
            }
        )
    return rows


def write_samples(folder: str | os.PathLike[str], step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes the step's file (replacing one of an earlier attempt) and returns its path. `step` is added to each row.

    Raises:
        ValueError: a row's columns are not exactly those of SCHEMA (names them).
        StorageError: the file cannot be written.
    """
    expected = set(SCHEMA.names) - {"step"}
    for index, row in enumerate(rows):
        if set(row) != expected:
            raise ValueError(f"row {index}: missing {sorted(expected - set(row))}, unknown {sorted(set(row) - expected)}")
    table = pa.Table.from_pylist([{"step": step, **row} for row in rows], schema=SCHEMA)
    path = sample_path(folder, step)
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd", compression_level=3)
    data = content.getvalue()
    with storage.writing(path, data.size):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data.to_pybytes())
    return path


def read_samples(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of one step's file."""
    return pq.read_table(path).to_pylist()


def remove_after(folder: str | os.PathLike[str], step: int) -> list[Path]:
    """Deletes the files of steps after `step` and half-written ones, on resume; returns what was deleted."""
    folder = Path(folder)
    removed = [path for path in sorted(folder.glob("step_*.parquet")) if int(path.stem.removeprefix("step_")) > step]
    removed += scratch_in(folder)
    for path in removed:
        path.unlink()
    return removed
