"""Records the HLO of the small programs for the tests of the reader: `python tests/sharding/record_hlo.py [cpu] [h100] [v5e]`.

Run it with an interpreter that has the compilers ('.[gpu-compiler]', '.[tpu]'). The numbers expected in `test_collectives.py` follow
from the programs; if they no longer hold after recording anew, look at what the compiler does now before you change them.
"""

import gzip
import importlib.metadata
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelerators import optimised_hlo

FOLDER = Path(__file__).parent / "hlo"
PROGRAMS = ("kinds", "layers")
COMPILERS = {"cpu": "jaxlib", "h100": "jax-cuda12-pjrt", "v5e": "libtpu"}


def recorded(target: str, program: str) -> str:
    return gzip.decompress((FOLDER / f"{target}_{program}.hlo.txt.gz").read_bytes()).decode()


def record(target: str, program: str) -> None:
    text = optimised_hlo(target, f"programs:{program}")
    # The tables of source files and stack frames name this machine's folders.
    text = re.sub(r"^FileNames\n.*?(?=^(?:ENTRY )?%)", "", text, flags=re.MULTILINE | re.DOTALL)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", COMPILERS[target]))
    text = f"// {program} for eight devices, {target}; {versions}\n{text}"
    (FOLDER / f"{target}_{program}.hlo.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for target in sys.argv[1:] or COMPILERS:
        for program in PROGRAMS:
            record(target, program)
