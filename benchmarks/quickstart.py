"""Runs the quickstart with several seeds, one after the other, and checks what it must reach.

.venv/bin/python benchmarks/quickstart.py [--seeds 0 1 2] [--repeat] [--runs-dir runs/benchmark]

Every run starts from an empty cache folder (nothing compiled, no base model). `--repeat` runs the first seed a second time and compares
the two bit by bit. Prints one table and one JSON line; exits 1 if a target is missed. Let nothing else run meanwhile.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxprorl.evaluation.statistics import gain_rows
from jaxprorl.monitoring import jsonl

TARGETS = {
    "total": "whole run at most 480 s",
    "rl": "RL at most 240 s",
    "start": "start model solves 20 to 35 %",
    "gain": "solve rate up by at least 45 points, intervals apart",
    "tasks": "every task up by at least 30 points, intervals apart",
    "memory": "peak memory at most 4 GiB",
}


def run(runs_dir: Path, name: str, seed: int) -> dict[str, Any]:
    """One whole quickstart from an empty cache; returns its summary."""
    cache = runs_dir / f"{name}.cache"
    for folder in (cache, runs_dir / name):
        shutil.rmtree(folder, ignore_errors=True)
    settings = {"runs_dir": runs_dir, "run_name": name, "seed": seed, "cache_dir": cache}
    command = [sys.executable, "launch/train.py", "--config=configs/quickstart.py", *(f"--config.{k}={v}" for k, v in settings.items())]
    with (runs_dir / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    summary: dict[str, Any] = json.loads((runs_dir / name / "summary.json").read_text())
    return summary


def verdicts(summary: dict[str, Any]) -> dict[str, bool]:
    """Which targets one run meets."""
    *tasks, everything = gain_rows(summary["before"], summary["after"])
    gains = [-1.0 if row.gain is None else row.gain for row in (*tasks, everything)]  # none: an evaluation could not be graded
    return {
        "total": summary["seconds"]["total"] <= 480,
        "rl": summary["seconds"]["rl"] <= 240,
        "start": 0.20 <= summary["before"]["solve_rate"] <= 0.35,
        "gain": gains[-1] >= 0.45 and everything.clear,
        "tasks": min(gains[:-1]) >= 0.30 and all(row.clear for row in tasks),
        "memory": summary["peak_memory_bytes"] <= 4 * 2**30,
    }


def trace(run_dir: Path) -> dict[str, str]:
    """Digests of everything in a run that must repeat bit for bit."""

    def lines(path: Path, clock: str) -> bytes:
        rows = [{k: v for k, v in row.items() if not k.startswith(clock)} for row in jsonl.read(path)]
        return json.dumps(rows, sort_keys=True).encode()

    parts = {"metrics": lines(run_dir / "metrics.jsonl", "time."), "events": lines(run_dir / "events.jsonl", "time_")}
    parts["model"] = (run_dir / "model" / "model.safetensors").read_bytes()
    parts["samples"] = b"".join(file.read_bytes() for file in sorted((run_dir / "samples").iterdir()))
    return {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}


def main() -> int:
    """Runs, prints, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeat", action="store_true", help="run the first seed twice and compare bit by bit")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "benchmark")
    arguments = parser.parse_args()
    runs_dir: Path = arguments.runs_dir.absolute()
    runs_dir.mkdir(parents=True, exist_ok=True)
    missed, rows = [], []
    print("seed  before  after   gain  worst task  warm start s   RL s  total s  tokens/s  peak GiB  missed")
    for seed in arguments.seeds:
        summary = run(runs_dir, f"seed-{seed}", seed)
        *tasks, everything = gain_rows(summary["before"], summary["after"])
        bad = [name for name, met in verdicts(summary).items() if not met]
        missed += [f"seed {seed}: {TARGETS[name]}" for name in bad]
        seconds, worst = summary["seconds"], min(-1.0 if row.gain is None else row.gain for row in tasks)
        rows.append({"seed": seed, "before": everything.before, "after": everything.after, "worst_task_gain": worst, **seconds})
        cells = [f"{seed:4d}", f"{everything.before:7.3f}", f"{everything.after:6.3f}", f"{everything.gain:+6.3f}", f"{worst:+11.3f}"]
        cells += [f"{seconds['warm_start']:13.1f}", f"{seconds['rl']:6.1f}", f"{seconds['total']:8.1f}"]
        cells += [f"{summary['completion_tokens_per_s']:9.0f}", f"{summary['peak_memory_bytes'] / 2**30:9.2f}", f" {', '.join(bad) or '-'}"]
        print(" ".join(cells), flush=True)
    if arguments.repeat:
        seed = arguments.seeds[0]
        run(runs_dir, f"seed-{seed}-again", seed)
        first, second = trace(runs_dir / f"seed-{seed}"), trace(runs_dir / f"seed-{seed}-again")
        differ = [name for name in first if first[name] != second[name]]
        missed += [f"seed {seed} twice: {name} differ" for name in differ]
        print(f"seed {seed} twice: {'bit for bit equal' if not differ else 'different ' + ', '.join(differ)}")
    print(json.dumps({"runs": rows, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
