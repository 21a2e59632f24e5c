"""Compiles a program for devices that need not exist, in a process of its own, and writes its optimised HLO.

`python tests/compile_program.py TARGET MODULE:FUNCTION OUT [ARGUMENT ...]`, where FUNCTION(devices, *ARGUMENTS) returns a jitted function
and its abstract arguments. `accelerators.py` sets the environment, which must be there before JAX is imported.
"""

import importlib
import sys
from pathlib import Path

import jax
from jax.experimental import topologies

H100 = Path(__file__).parent / "models/data/h100_target_config.txtpb"


def devices(target: str) -> list[jax.Device]:
    """Eight devices of a target of `accelerators.py`."""
    if target == "h100":
        shape = "1x1x8"  # slices x hosts x GPUs of a host
        return list(topologies.get_topology_desc(shape, platform="cuda", topology=shape, target_config=H100.read_text()).devices)
    if target == "v5e":
        return list(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices)
    jax.config.update("jax_num_cpu_devices", 8)
    return jax.devices()


def main(target: str, program: str, out: str, *arguments: str) -> None:
    module, function = program.split(":")
    jitted, abstract = getattr(importlib.import_module(module), function)(devices(target), *arguments)
    Path(out).write_text(jitted.lower(*abstract).compile().as_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
