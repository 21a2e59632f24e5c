import re
import sys
from pathlib import Path

import pytest

from jaxprorl.rewards.registry import RewardError, load_parts, prepare_reward, reward_version


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, as a user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("mine_")]:
        del sys.modules[name]


def test_reward_beside_the_user(folder: Path) -> None:
    (folder / "mine_a.py").write_text("def score(text, prompt):\n    return 0.25\n")
    assert load_parts("mine_a:score")[0].function("x", None) == 0.25


def test_shipped_rewards_load_without_reasoning_gym_or_jax() -> None:
    for spec in ("jaxprorl.rewards.puzzles:exact", "jaxprorl.rewards.puzzles:continuous", "jaxprorl.rewards.text:exact_match"):
        assert load_parts(spec)[0].function.__name__ == spec.split(":")[1]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("exact", "module:function"),
        ("", "module:function"),
        ("a:b:c", "module:function"),
        (":exact", "module:function"),
        ("jaxprorl.rewards.puzzles:", "module:function"),
        ("my-reward:score", "module:function"),
        (None, "module:function"),
        ("mine_missing:score", "ModuleNotFoundError"),
        ("__main__:score", "module of its own"),
        ("jaxprorl.rewards.puzzles:exakt", "functions there: .*exact"),
        ("sample_rewards:not_callable", "not a function"),
        ("sample_rewards:one_parameter", r"one_parameter\(text: str\)"),
        ("sample_rewards:asynchronous", "async"),
    ],
)
def test_errors_name_field_value_and_remedy(folder: Path, spec: str, says: str) -> None:
    with pytest.raises(RewardError, match=says) as error:
        load_parts(spec)
    assert f"reward = {spec!r}" in str(error.value)


def test_import_error_is_quoted(folder: Path) -> None:
    (folder / "mine_b.py").write_text("import numpyy\n")
    (folder / "mine_c.py").write_text("def score(:\n")
    with pytest.raises(RewardError, match="numpyy"):
        load_parts("mine_b:score")
    with pytest.raises(RewardError, match="SyntaxError"):
        load_parts("mine_c:score")


def test_user_file_does_not_shadow_a_library(folder: Path) -> None:
    (folder / "numpy.py").write_text("raise RuntimeError('shadowed')\n")
    load_parts("jaxprorl.rewards.text:exact_match")
    assert sys.path[-1] == str(folder)


def test_prepare_runs_and_is_optional(folder: Path) -> None:
    (folder / "mine_d.py").write_text("ready = []\ndef prepare():\n    ready.append(1)\ndef score(text, prompt):\n    return 0.0\n")
    prepare_reward("mine_d:score")
    assert sys.modules["mine_d"].ready == [1]
    prepare_reward("jaxprorl.rewards.text:exact_match")


def test_version_follows_the_source(folder: Path) -> None:
    (folder / "mine_e.py").write_text("def score(text, prompt):\n    return 0.0\n")
    first = reward_version("mine_e:score")
    assert re.fullmatch(r"mine_e:score@[0-9a-f]{12}", first)
    assert reward_version("mine_e:score") == first
    (folder / "mine_e.py").write_text("def score(text, prompt):\n    return 1.0\n")
    assert reward_version("mine_e:score") != first


def test_version_follows_helpers_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxprorl.rewards import answers, puzzles

    spec = "jaxprorl.rewards.puzzles:exact"
    first = reward_version(spec)
    monkeypatch.setattr(puzzles, "DISTRIBUTIONS", ())
    without_library = reward_version(spec)
    monkeypatch.setattr(answers, "__file__", __file__)
    assert len({first, without_library, reward_version(spec)}) == 3
