# Finds a Python and makes the two environments: .venv (JAX) and .venv-vllm (PyTorch and vLLM: rollout workers, parity tests).
# Sourced by the other scripts, which run it from the checkout's root. Defines functions only; bash 3.2 suffices.

supported_pythons="3.13 3.12 3.11" # best first
vllm_pythons="3.11"                # the one that the pins of requirements-vllm*.txt install on

# A file opened where descriptor 0, 1 or 2 is closed would become a standard stream, and messages would be written into it.
open_descriptors() {
  [ -e /dev/fd/0 ] || exec </dev/null
  [ -e /dev/fd/1 ] || exec >/dev/null
  [ -e /dev/fd/2 ] || exec 2>/dev/null
}

say() { printf '%s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# probe_python PYTHON: prints "VERSION EXECUTABLE" of an interpreter that can make environments, else fails and prints why it cannot.
# The executable is the one behind shims and virtual environments, which may vanish when their own environment is made again.
probe_python() {
  local answer
  answer=$("$1" -I -c '
import os, sys
version = "%d.%d" % sys.version_info[:2]
if sys.implementation.name != "cpython":
    sys.exit(print("is %s, not CPython" % sys.implementation.name))
import sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(print("is a free-threaded build"))
try:
    import ctypes, ensurepip, ssl, venv
except ImportError as error:
    sys.exit(print("is Python %s without its module %s" % (version, error.name)))
base = getattr(sys, "_base_executable", None)
print("ok", version, base if base and os.path.exists(base) else sys.executable)
' 2>/dev/null </dev/null) || answer=
  case $answer in
    "ok "*) printf '%s\n' "${answer#ok }" ;;
    "") echo "does not run"; return 1 ;;
    *) printf '%s\n' "$answer"; return 1 ;;
  esac
}

# python_candidates VERSION...: paths that may be such a Python, one a line. A path that is listed need not work.
python_candidates() {
  local version root path
  [ -z "${JAXPRORL_PYTHON:-}" ] || printf '%s\n' "$JAXPRORL_PYTHON"
  for version in "$@"; do
    command -v "python$version"
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
      for path in "$root/versions/$version"/bin/python "$root/versions/$version".*/bin/python; do
        [ ! -x "$path" ] || printf '%s\n' "$path"
      done
    done
    if command -v uv >/dev/null; then uv python find --system "$version" 2>/dev/null </dev/null; fi
    for root in "${UV_PYTHON_INSTALL_DIR:-}" "${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python"; do
      for path in "$root/cpython-$version"*/bin/python3; do
        [ ! -x "$path" ] || printf '%s\n' "$path"
      done
    done
  done
  command -v python3
  command -v python
  return 0
}

# search_python VERSION...: prints "VERSION EXECUTABLE" of the first version that some candidate really is.
search_python() {
  local wanted=$* candidate answer version found="" rejected=""
  while IFS= read -r candidate; do
    if ! answer=$(probe_python "$candidate"); then
      rejected="$rejected
  $candidate $answer"
      continue
    fi
    case " $wanted " in
      *" ${answer%% *} "*) found="$found$answer
" ;;
      *) rejected="$rejected
  $candidate is Python ${answer%% *}" ;;
    esac
  done <<EOF
$(python_candidates "$@" | awk '!seen[$0]++')
EOF
  for version in "$@"; do
    while IFS= read -r answer; do
      if [ "${answer%% *}" = "$version" ]; then
        printf '%s\n' "$answer"
        return 0
      fi
    done <<EOF
$found
EOF
  done
  say "error: found no working Python ${wanted// / or }.
Looked for python3.x, python3 and python on PATH, and in pyenv's and uv's folders.${rejected:+ Found, but of no use:$rejected}
Install one, with its venv module, and run this again:
  Debian, Ubuntu: apt install python3 python3-venv      uv: uv python install $1      pyenv: pyenv install $1
or name an interpreter: JAXPRORL_PYTHON=/path/to/python$1"
  return 1
}

# choose_python: prints "VERSION EXECUTABLE" of the Python for .venv: JAXPRORL_PYTHON if set, else the best that is found.
choose_python() {
  local answer remedy="Set it to a working Python ${supported_pythons// / or } with its venv module, or unset it: then one is looked for."
  if [ -z "${JAXPRORL_PYTHON:-}" ]; then
    # shellcheck disable=SC2086 # a list of versions
    search_python $supported_pythons
    return
  fi
  if ! answer=$(probe_python "$JAXPRORL_PYTHON"); then
    say "error: JAXPRORL_PYTHON=$JAXPRORL_PYTHON $answer. $remedy"
    return 1
  fi
  case " $supported_pythons " in
    *" ${answer%% *} "*) printf '%s\n' "$answer" ;;
    *)
      say "error: JAXPRORL_PYTHON=$JAXPRORL_PYTHON is Python ${answer%% *}. $remedy"
      return 1
      ;;
  esac
}

