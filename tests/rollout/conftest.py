"""What the tests of shared memory share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxprorl.rollout import segments


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[Path]:
    """A run's folder; the test fails if a segment of it is left at the end."""
    yield tmp_path
    left = segments.reap(tmp_path)
    assert not left, f"segments of dead processes were left: {left}"
    alive = list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(tmp_path)}-*"))
    assert not alive, f"segments are still owned: {alive}"
