import errno
import functools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import sample_rewards
from factories import make_prompt

from jaxprorl.errors import ConfigError
from jaxprorl.rewards import stored
from jaxprorl.rewards.pool import GraderPool
from jaxprorl.rewards.registry import RewardError, load_parts, reward_spec, reward_version
from jaxprorl.types import Prompt


class Bonus:
    """A callable object."""

    def __init__(self, size: float) -> None:
        self.size = size

    def __call__(self, text: str, prompt: Prompt) -> float:
        return self.size * len(text)

    def method(self, text: str, prompt: Prompt) -> float:
        return self.size


def scaled(factor: float, text: str, prompt: Prompt) -> float:
    return factor * len(text)


def test_a_function_of_a_module_goes_by_its_name(tmp_path: Path) -> None:
    assert reward_spec(sample_rewards.length, tmp_path) == "sample_rewards:length"
    assert reward_spec("my:score + 0.5 * my:other", tmp_path) == "my:score + 0.5 * my:other"
    assert not list(tmp_path.iterdir())


def local(weight: float) -> object:
    return lambda text, prompt: weight * len(text)


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (lambda text, prompt: 0.25, 0.25),
        (local(0.5), 1.0),
        (functools.partial(scaled, 3.0), 6.0),
        (Bonus(2.0).method, 2.0),
        (Bonus(2.0), 4.0),
    ],
    ids=["lambda", "closure", "partial", "method", "object"],
)
def test_what_no_module_holds_is_stored_and_graded_in_another_process(reward: object, value: float, tmp_path: Path) -> None:
    spec = reward_spec(reward, tmp_path / "rewards")
    assert spec.startswith('pickle:"')
    assert spec == reward_spec(reward, tmp_path / "rewards")
    assert load_parts(spec)[0].function("ab", None) == value
    with GraderPool(spec, None) as pool:
        pool.submit_text(make_prompt(1), 0, "ab")
        score = pool.collect()[1, 0]
    assert (score.outcome, score.value) == ("scored", value)
    assert score.grader_version == reward_version(spec)


def test_several_with_weights_become_one_text(tmp_path: Path) -> None:
    length, acts = sample_rewards.length, sample_rewards.acts
    assert reward_spec({length: 1.0, acts: 0.5}, tmp_path) == "sample_rewards:length + 0.5 * sample_rewards:acts"
    assert reward_spec([length, (acts, -2)], tmp_path) == "sample_rewards:length - 2.0 * sample_rewards:acts"
    assert reward_spec([(length, 2), ("a:b - 0.5 * c:d", 2)], tmp_path) == "2.0 * sample_rewards:length + 2.0 * a:b - c:d"
    stored_one = reward_spec({"a:b": 1, (lambda text, prompt: 1.0): 0.1}, tmp_path)
    assert stored_one.startswith('a:b + 0.1 * pickle:"')


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (3, "of type int"),
        (None, "of type NoneType"),
        ([], "empty"),
        ({"a:b": "much"}, "weight 'much' of 'a:b'"),
        ({"a:b": float("nan")}, "weight nan"),
        ({"a:b": True}, "weight True"),
        (lambda text: 1.0, "not callable with"),
        (sample_rewards.asynchronous, "async"),
        ([sample_rewards.length, 3], "of type int"),
    ],
)
def test_what_is_no_reward_is_refused(reward: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=says):
        reward_spec(reward, tmp_path)


