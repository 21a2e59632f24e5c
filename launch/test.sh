#!/usr/bin/env bash
# Makes both environments and checks everything: ruff, mypy, pytest.
#   bash launch/test.sh [--quick | --long] [pytest arguments]
#   --quick  leaves out slow and long tests, and does not make the second environment (.venv-vllm)
#   --long   leaves out nothing
# Tests run in two processes; -n 0 has them in one, as --pdb needs.
# Without the second environment its parity tests are skipped and counted; with CI=true or JAXPRORL_REQUIRE_VLLM=1 that is a failure.
# JAXPRORL_VLLM_PYTHON names a ready interpreter to use in its place. Where pip finds only CUDA builds of torch, add PyTorch's public
# index of CPU wheels through PIP_EXTRA_INDEX_URL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/environment.sh
open_descriptors

tier=default
tests="not long"
case "${1:-}" in
  --quick) tier=quick tests="not slow and not long" && shift ;;
  --long) tier=long tests="" && shift ;;
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' launch/test.sh && exit ;;
esac
if [ "${CI:-}" = true ]; then export JAXPRORL_REQUIRE_VLLM=1; fi

main_environment requirements.txt requirements-test.txt

missing=""
if [ -z "${JAXPRORL_VLLM_PYTHON:-}" ] && ! environment_is_ready .venv-vllm requirements-vllm.txt; then
  if [ "${JAXPRORL_REQUIRE_VLLM:-}" = 1 ]; then
    vllm_environment || fail "the second environment (.venv-vllm) cannot be made, and CI=true or JAXPRORL_REQUIRE_VLLM=1 asks for it."
  elif [ "$tier" = quick ]; then
    missing="--quick does not make it"
  else
    vllm_environment || missing="it cannot be made, see the error at the top"
  fi
fi

failed=""
check() { # NAME COMMAND...
  say "== $1"
  local name=$1
  shift
  "$@" || failed="${failed:+$failed, }$name"
}
check "ruff check" .venv/bin/python -m ruff check .
check "ruff format" .venv/bin/python -m ruff format --check .
check "mypy" .venv/bin/python -m mypy
check "pytest ($tier)" .venv/bin/python -m pytest -n 2 -m "$tests" "$@"

if [ -n "$missing" ]; then say "NO SECOND ENVIRONMENT (.venv-vllm): $missing. Parity tests were SKIPPED; pytest's summary counts them."; fi
if [ -n "$failed" ]; then fail "failed: $failed"; fi
say "All checks passed."
