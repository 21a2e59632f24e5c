"""Records HLO for the tests of the reader and of the bounds: `python tests/sharding/record_hlo.py [cpu] [h100] [v5e] [training]`.

Run it with an interpreter that has the compilers ('.[gpu-compiler]', '.[tpu]'). The numbers expected in `test_collectives.py` and
`test_wire.py` follow from the programs; if they no longer hold after recording anew, look at what the compiler does now before you
change them. `training` is the training step of the 1.5B model on eight H100s, a minute for each strategy.
"""

import gzip
import importlib.metadata
import re
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelerators import optimised_hlo

from jaxprorl.sharding.collectives import RING_COST
from jaxprorl.sharding.hlo import parse_module

FOLDER = Path(__file__).parent / "hlo"
PROGRAMS = ("kinds", "layers")
COMPILERS = {"cpu": "jaxlib", "h100": "jax-cuda12-pjrt", "v5e": "libtpu"}
TRAINING = {"dp": "", "zero1": "", "fsdp": "", "fsdp_tp": "tensor=2"}  # strategy -> mesh sizes
CALLS = ("calls", "to_apply", "called_computations", "body", "condition", "branch_computations", "true_computation", "false_computation")


def recorded(target: str, program: str) -> str:
    return gzip.decompress((FOLDER / f"{target}_{program}.hlo.txt.gz").read_bytes()).decode()


def record(target: str, program: str, *arguments: str) -> None:
    text = optimised_hlo(target, f"programs:{program}", *arguments)
    # The tables of source files and stack frames name this machine's folders.
    text = re.sub(r"^FileNames\n.*?(?=^(?:ENTRY )?%)", "", text, flags=re.MULTILINE | re.DOTALL)
    name = "_".join((program, *arguments[1:2]))
    if program == "training":
        text = pruned(text)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", COMPILERS[target]))
    text = f"// {name} for eight devices, {target}; {versions}\n{text}"
    (FOLDER / f"{target}_{name}.hlo.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def pruned(text: str) -> str:
    """A tenth of the text: computations that hold no collective, nor call one that does, keep their last line only."""
    module = parse_module(text)

    @cache
    def sends(name: str) -> bool:
        instructions = module.computations[name].instructions.values()
        return any(i.opcode.removesuffix("-start") in RING_COST or any(map(sends, i.called(*CALLS))) for i in instructions)

    lines, inside = [], ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            inside = header[1]
        if inside and line.startswith("  ") and not line.startswith("  ROOT ") and not sends(inside):
            continue
        trips = re.search(r'"known_trip_count":\{"n":"\d+"\}', line)
        line = re.sub(r", backend_config=.*", f", backend_config={{{trips[0]}}}" if trips else "", line)
        lines.append(re.sub(r"metadata=\{(?:[^}]*?(op_name=\"[^\"]*\"))?[^}]*\}", r"metadata={\1}", line))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for target in sys.argv[1:] or (*COMPILERS, "training"):
        if target == "training":
            for strategy, sizes in TRAINING.items():
                record("h100", "training", "train_step", strategy, sizes)
        else:
            for program in PROGRAMS:
                record(target, program)
