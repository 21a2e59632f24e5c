"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

README = (tiny_run.ROOT / "README.md").read_text(encoding="utf-8")

# Shrinks the config that the shown lines start from; the lines themselves stay as they are.
SMALL = f"""
import sys
sys.path[:0] = [{str(tiny_run.ROOT)!r}, {str(tiny_run.ROOT / "tests")!r}]
import tiny_run
from configs import quickstart
quickstart.get_config = tiny_run.get_config
"""


def from_python() -> str:
    """The block under "From Python"."""
    found = re.search(r"\*\*From Python\*\*.*?```python\n(.*?)```", README, re.DOTALL)
    assert found
    return found[1]


def test_the_lines_from_python_are_few() -> None:
    assert len([line for line in from_python().splitlines() if line.strip()]) <= 14


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_lines_from_python_run_as_they_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tiny_run.new_home(tmp_path_factory)
    script = home / "mine.py"
    script.write_text(SMALL + from_python())
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(script)], cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rate, report, model = done.stdout.splitlines()[-1].split()
    assert 0 <= float(rate) <= 1
    assert Path(report).is_file()
    assert (Path(model) / "config.json").is_file()
    assert (home / "runs/mine/metrics.jsonl").is_file()
