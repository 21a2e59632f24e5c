#!/usr/bin/env bash
# From a bare machine to a better model: makes .venv on the first run, then trains configs/quickstart.py.
#   bash launch/quickstart.sh [--config.seed=3 --config.run_name=mine --config.steps=12 ...]
# Needs Python 3.13, 3.12 or 3.11 with venv; JAXPRORL_PYTHON names a particular one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/environment.sh

main_environment requirements.txt
exec .venv/bin/python launch/train.py --config=configs/quickstart.py "$@"