# The stamp DIR/.ready-FILE says that FILE's requirements are all installed: Python's version and the file's text, written last.
environment_stamp() { # DIR FILE
  "$1/bin/python" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null && cat "$2"
}

environment_is_ready() { # DIR FILE...
  local dir=$1 file
  shift
  for file in "$@"; do
    environment_stamp "$dir" "$file" | cmp -s - "$dir/.ready-${file##*/}" || return 1
  done
  [ ! -e "$dir/.installing" ]
}

# lock_9 [-n]: takes the kernel's lock on descriptor 9, with -n only if that needs no waiting. Prints "held", "busy" or "none" (no locks here).
# Where there is no flock command, as on macOS, the first Python that works takes it: the lock belongs to the descriptor, which stays open here.
lock_9() {
  local candidate answer status=0
  if command -v flock >/dev/null; then
    flock ${1:+"$1"} 9 2>/dev/null || status=$?
    case "${1:-} $status" in *" 0") echo held ;; "-n 1") echo busy ;; *) echo none ;; esac
    return 0
  fi
  while IFS= read -r candidate; do
    answer=$("$candidate" -I -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if "-n" in sys.argv else 0))
    print("held")
except BlockingIOError:
    print("busy")
except OSError:
    print("none")
' ${1:+"$1"} 2>/dev/null </dev/null) || continue
    case $answer in held | busy | none) printf '%s\n' "$answer"; return 0 ;; esac
  done <<EOF
$(
    # shellcheck disable=SC2086 # a list of versions
    python_candidates $supported_pythons
  )
EOF
  echo none
}

# with_lock DIR COMMAND...: scripts that start together install into DIR one after the other.
# The lock ends with the subshell and what it started, so that nothing started later inherits it.
with_lock() {
  local dir=$1 lock=".cache/install$1.lock" holder=
  shift
  mkdir -p .cache || return 1
  (
    case $(lock_9 -n) in
      busy)
        for _ in 1 2 3; do [ -s "$lock" ] || sleep 1; done # it has the lock and is about to write its name
        read -r holder <"$lock" || :
        say "${holder:-Another script} is installing into $dir; waiting for it."
        [ "$(lock_9)" = held ] || say "WARNING: $lock cannot be locked; nothing else may install into $dir meanwhile."
        ;;
      none) say "WARNING: $lock cannot be locked; nothing else may install into $dir meanwhile." ;;
    esac
    printf 'Process %s on %s\n' "$$" "${HOSTNAME:-this machine}" >"$lock" || exit 1
    trap ': >"$lock"' EXIT
    "$@"
  ) 9>>".cache/install$dir.lock"
}

# environment_version DIR: Python's version in an environment that has pip and no interrupted installation, else fails.
environment_version() {
  [ ! -e "$1/.installing" ] && "$1/bin/python" -I -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null
}

# begin_environment DIR VERSION EXECUTABLE: DIR is an environment of that version, marked as unfinished.
# What an interrupted installation left is removed; an environment made by hand is used if it fits and never removed.
begin_environment() {
  local dir=$1 version=$2 executable=$3 current
  current=$(environment_version "$dir") || current=
  if [ "$current" != "$version" ]; then
    if [ -e "$dir" ] && [ ! -e "$dir/.made-by-launch" ]; then
      say "error: the folder $dir was not made by these scripts and is no Python $version environment with pip."
      say "Remove it (rm -r $dir) to have it made, or set JAXPRORL_PYTHON to an interpreter of its version."
      return 1
    fi
    rm -rf "$dir" && mkdir "$dir" && : >"$dir/.made-by-launch" && : >"$dir/.installing" || return 1
    "$executable" -m venv "$dir" || return 1
  elif [ -e "$dir/.made-by-launch" ]; then
    : >"$dir/.installing" || return 1
  fi
  rm -f "$dir"/.ready-*
}

pip_in() { # DIR PIP-ARGUMENTS...
  local dir=$1
  shift
  "$dir/bin/python" -m pip "$@" -qq --disable-pip-version-check --no-input </dev/null
}

finish_environment() { # DIR FILE...
  local dir=$1 file
  shift
  for file in "$@"; do
    environment_stamp "$dir" "$file" >"$dir/.stamp" && mv "$dir/.stamp" "$dir/.ready-${file##*/}" || return 1
  done
  rm -f "$dir/.installing"
}

