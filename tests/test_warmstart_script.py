import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from jaxprorl.warmstart import fit

ROOT = Path(__file__).resolve().parents[1]


def test_it_makes_the_model_that_a_run_with_the_same_config_looks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Host devices that a rule chooses are part of what the cache tells models apart by."""
    spec = importlib.util.spec_from_file_location("warmstart_script", ROOT / "launch/warmstart.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made: list[Any] = []
    monkeypatch.setattr("jaxprorl.model_cache.base_model", lambda config, *_: (made.append(config), (tmp_path, False))[1])
    monkeypatch.setattr("jaxprorl.sizes.usable_cores", lambda: 2)
    places = [f"--config.runs_dir={tmp_path / 'runs'}", f"--config.cache_dir={tmp_path / 'cache'}", "--config.monitoring.progress=False"]
    assert script.main([f"--config={tiny_run.__file__}", "--config.mesh.cpu_devices=0", *places]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    of_a_run = tiny_run.get_config()
    assert made[0].mesh.cpu_devices == of_a_run.mesh.cpu_devices == 2
    assert fit.fingerprint(made[0]) == fit.fingerprint(of_a_run)
