"""Standard streams that are closed, break, are not read or have another encoding, in real processes."""

import itertools
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Says on descriptor 9, which stays, what became of the streams.
PROGRAM = """
import os, subprocess, sys
from jaxprorl import streams
streams.protect({wait})
{work}
sys.stdout.flush()
os.write(9, repr({result}).encode())
sys.exit(7)
"""


def run(work: str, result: str = "streams.lost", wait: str = "", output: int | None = None, shell: str = "", **variables: str) -> str:
    """What the program tells on descriptor 9. Its exit status is its own, and nothing is on its standard error."""
    ours, theirs = os.pipe()
    program = PROGRAM.format(work=work, result=result, wait=wait)
    command = ["bash", "-c", f'exec "$0" -c "$1" 9>&{theirs} {shell}', sys.executable, program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    try:
        done = subprocess.run(
            command, env=environment, stdout=output, stderr=None if "2>" in shell else subprocess.PIPE, pass_fds=[theirs], timeout=60,
            check=False,
        )  # fmt: skip
    finally:
        os.close(theirs)
    with os.fdopen(ours) as told:
        found = told.read()
    assert (done.returncode, done.stderr or b"") == (7, b"")
    return found


CLOSED = [combination for size in range(4) for combination in itertools.combinations(("<&-", ">&-", "2>&-"), size)]


@pytest.mark.parametrize("closed", CLOSED, ids=" ".join)
def test_whatever_was_closed_a_file_gets_no_standard_number_and_children_find_all_three_open(closed: tuple[str, ...]) -> None:
    child = "import os; [os.fstat(number) for number in range(3)]"
    work = f"file = open('/dev/zero'); print('x'); print('x', file=sys.stderr); child = subprocess.run([sys.executable, '-c', {child!r}])"
    result = "(file.fileno() > 2, child.returncode, streams.lost)"
    expected = "(True, 0, {})"
    if "2>&-" not in closed:
        work = work.replace("print('x', file=sys.stderr);", "")
    assert run(work, result, output=subprocess.DEVNULL, shell=" ".join(closed)) == expected


def broken_pipe() -> int:
    ours, theirs = os.pipe()
    os.close(ours)
    return theirs


def gone_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize(
    ("output", "why"), [(broken_pipe, "Broken pipe"), (gone_terminal, "Input/output error"), (full_disk, "No space left on device")]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_raises_nothing_and_is_noted(output: Callable[[], int], why: str, unbuffered: str) -> None:
    descriptor = output()
    try:
        found = run("for _ in range(10000): print('a line')", output=descriptor, PYTHONUNBUFFERED=unbuffered)
    finally:
        os.close(descriptor)
    assert found == repr({"standard output": why})


def test_a_reader_that_does_not_read_is_waited_for_only_so_long() -> None:
    ours, theirs = os.pipe()
    try:
        assert run("print('x' * 200_000)", wait="0.2", output=theirs) == repr({"standard output": "nobody has read it for 0.2 s"})
    finally:
        os.close(ours), os.close(theirs)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_reader_gets_everything(blocking: bool) -> None:
    """Also on a descriptor that another program has set not to block."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, blocking)
    reader = subprocess.Popen(["bash", "-c", "sleep 0.5; wc -c"], stdin=ours, stdout=subprocess.PIPE, text=True)
    os.close(ours)
    assert run("print('x' * 200_000)", output=theirs) == "{}"
    os.close(theirs)
    assert reader.communicate()[0].strip() == "200001"


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"PYTHONIOENCODING": "ascii"}, b"\\u2192 \\u2581\n"),
        ({"PYTHONIOENCODING": "latin-1"}, b"\\u2192 \\u2581\n"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"\\u2192 \\u2581\n"),
        ({"PYTHONIOENCODING": "utf-8"}, "→ ▁\n".encode()),
    ],
)
def test_characters_that_an_encoding_lacks_are_shown_as_escapes(tmp_path: Path, variables: dict[str, str], shown: bytes) -> None:
    with (tmp_path / "out").open("wb") as out:
        assert run(r"print('\u2192 \u2581')", output=out.fileno(), **variables) == "{}"
    assert (tmp_path / "out").read_bytes() == shown


def test_streams_that_somebody_has_replaced_are_left_alone() -> None:
    work = "import io; mine = sys.stdout = io.StringIO(); streams.protect(); streams.protect()"
    assert run(work, "sys.stdout is mine", output=subprocess.DEVNULL) == "True"


@pytest.mark.parametrize("closed", CLOSED, ids=" ".join)
@pytest.mark.parametrize("script", ["checkpoints.py list nothing", "train.py"])
def test_a_script_refuses_whatever_was_closed(script: str, closed: tuple[str, ...]) -> None:
    name, *arguments = script.split()
    command = ["bash", "-c", f'exec "$@" {" ".join(closed)}', "bash", sys.executable, ROOT / "launch" / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") == ("2>&-" not in closed)
    assert done.stderr.count("\n") <= 1


REFUSED = """
import os, sys, warnings
from pathlib import Path
import tiny_run
from jaxprorl.config import to_json
from jaxprorl.errors import ConfigError
from jaxprorl.train import train
for name in (0, 1, 2):  # what was opened by the imports, or by nobody
    try: os.close(name)
    except OSError: pass
config = tiny_run.get_config()
folder = Path("runs/tiny")
folder.mkdir(parents=True)
(folder / "config.json").write_text(to_json(config))
(folder / "events.jsonl").write_text("")
(folder / ".lock").write_text('{"pid": 1, "host": "died"}')
config.seed = 1
try:
    train(config)
except ConfigError as error:
    warnings.warn("shown nowhere")
    told = str(error)
links = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
Path("told").write_text(f"{links} {told} {(folder / '.lock').read_text()!r}")
"""


@pytest.mark.parametrize("closed", [("<&-", ">&-", "2>&-"), ("<&-",), (">&-", "2>&-")], ids=" ".join)
def test_train_called_from_python_opens_what_was_closed_before_it_locks_the_run(closed: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REFUSED)
    command = ["bash", "-c", f'exec "$@" {" ".join(closed)}', "bash", sys.executable, "mine.py"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    told = (tmp_path / "told").read_text()
    assert told.startswith(f"{['/dev/null'] * 3} runs/tiny holds a run of another config (seed was 0, now 1)")
    assert told.endswith(" ''")


def test_the_shell_scripts_open_what_was_closed(tmp_path: Path) -> None:
    script = f'. "{ROOT}/launch/environment.sh"; open_descriptors; exec 8>"{tmp_path}/file"; say heard; : <&0; : >&1; : >&2'
    for closed in CLOSED:
        done = subprocess.run(
            ["bash", "-c", f'set -euo pipefail; exec {" ".join(closed)}; {script}'],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (closed, done.stderr)
        assert (tmp_path / "file").read_text() == ""
        assert done.stderr == ("" if "2>&-" in closed else "heard\n")