# install_all DIR FILE...: installs the requirement files into DIR, whose Python stays.
install_all() {
  local dir=$1 purelib
  shift
  if grep -q '^pycosat==' "$@" && ! can_compile "$dir"; then
    say "No C compiler or no Python headers here: going without pycosat, which only reasoning-gym's zebra_puzzles use."
    grep -hvE '^(pycosat|reasoning_gym)==' "$@" >"$dir/.without" && grep -h '^reasoning_gym==' "$@" >"$dir/.alone" || return 1
    purelib=$("$dir/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
    install_files "$dir" "$dir/.without" && install_files "$dir" "$dir/.alone" --no-deps && cat >"$purelib/pycosat.py" <<'EOF'
"""Stands in for the compiled package, which reasoning-gym imports but only its zebra_puzzles use."""


def solve(*args, **kwargs):
    raise ImportError(
        "zebra_puzzles need pycosat, and that a C compiler: install one with Python's headers "
        "(Debian, Ubuntu: apt install gcc python3-dev), remove .venv and start again"
    )


itersolve = solve
EOF
    return
  fi
  install_files "$dir" "$@"
}

install_files() { # DIR FILE-OR-OPTION...
  local dir=$1 argument
  shift
  for argument in "$@"; do
    case $argument in --*) set -- "$@" "$argument" ;; *) set -- "$@" -r "$argument" ;; esac
    shift
  done
  pip_in "$dir" install "$@" && return
  say "error: installing into $dir failed; pip's message is above. Once that is solved, run this again: it starts afresh."
  return 1
}

# can_compile DIR: C extensions can be built for its Python.
can_compile() {
  local compiler
  compiler=$("$1/bin/python" -I -c '
import os, sysconfig
if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print(os.environ.get("CC") or sysconfig.get_config_var("CC") or "")
') || return 1
  [ -n "$compiler" ] && command -v "${compiler%% *}" >/dev/null
}

count_requirements() { cat "$@" | grep -v 'python_version <' | grep -c '=='; }

install_main() { # FILE...
  environment_is_ready .venv "$@" && return # made by another script meanwhile
  local current chosen
  current=$(environment_version .venv) || current=
  # An environment that fits is kept, whatever newer Python appeared since.
  if [ -n "${JAXPRORL_PYTHON:-}" ] || [[ " $supported_pythons " != *" ${current:-none} "* ]]; then
    chosen=$(choose_python) || return 1
  else
    chosen="$current .venv/bin/python"
  fi
  say "Installing $(count_requirements "$@") packages for Python ${chosen%% *} (${chosen#* }) into .venv; once, a minute or two."
  begin_environment .venv "${chosen%% *}" "${chosen#* }" && install_all .venv "$@" && finish_environment .venv "$@"
}

# main_environment FILE...: .venv exists and holds these requirement files.
main_environment() {
  if environment_is_ready .venv "$@"; then
    [ -n "${JAXPRORL_PYTHON:-}" ] || return 0
    local chosen
    chosen=$(choose_python) || return 1
    [ "$(environment_version .venv)" != "${chosen%% *}" ] || return 0
    rm -f .venv/.ready-* # another version is asked for: made anew
  fi
  with_lock .venv install_main "$@"
}

vllm_requirements() { # PLATFORM: its requirement file
  case $1 in cpu) echo requirements-vllm.txt ;; *) echo "requirements-vllm-$1.txt" ;; esac
}

install_vllm() { # PLATFORM
  local file chosen other
  file=$(vllm_requirements "$1")
  environment_is_ready .venv-vllm "$file" && return # made by another script meanwhile
  # shellcheck disable=SC2086 # a list of versions
  chosen=$(search_python $vllm_pythons) || return 1
  for other in .venv-vllm/.ready-*; do # the builds for other devices are packages of other names with the same files: made anew
    if [ -e "$other" ] && [ "$other" != ".venv-vllm/.ready-$file" ]; then : >.venv-vllm/.installing; fi
  done
  say "Installing PyTorch and vLLM ($1) for Python ${chosen%% *} (${chosen#* }) into .venv-vllm; once, minutes and gigabytes (cpu: 3 to 5, 3 GB)."
  begin_environment .venv-vllm "${chosen%% *}" "${chosen#* }" && install_all .venv-vllm "$file" || return 1
  if [ "$1" = cpu ]; then
    # vLLM asks for these, text models need none of them, and torchvision's release does not fit the pinned torch: it breaks every import.
    pip_in .venv-vllm uninstall -y torchvision torchaudio torchcodec triton || return 1
  fi
  if ! VLLM_LOGGING_LEVEL=ERROR .venv-vllm/bin/python -c 'import torch, transformers, vllm' </dev/null; then
    say "error: .venv-vllm is installed, but its Python cannot import torch, transformers and vllm (message above)."
    return 1
  fi
  finish_environment .venv-vllm "$file"
}

# vllm_environment [PLATFORM]: .venv-vllm exists and holds vLLM for cpu, gpu or tpu; without one, any will do, and cpu is installed.
vllm_environment() {
  local platform
  for platform in ${1:-cpu gpu tpu}; do
    environment_is_ready .venv-vllm "$(vllm_requirements "$platform")" && return
  done
  with_lock .venv-vllm install_vllm "${1:-cpu}"
}
