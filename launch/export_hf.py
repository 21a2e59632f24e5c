"""Writes a run's policy as a Hugging Face folder that transformers and vLLM load as it is.

python launch/export_hf.py --run runs/quickstart --output FOLDER [--step N --dtype bfloat16 --shard-size-gb 5]
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import streams

if __name__ == "__main__":
    streams.protect()  # before any file is opened
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # writing files takes no accelerator from a run

from jaxprorl.errors import UserError


def main() -> int:
    """Parses the command line, exports, prints; 2 on bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, e.g. runs/quickstart")
    parser.add_argument("--output", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest undamaged one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32, what training holds")
    parser.add_argument("--shard-size-gb", type=float, default=5.0, help="largest size of a file, in 10^9 bytes (default 5)")
    arguments = parser.parse_args()
    if not 0 < arguments.shard_size_gb < float("inf"):
        parser.error(f"--shard-size-gb {arguments.shard_size_gb}: must be a positive number")

    from jaxprorl.export import export

    try:
        done = export(arguments.run, arguments.step, arguments.output, arguments.dtype, int(arguments.shard_size_gb * 1e9))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in done.damaged:
        print(f"WARNING: {problem}; passed over")
    print(f"{arguments.output}: {arguments.run}, step {done.step}, {arguments.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
