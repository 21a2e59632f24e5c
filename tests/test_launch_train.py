import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from ml_collections import ConfigDict


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "launch/train.py"
    spec = importlib.util.spec_from_file_location("launch_train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interruption_says_whether_anything_was_saved(script: ModuleType, tmp_path: Path) -> None:
    config = ConfigDict({"runs_dir": str(tmp_path), "run_name": "x"})
    assert script.what_comes_next(config) == "there is no checkpoint yet, the same command starts over"
    folder = tmp_path / "x/checkpoints"
    (folder / "step_4.orbax-checkpoint-tmp").mkdir(parents=True)
    assert "starts over" in script.what_comes_next(config)
    (folder / "step_10.commit.json").write_text("{}")
    assert script.what_comes_next(config) == "the same command goes on from the last checkpoint, of step 10"
