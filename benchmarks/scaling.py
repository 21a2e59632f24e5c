"""How a step scales: with the number of completions, with their length at a fixed number of tokens, with the vocabulary.

.venv/bin/python benchmarks/scaling.py [--axes batch length vocabulary] [--dtype bfloat16] [--output FOLDER]

Every point is a run of step.py in a process of its own; one that fails (for want of memory, say) is left out and named, and the exit
status is 1. Writes scaling.json and one SVG per axis into the folder (default: docs/performance); an axis without any point stays as
it was there, and is named too.
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
from matplotlib.ticker import LogLocator

from benchmarks.run import Result, run
from benchmarks.workload import WORK

# axis -> value -> fields of step.py's config. Lengths share 16,384 tokens a step: fewer prompts, then fewer samples of each, but not fewer
# prompts than devices, which sample different ones. The vocabulary grows with fewer completions, because its end takes 100 times the work.
POINTS: Mapping[str, Mapping[int, Mapping[str, int]]] = {
    "batch": {8 * prompts: {"batch.prompts": prompts} for prompts in (2, 4, 16, 64)},
    "length": {
        length: {"batch.prompts": prompts, "rollout.samples_per_prompt": samples, "rollout.max_response_tokens": length}
        for length, prompts, samples in ((128, 16, 8), (512, 4, 8), (2048, 2, 4), (4096, 2, 2))
    },
    "vocabulary": {size: {"batch.prompts": 4, "workload.model.vocab_size": size} for size in (512, 4096, 32768, 151936)},
}
LABELS = {
    "batch": "completions per step, of 128 tokens", "length": "response tokens, 16,384 per step",
    "vocabulary": "vocabulary size, 32 completions per step, of 128 tokens",
}  # fmt: skip


def overrides(fields: Mapping[str, int]) -> list[str]:
    """Arguments of step.py for one point, with what follows from its fields: the same for the same work, whatever the axis."""
    samples = fields.get("rollout.samples_per_prompt", WORK["samples_per_prompt"])
    length = fields.get("rollout.max_response_tokens", WORK["response_tokens"])
    values: dict[str, int | str] = {
        "workload.model.vocab_size": fields.get("workload.model.vocab_size", WORK["model"]["vocab_size"]),
        "batch.prompts": fields["batch.prompts"],
        "batch.refill_prompts": fields["batch.prompts"], "rollout.samples_per_prompt": samples,
        "rollout.slots": fields["batch.prompts"] * samples, "rollout.min_response_tokens": length, "rollout.max_response_tokens": length,
        "steps": 3, "workload.warmup_steps": 1,
    }  # fmt: skip
    if length != WORK["response_tokens"]:  # else as step.py has it
        values["batch.row_tokens"] = WORK["prompt_tokens"] + length
    return [f"--config.{name}={value}" for name, value in values.items()]


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
    axes.set_title(", ".join(sorted({row["result"]["dtype"] for row in rows})), loc="left", fontsize="medium")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0.6 * min(map(min, series.values())), 1.6 * max(map(max, series.values())))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper right", ncols=len(series), frameon=False)
    return figure


def main(argv: Sequence[str]) -> int:
    """Runs every point, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=tuple(POINTS), default=list(POINTS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    file, step = folder / "scaling.json", str(ROOT / "benchmarks/step.py")
    found: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.is_file() else {}
    measured: dict[tuple[str, ...], Result] = {}
    failed = []
    for axis in arguments.axes:
        rows = []
        for value, fields in POINTS[axis].items():
            point = tuple(overrides(fields))
            try:
                if point not in measured:  # a point may lie on two axes
                    measured[point] = run([sys.executable, step, f"--config.model.dtype={arguments.dtype}", *point])
            except SystemExit as error:
                print(f"{axis} {value}: {error}", flush=True)
                failed.append(f"{axis} {value}")
                continue
            rows.append({"value": value, "fields": dict(fields), "result": measured[point]})
            print(f"{axis} {value}: {json.dumps(measured[point])}", flush=True)
        if rows:
            found[axis] = rows
            plot(axis, rows).savefig(folder / f"{axis}.svg")
            file.write_text(json.dumps(found, indent=2) + "\n")
        elif axis in found:
            failed.append(f"all of {axis} ({file} and {axis}.svg keep what an earlier run measured)")
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