def test_what_cannot_be_stored_is_refused_with_the_remedy(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(text: str, prompt: Prompt) -> float:
        with lock:
            return 1.0

    with pytest.raises(RewardError, match=r"locked: it cannot be stored .*lock.*module"):
        reward_spec(locked, tmp_path)
    assert not list(tmp_path.iterdir())


SCRIPT = """{blank}
import re, sys
from dataclasses import dataclass, field
from pathlib import Path
from jaxprorl.rewards.registry import reward_spec

class Rule:
    def __init__(self, words): self.words = words
    def __call__(self, text, prompt): return float(text in self.words or text in {{"yes", "right", "true"}} or bool(re.search("x", text)))

WORDS = ["yes", "right", "true", "sure", "indeed", "correct"]
ALLOWED = set(WORDS)  # a global
NESTED = frozenset([frozenset(WORDS), frozenset(WORDS[:3]), ("a", frozenset(WORDS[2:]))])

class Tags(set): pass

@dataclass
class Choice:
    words: set = field(default_factory=lambda: set(WORDS))
    tags: Tags = field(default_factory=lambda: Tags(WORDS))
    def __call__(self, text, prompt): return float(text in self.words and text in self.tags)

def closing(words): return lambda text, prompt: float(text in words)
def listed(text, prompt, also=frozenset(WORDS)): return float(text in ALLOWED and text in also and len(NESTED) == 3)

class Node:  # a set that holds what holds the set
    def __init__(self): self.all = {{self, *WORDS}}
    def __call__(self, text, prompt): return float(text in self.all and self in self.all)

rewards = [Rule(["a"]), lambda text, prompt: 0.5, Choice(), closing(frozenset(WORDS)), listed, Node()]
print(reward_spec(rewards, Path(sys.argv[1])))
"""


def test_the_same_script_gives_the_same_text_in_every_process(tmp_path: Path) -> None:
    specs = set()
    for seed, blank in (("1", ""), ("2", "\n\n# a remark"), ("3", "")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", SCRIPT.format(blank=blank), str(tmp_path)]
        specs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())
    assert len(specs) == 1
    rule, half, *with_sets = load_parts(specs.pop())
    assert [(each.function("sure", None), each.function("no", None)) for each in with_sets] == [(1, 0)] * 4
    assert (rule.function("a", None), rule.function("right", None), rule.function("b", None), half.function("", None)) == (1, 1, 0, 0.5)


def test_threads_that_store_the_same_functions_leave_whole_files_and_nothing_else(tmp_path: Path) -> None:
    rewards = [local(float(weight)) for weight in range(5)]
    with ThreadPoolExecutor(8) as threads:
        specs = list(threads.map(lambda _: reward_spec(rewards, tmp_path), range(8)))
    assert len(set(specs)) == 1
    assert [part.function("ab", None) for part in load_parts(specs[0])] == [0, 2, 4, 6, 8]
    assert len(os.listdir(tmp_path)) == 5


def test_a_torn_file_is_written_again_and_a_whole_one_is_not(tmp_path: Path) -> None:
    reward = local(0.5)
    path = stored.store(reward, tmp_path)
    content, written_ns = path.read_bytes(), path.stat().st_mtime_ns
    stored.store(reward, tmp_path)
    assert path.stat().st_mtime_ns == written_ns
    path.write_bytes(content[:20])
    with pytest.raises(RewardError, match="call train again with the function itself"):
        stored.load(path, "torn")
    assert stored.store(reward, tmp_path) == path
    assert path.read_bytes() == content


@pytest.mark.parametrize("place", ["a_file", "/proc/nope", "n" * 300, "read_only"])
def test_a_place_that_cannot_be_written_is_one_line_that_names_the_field(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").write_text("")
    if place == "read_only":  # as root sees it too
        monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(ConfigError, match=r"^reward lambda cannot be written to ") as raised:
        reward_spec(local(0.5), tmp_path / place / "rewards")
    assert str(raised.value).endswith("; set cache_dir to a folder that can")
    assert "\n" not in str(raised.value)


def test_a_function_with_a_long_name_is_stored_under_the_beginning_of_it(tmp_path: Path) -> None:
    def reward(text: str, prompt: Prompt) -> float:
        return 0.5

    reward.__name__ = "größe" * 60
    path = stored.store(reward, tmp_path)
    assert path.name.startswith("größe" * 8 + "-")
    assert stored.load(path, "long")("", None) == 0.5


def test_a_file_that_is_missing_changed_or_of_another_python_is_said(tmp_path: Path) -> None:
    path = stored.store(lambda text, prompt: 1.0, tmp_path)
    spec = f'pickle:"{path}"'
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    with pytest.raises(RewardError, match="changed after it was stored"):
        load_parts(spec)
    path.unlink()
    with pytest.raises(RewardError, match=r"cannot be read.*module of its own"):
        load_parts(spec)
    other = path.with_name(path.name.replace(str(sys.implementation.cache_tag), "cpython-30"))
    other.write_bytes(content)
    with pytest.raises(RewardError, match="stored by cpython-30"):
        load_parts(f'pickle:"{other}"')
    with pytest.raises(RewardError, match="no name of a stored function"):
        load_parts('pickle:"mine.pkl"')
