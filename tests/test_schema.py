"""Names and types of a config, the same whether it comes from flags, from a file or from Python."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import base, prorl_tiny, quickstart
from configs.ablations import reset
from configs.base import stage
from jaxprorl import config as config_module
from jaxprorl.config import to_json, validate
from jaxprorl.errors import ConfigError
from jaxprorl.schema import ABLATION, checked, leaves
from jaxprorl.train import train

ROOT = Path(__file__).resolve().parent.parent


def edited(statement: str) -> ConfigDict:
    """The quickstart after a line of Python."""
    c = quickstart.get_config()
    exec(statement, {"c": c, "np": np, "ConfigDict": ConfigDict, "Path": Path, "stage": stage})
    return c


def from_file(statement: str, folder: Path) -> ConfigDict:
    """The same line in a config file."""
    file = folder / "mine.py"
    file.write_text(
        "from pathlib import Path\nimport numpy as np\nfrom ml_collections import ConfigDict\nfrom configs import quickstart\n"
        f"from configs.base import stage\ndef get_config():\n    c = quickstart.get_config()\n    {statement}\n    return c\n"
    )
    return config_module.load([f"--config={file}"])


# A line of Python -> what the message about it begins with.
WRONG = {
    "c.stpes = 4": "unknown field 'stpes'{place}: did you mean 'steps'?",
    "c.rollout.temprature = 1.0": "unknown field 'rollout.temprature'{place}: did you mean 'rollout.temperature'?",
    "c.max_prompt_tokens = 9": "unknown field 'max_prompt_tokens'{place}: did you mean 'rollout.max_prompt_tokens'?",
    "c.optimiser = ConfigDict({'eps': 1.0})": "unknown field 'optimiser'{place}: did you mean 'optimizer'?",
    "c.resets.kl_spike.oon = True": "unknown field 'resets.kl_spike.oon'{place}: did you mean 'resets.kl_spike.on'?",
    "c.steps = '4'": "steps = '4': must be a whole number, as 100 is",
    "c.steps = 4.0": "steps = 4.0: must be a whole number, as 100 is",
    "c.steps = True": "steps = True: must be a whole number",
    "c.steps = None": "steps = None: must be a whole number",
    "c.steps = [4]": "steps = [4]: must be a whole number",
    "c.steps = np.float64(4)": "steps = np.float64(4.0): must be a whole number",
    "c.steps = lambda: 4": "steps = <function",
    "c.optimizer.learning_rate = '1e-4'": "optimizer.learning_rate = '1e-4': must be a number, as 2e-06 is",
    "c.optimizer.learning_rate = (1e-4,)": "optimizer.learning_rate = (0.0001,): must be a number",
    "c.optimizer.learning_rate = float('nan')": "optimizer.learning_rate = nan: must be a finite number",
    "c.algorithm.clip_high = np.inf": "algorithm.clip_high = inf: must be a finite number",
    "c.resets.reference = 1": "resets.reference = 1: must be True or False, as True is",
    "c.resets.reference = 'False'": "resets.reference = 'False': must be True or False",
    "c.run_name = 3": "run_name = 3: must be a text, as 'base' is",
    "c.model.path = None": "model.path = None: must be a text, as '' is",
    "c.profile_steps = 3": "profile_steps = 3: must be a tuple, as () is",
    "c.data.mix = 'chain_sum'": "data.mix = 'chain_sum': must be a tuple, as () is",
    "c.optimizer = None": "optimizer = None: must be a ConfigDict with b1, b2, clip_norm, ",
    "c.rollout.vllm = 3": "rollout.vllm = 3: must be a ConfigDict with block_tokens, ",
    "c.optimizer = {'learning_rate': 1e-4}": "optimizer.b1 is missing{place}: its default is 0.9",
    "del c.batch.prompts": "batch.prompts is missing{place}: its default is 32",
    "del c.alarms": "alarms is missing{place}: its default is {{'entropy_collapse'",
    "c.data.tasks = ()": "data.tasks = (): must be a ConfigDict with names of your own",
    "c.data.tasks.chain_sum = 3": "data.tasks.chain_sum = 3: must be a ConfigDict with its arguments",
    "c.data.tasks.chain_sum = {'min_terms': print}": "data.tasks.chain_sum.min_terms = <built-in function print>: must be made of",
    "c.filtering.rules.arithmetic = 3": "filtering.rules.arithmetic = 3: must be a text",
    "c.stages = (stage('one', 5, {'rollout.slots': print}),)": "stages.changes.rollout.slots = <built-in function print>: must be made of",
    "c.stages = stage('one', 5)": "stages = {{'changes': {{}}, 'confidence'",
}


@pytest.mark.parametrize("statement", WRONG)
def test_python_and_a_file_are_refused_in_the_same_words(statement: str, tmp_path: Path) -> None:
    config = edited(statement)
    said = []
    runs: list[Callable[[], Any]] = [lambda: validate(config), lambda: train(config), lambda: from_file(statement, tmp_path)]
    for run in runs:
        with pytest.raises(ConfigError) as caught:
            run()
        said.append(str(caught.value))
    for text, place in zip(said, ("", "", f" in {tmp_path / 'mine.py'}"), strict=True):
        assert text.startswith(WRONG[statement].format(place=place)), text
        assert text.endswith("; every field, with its type and unit, is in configs/base.py") and "\n" not in text
    assert said[0] == said[1] and said[2].count(str(tmp_path / "mine.py")) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("stpes=4", "unknown field 'stpes' in --config.stpes=4: did you mean 'steps'?"),
        ("max_prompt_tokens=9", "unknown field 'max_prompt_tokens' in --config.max_prompt_tokens=9: did you mean 'rollout.max_prompt_tok"),
        ("steps=four", "steps = 'four': must be a whole number, as 100 is (--config.steps=four)"),
        ("steps=4.0", "steps = '4.0': must be a whole number, as 100 is (--config.steps=4.0)"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate = 'fast': must be a number, as 2e-06 is (--config.optimizer"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate = nan: must be a finite number"),
        ("resets.reference=perhaps", "resets.reference = 'perhaps': must be True or False, as True is"),
        ("rollout=3", "rollout = '3': it is a group of fields; set them one by one, as rollout.NAME"),
    ],
)
def test_a_flag_is_refused_in_the_words_for_files_and_python(flag: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_module.load([f"--config={ROOT / 'configs/quickstart.py'}", f"--config.{flag}"])
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.slotz": 8}, "rollout.slotz: there is no such field, did you mean 'rollout.slots'?"),
        ({"stpes": 8}, "stpes: there is no such field, did you mean 'steps'?"),
        ({"rollout.slots": "8"}, "rollout.slots = '8': must be a whole number, as 256 is"),
        ({"rollout.slots": 8.0}, "rollout.slots = 8.0: must be a whole number"),
        ({"batch.prompts": True}, "batch.prompts = True: must be a whole number"),
        ({"resets.reference": 0}, "resets.reference = 0: must be True or False"),
        ({"filtering.rules.arithmetic": 1}, "filtering.rules.arithmetic = 1: must be a text"),
        ({"optimizer.learning_rate": None}, "optimizer.learning_rate = None: must be a number"),
    ],
)
def test_the_changes_of_a_stage_are_held_to_the_same(changes: dict[str, Any], words: str) -> None:
    c = quickstart.get_config()
    c.stages = (stage("one", 5, changes),)
    with pytest.raises(ConfigError) as caught:
        validate(c)
    assert str(caught.value).startswith(f"stages: stage 'one' changes {words}")


@pytest.mark.parametrize(
    ("given", "words"),
    [({"steps": 4}, "config = {'steps': 4}: must be a ConfigDict"), ("quickstart", "config = 'quickstart'"), (None, "config = None")],
)
def test_what_is_no_config_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(given)
    assert str(caught.value).startswith(words)


def test_what_means_the_same_becomes_the_same() -> None:
    c = edited("c.model.path = Path('models') / 'mine'")
    c.steps, c.seed, c.rollout.slots = np.int64(4), np.array(7), c.get_ref("steps")
    c.optimizer.learning_rate, c.rollout.temperature = np.float32(0.5), 1
    c.profile_steps, c.monitoring.progress = [np.int32(1), 2], np.bool_(False)
    c.stages = [stage("one", np.int64(5), {"batch.prompts": np.int64(8), "optimizer.learning_rate": 1})]  # type: ignore[arg-type]
    found = checked(c)
    assert (found.steps, found.seed, found.rollout.slots) == (4, 7, 4)
    assert (found.optimizer.learning_rate, found.rollout.temperature, found.model.path) == (0.5, 1.0, "models/mine")
    assert (found.profile_steps, found.monitoring.progress) == ((1, 2), False)
    defaults = dict(leaves(base.get_config()))
    assert {name: type(value) for name, value in leaves(found)} == {name: type(value) for name, value in defaults.items()}
    assert type(found.stages[0]["steps"]) is int and type(found.stages[0]["changes"]["batch.prompts"]) is int
    assert found.is_locked and isinstance(c.steps, np.integer), "the one that was given stays as it is"
    json.loads(to_json(found))


def test_a_config_that_is_right_comes_out_as_it_went_in() -> None:
    for config in (quickstart.get_config(), prorl_tiny.get_config(), reset.get_config()):
        assert checked(config, ABLATION if "arms" in config else config_module.EXPERIMENT).to_dict() == config.to_dict()
    stored = ConfigDict(json.loads(to_json(quickstart.get_config())))  # as config.json of a run gives it: lists for tuples
    assert to_json(checked(stored)) == to_json(quickstart.get_config())


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("c.seedz = (1,)", "unknown field 'seedz' in FILE: did you mean 'seeds'?"),
        ("c.confidence = '0.9'", "confidence = '0.9': must be a number, as 0.95 is (in FILE)"),
        ("c.arms.more = 'steps=3'", "arms.more = 'steps=3': must be a tuple, as () is (in FILE)"),
        ("c.budget = None", "budget = None: must be a ConfigDict with kind, size (in FILE)"),
        ("c.paired_sd = float('inf')", "paired_sd = inf: must be a finite number (in FILE)"),
    ],
)
def test_an_ablation_is_held_to_the_same(statement: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from configs.ablations import reset\ndef get_config():\n    c = reset.get_config()\n    {statement}\n    return c\n")
    with pytest.raises(ConfigError) as caught:
        config_module.load([f"--config={file}"], ABLATION)
    assert str(caught.value).replace(str(file), "FILE") == f"{words}; every field, with its type and unit, is in configs/ablations/base.py"


def test_an_ablation_is_no_experiment_and_the_other_way_round() -> None:
    with pytest.raises(ConfigError, match=r"reset\.py: no experiment but an ablation; experiments are in configs/"):
        config_module.load([f"--config={ROOT / 'configs/ablations/reset.py'}"])
    with pytest.raises(ConfigError, match=r"quickstart\.py: no ablation but an experiment; ablations are in configs/ablations/"):
        config_module.load([f"--config={ROOT / 'configs/quickstart.py'}"], ABLATION)
