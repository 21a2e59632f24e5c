"""This system and its peers on one workload, one after the other: a table, and the numbers as JSON.

.venv/bin/python benchmarks/run.py [--dtypes float32 bfloat16] [--trl PYTHON] [--tunix PYTHON] [--torch PYTHON] [--vllm PYTHON]
    [--output FILE] [--check | --record]

Each peer's PYTHON is the interpreter of an environment with its requirements (benchmarks/peers/requirements-*.txt; `--torch` takes TRL's
environment, `--vllm` .venv-vllm/bin/python); peers without one are left out. Let nothing else run meanwhile. `--record` keeps the
ratios between peers and us in recorded.json, `--check` fails if one has fallen by more than a quarter since, or is missing although its
peer and dtype are given: ratios, because seconds are the machine's. The first run that fails ends all.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded.json"
MARGIN = 0.25  # of a ratio; two runs of the same code on one machine differ by less (docs/performance.md)
SAMPLERS = {"torch": ("run_transformers", (128,)), "vllm": ("run_vllm", (16, 128, 512))}  # peer -> script, completions at a time
SYSTEMS = {"trl": "trl", "tunix": "tunix", "torch": "transformers", "vllm": "vllm"}  # peer -> system, as its results and ratios name it
Result = dict[str, Any]


def jobs(interpreters: Mapping[str, str], dtypes: Sequence[str]) -> list[list[str]]:
    """Commands of all runs, in order."""
    commands = []
    for dtype in dtypes:
        ours, peers = [f"--config.model.dtype={dtype}"], ["--dtype", dtype]
        commands.append([sys.executable, str(HERE / "step.py"), *ours])
        if interpreters["trl"]:
            commands.append([interpreters["trl"], str(HERE / "peers/run_trl.py"), *peers])
        if interpreters["tunix"] and dtype == "float32":
            commands.append([interpreters["tunix"], str(HERE / "peers/run_tunix.py")])
        present = [(interpreters[name], *SAMPLERS[name]) for name in SAMPLERS if interpreters[name]]
        for batch in sorted({batch for *_, batches in present for batch in batches}):
            size = ["--batch", str(batch)]
            commands.append([sys.executable, str(HERE / "generation.py"), *size, *ours])
            commands += [
                [python, str(HERE / f"peers/{script}.py"), *size, *peers] for python, script, batches in present if batch in batches
            ]
    return commands


def run(command: Sequence[str]) -> Result:
    """The JSON line that a benchmark prints last; SystemExit names a command that failed, even after such a line."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"system"')]
    if done.returncode or not lines:
        seen = "after its result, which does not count" if lines else "no result"
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}, {seen}\n{done.stderr[-4000:]}")
    result: Result = json.loads(lines[-1])
    return result


def run_unchanged(command: Sequence[str]) -> Result:
    """The result of `run`, unless fields of ours were overridden: that is other work than the peers'."""
    result = run(command)
    if result.get("overrides"):  # peers have no such field
        raise SystemExit(f"{' '.join(command)}: not the workload, fields are overridden: {json.dumps(result['overrides'])}")
    return result


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """How many times a peer's seconds per step, its memory, and our sampled tokens per second are the other's. Above 1, we are ahead."""
    ours = {(result["dtype"], result.get("batch")): result for result in results if result["system"] == "jaxprorl"}
    found = {}
    for result in results:
        own = ours[result["dtype"], result.get("batch")]
        if result is own:
            continue
        name, batch = f"{result['dtype']}.{result['system']}", result.get("batch")
        if batch is None:
            found[f"{name}.step"] = (result["step_s"], own["step_s"])
            found[f"{name}.memory"] = (result["peak_memory_bytes"], own["peak_memory_bytes"])
        else:
            found[f"{name}.generation_{batch}"] = (own["completion_tokens_per_s"], result["completion_tokens_per_s"])
    return {name: round(above / below, 3) if below else math.nan for name, (above, below) in found.items()}


def sound(ratio: object) -> bool:
    """Whether it is a finite number above 0. NaN is not: every comparison with it is false."""
    return isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 < ratio < math.inf


def unsound(now: Mapping[str, float]) -> list[str]:
    """Measured ratios that are none."""
    return [f"{name}: {now[name]}, a finite number above 0 is right" for name in sorted(now) if not sound(now[name])]


def fallen(now: Mapping[str, float], recorded: Mapping[str, float], margin: float = MARGIN) -> list[str]:
    """What has become worse than the margin allows, or cannot be compared, of what both have."""
    return [
        f"{name}: {now[name]:.2f}, recorded {recorded[name]:.2f}, at least {recorded[name] * (1 - margin):.2f} is right"
        for name in sorted(now.keys() & recorded.keys())
        if not (sound(now[name]) and sound(recorded[name]) and now[name] >= recorded[name] * (1 - margin))
    ]


