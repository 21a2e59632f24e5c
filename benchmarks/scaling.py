"""How a step scales: with the number of completions, with their length at a fixed number of tokens, with the vocabulary.

.venv/bin/python benchmarks/scaling.py [--axes batch length vocabulary] [--dtype bfloat16] [--output FOLDER]

Every point is a run of step.py in a process of its own; one that fails (for want of memory, say) is left out and named. Writes
scaling.json and one SVG per axis into the folder (default: docs/performance).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from matplotlib.figure import Figure

from benchmarks.run import Result, run
from benchmarks.workload import WORK

# axis -> value -> fields of step.py's config. Lengths share 16,384 tokens a step; samples become fewer as they become longer.
POINTS: Mapping[str, Mapping[int, Mapping[str, int]]] = {
    "batch": {8 * prompts: {"batch.prompts": prompts, "batch.refill_prompts": prompts} for prompts in (2, 4, 8, 16, 32, 64)},
    "length": {
        length: {"batch.prompts": max(1, prompts), "batch.refill_prompts": max(1, prompts), "rollout.max_response_tokens": length}
        | ({} if prompts else {"rollout.samples_per_prompt": 4})
        for length, prompts in ((128, 16), (256, 8), (512, 4), (1024, 2), (2048, 1), (4096, 0))
    },
    "vocabulary": {size: {"workload.vocab_size": size} for size in (512, 4096, 32768, 151936)},
}
LABELS = {"batch": "completions per step", "length": "response tokens, 16,384 per step", "vocabulary": "vocabulary size"}


def overrides(fields: Mapping[str, int]) -> list[str]:
    """Arguments of step.py for one point, with what follows from its fields."""
    prompts = fields.get("batch.prompts", WORK["prompts"])
    rows = prompts * fields.get("rollout.samples_per_prompt", WORK["samples_per_prompt"])
    length = fields.get("rollout.max_response_tokens", WORK["response_tokens"])
    derived: dict[str, int | str] = {
        "model.attention": "naive" if length == WORK["response_tokens"] else "auto", "rollout.slots": rows,
        "rollout.min_response_tokens": length, "batch.row_tokens": WORK["prompt_tokens"] + length,
        "batch.micro_batch_rows": max(2, min(16, 2048 // length)), "steps": 4, "workload.warmup_steps": 1,
    }  # fmt: skip
    return [f"--config.{name}={value}" for name, value in (derived | dict(fields)).items()]


def plot(axis: str, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Completion tokens per second of whole steps, generation, and log-probs with update, against the axis."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    at = [row["value"] for row in rows]
    tokens = [row["result"]["step_s"] * row["result"]["completion_tokens_per_s"] for row in rows]
    phases = [row["result"]["phases_s"] for row in rows]
    series = {
        "whole step": [row["result"]["completion_tokens_per_s"] for row in rows],
        "generation": [n / phase["generation"] for n, phase in zip(tokens, phases, strict=True)],
        "log-probs and update": [n / (phase["log_probs"] + phase["update"]) for n, phase in zip(tokens, phases, strict=True)],
    }
    for name, values in series.items():
        axes.plot(at, values, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=LABELS[axis], ylabel="completion tokens/s", xticks=at, xticklabels=[f"{x:,}" for x in at])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Runs every point, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=tuple(POINTS), default=list(POINTS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "scaling.json"
    found: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.is_file() else {}
    for axis in arguments.axes:
        rows = []
        for value, fields in POINTS[axis].items():
            command = [sys.executable, str(ROOT / "benchmarks/step.py"), f"--config.model.dtype={arguments.dtype}", *overrides(fields)]
            try:
                result: Result = run(command)
            except SystemExit as error:
                print(f"{axis} {value}: {error}", flush=True)
                continue
            rows.append({"value": value, "fields": dict(fields), "result": result})
            print(f"{axis} {value}: {json.dumps(result)}", flush=True)
        if rows:
            found[axis] = rows
            plot(axis, rows).savefig(folder / f"{axis}.svg")
        file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
