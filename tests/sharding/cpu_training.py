"""The training step of a small model compiled for eight CPU devices under every strategy, for test_wire.py: writes FOLDER/STRATEGY.hlo.txt.

`python tests/sharding/cpu_training.py FOLDER`, in a process of its own.
"""

import sys
from pathlib import Path

import jax
import programs
from factories import QUICK_COMPILE

from jaxprorl.sharding.strategies import STRATEGIES

SIZES = {"fsdp_tp": "tensor=2", "fsdp_cp": "context=4"}  # mesh sizes where the strategy needs one


def main(folder: Path) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    for strategy in STRATEGIES:
        step, abstract = programs.training(jax.devices(), "train_step", strategy, SIZES.get(strategy, ""), model="small")
        (folder / f"{strategy}.hlo.txt").write_text(step.lower(*abstract).compile(compiler_options=QUICK_COMPILE).as_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