def expected(recorded: Mapping[str, float], interpreters: Mapping[str, str], dtypes: Sequence[str]) -> set[str]:
    """Recorded ratios that a run with these peers and dtypes must measure again."""
    starts = tuple(f"{dtype}.{system}." for dtype in dtypes for peer, system in SYSTEMS.items() if interpreters[peer])
    return {name for name in recorded if name.startswith(starts)}


def failures(now: Mapping[str, float], recorded: Mapping[str, float], wanted: set[str]) -> list[str]:
    """Why a check does not pass: ratios that are none, have fallen, or are missing though `wanted`; or nothing to compare."""
    lines = unsound(now) + fallen({name: ratio for name, ratio in now.items() if sound(ratio)}, recorded)
    lines += [f"{name}: not measured, though its peer was given; recorded {recorded[name]:.2f}" for name in sorted(wanted - now.keys())]
    return lines if now.keys() & recorded.keys() else [*lines, "nothing was compared"]


def read_recorded(file: Path) -> dict[str, float]:
    """The recorded ratios; SystemExit names a file that is not one of them."""
    right = "an object of ratios, finite numbers above 0, is right; --record makes it"
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{file}: cannot be read ({error.strerror}); {right}") from None
    except ValueError as error:
        raise SystemExit(f"{file}: not JSON ({error}); {right}") from None
    if not isinstance(recorded, dict) or not recorded:
        raise SystemExit(f"{file}: {'an empty object' if recorded == {} else f'a {type(recorded).__name__}'}; {right}")
    for name, ratio in recorded.items():
        if not sound(ratio):
            raise SystemExit(f"{file}: {name} = {ratio!r}; {right}")
    return recorded


def table(results: Sequence[Result]) -> str:
    """One line per result."""
    rows = [("system", "dtype", "batch", "step s", "generation s", "log-probs s", "update s", "tokens/s", "peak GiB")]
    for result in results:
        phases = result.get("phases_s", {})
        generation = result.get("generation_s", phases.get("generation"))
        values = (result.get("batch"), result.get("step_s"), generation, phases.get("log_probs"), phases.get("update"))
        cells = ["" if value is None else f"{value:g}" for value in values]
        speed, memory = f"{result['completion_tokens_per_s']:.0f}", f"{result['peak_memory_bytes'] / 2**30:.2f}"
        rows.append((result["system"], result["dtype"], *cells, speed, memory))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: Sequence[str]) -> int:
    """Runs, prints, writes, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    for peer in SYSTEMS:
        parser.add_argument(f"--{peer}", default="", metavar="PYTHON")
    parser.add_argument("--output", type=Path, default=HERE.parent / "runs" / "benchmark" / "peers.json")
    after = parser.add_mutually_exclusive_group()
    after.add_argument("--check", action="store_true", help="exit with 1 if a ratio has fallen, or is missing")
    after.add_argument("--record", action="store_true", help="keep the ratios in recorded.json")
    arguments = parser.parse_args(argv)
    interpreters: dict[str, str] = {peer: getattr(arguments, peer) for peer in SYSTEMS}
    for peer, python in interpreters.items():
        if python and not shutil.which(python):
            parser.error(f"--{peer} {python}: no such program; name the interpreter of the peer's environment")
    commands = jobs(interpreters, arguments.dtypes)
    recorded = read_recorded(RECORDED) if arguments.check else {}
    wanted = expected(recorded, interpreters, arguments.dtypes)
    if arguments.check and not wanted:
        raise SystemExit(
            f"--check: nothing to compare, {RECORDED} has no ratio of the peers and dtypes that are given; name a peer that it has"
        )
    if arguments.record and all(Path(script).parent == HERE for _, script, *_ in commands):
        raise SystemExit(f"--record: no ratio without a peer, {RECORDED} stays as it is; name a peer")
    results = []
    for command in commands:
        results.append(run_unchanged(command))
        print(json.dumps(results[-1]), flush=True)
    found = ratios(results)
    print(table(results), "", *(f"{name}: {value:g}" for name, value in found.items()), sep="\n")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"results": results, "ratios": found}, indent=2) + "\n")
    problems = []
    if arguments.record:
        problems = [f"{line}; {RECORDED} stays as it is" for line in unsound(found) or ([] if found else ["no ratio"])]
        if not problems:
            RECORDED.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    if arguments.check:
        for name, others in (("compared", recorded.keys() - found.keys() - wanted), ("recorded", found.keys() - recorded.keys())):
            if others:
                print(f"not {name}: {', '.join(sorted(others))}")
        problems = failures(found, recorded, wanted)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
