#!/usr/bin/env bash
# From a bare machine to a better model: makes .venv on the first run, then trains configs/quickstart.py.
#   bash launch/quickstart.sh [--config.seed=3 --config.run_name=mine --config.steps=12 ...]
# --config.rollout.engine=vllm samples with vLLM worker processes, and makes their environment, .venv-vllm, first.
# Needs Python 3.13, 3.12 or 3.11 with venv; JAXPRORL_PYTHON names a particular one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/environment.sh
open_descriptors

needs_vllm=no
flag=
for argument in "$@"; do # --FLAG=VALUE is one argument, --FLAG VALUE two
  case $flag in --config.rollout.*) argument=$flag=$argument ;; esac
  flag=
  case $argument in
    --config.rollout.engine | --config.rollout.vllm.python) flag=$argument ;;
    --config.rollout.engine=vllm) if [ $needs_vllm = no ]; then needs_vllm=yes; fi ;;
    --config.rollout.vllm.python=*) needs_vllm=elsewhere ;;
  esac
done

main_environment requirements.txt
if [ $needs_vllm = yes ]; then vllm_environment; fi
exec .venv/bin/python launch/train.py --config=configs/quickstart.py "$@"
