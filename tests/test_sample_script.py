import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
from factories import make_prompt

from jaxprorl.sampling import SamplingError, choose

SCRIPT = str(tiny_run.ROOT / "launch/sample.py")


def sample(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = tiny_run.user_environment()
    return subprocess.run([sys.executable, SCRIPT, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.new_home(tmp_path_factory)
    tiny_run.train(folder, "steps=2")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_shows_prompts_completions_and_scores_of_the_newest_checkpoint(home: Path) -> None:
    done = sample(home, "--run", "runs/tiny", "--prompts", "3", "--samples", "2", "--seed", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("─ chain_sum ─") == 2, "the tasks take turns"
    assert done.stdout.count("─ number_filtering ─") == 1
    assert done.stdout.count("reference answer: ") == 3
    assert done.stdout.count(" tokens  ") == 6
    end = " ".join(done.stdout.splitlines()[-2:])
    assert "runs/tiny, step 2, held_out, temperature 1, seed 7, jaxprorl.rewards.puzzles:continuous: " in end.replace("  ", " ")
    assert " of 6 solved" in end


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_needs_no_more_than_config_tokenizer_and_checkpoints_and_repeats_itself(home: Path, tmp_path: Path) -> None:
    (tmp_path / ".cache").symlink_to((home / ".cache").resolve())
    for part in ("base_model", "checkpoints"):
        shutil.copytree(home / "runs/tiny" / part, tmp_path / "runs/tiny" / part)
    shutil.copy(home / "runs/tiny/config.json", tmp_path / "runs/tiny")
    arguments = ["--run", "runs/tiny", "--prompts", "2", "--samples", "3", "--task", "chain_sum", "--split", "train", "--temperature", "0"]
    done = sample(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "number_filtering" not in done.stdout
    assert "step 2, train, temperature 0" in done.stdout
    assert sample(home, *arguments).stdout == done.stdout
    assert {path.name for path in (tmp_path / "runs/tiny").iterdir()} == {"base_model", "checkpoints", "config.json"}

    wrong = sample(tmp_path, "--run", "runs/tiny", "--task", "chess")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: --task chess: this split has no such task; choose one of chain_sum, number_filtering\n"

    path = tmp_path / "runs/tiny/base_model/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<|endoftext|>", "add_bos_token": True}))
    wrong = sample(tmp_path, "--run", "runs/tiny")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: runs/tiny/base_model: the rendered prompt begins with 0 BOS tokens, 1 is right")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_cannot_be_graded_is_counted_also_for_a_run_of_before_the_threshold(home: Path, tmp_path: Path) -> None:
    (tmp_path / ".cache").symlink_to((home / ".cache").resolve())
    shutil.copytree(home / "runs/tiny", tmp_path / "runs/tiny")
    (tmp_path / "my_reward.py").write_text("def score(text, prompt):\n    return 1.5 if prompt.task == 'chain_sum' else {}['gold']\n")
    config = json.loads((tmp_path / "runs/tiny/config.json").read_text())
    config["evaluation"]["reward"] = "my_reward:score"
    del config["grading"]["solved_from"]
    (tmp_path / "runs/tiny/config.json").write_text(json.dumps(config))
    done = sample(tmp_path, "--run", "runs/tiny", "--prompts", "2", "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert "KeyError: 'gold'" in done.stdout
    assert "2 of 2 solved, mean 1.500, 2 ungraded" in " ".join(done.stdout.splitlines()[-2:])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "runs/none"], "error: --run runs/none: no run there"),
        (["--run", "runs/begun"], "error: --run runs/begun: no checkpoint yet"),
        (["--run", "runs/begun", "--prompts", "0"], "error: --prompts 0: must be 1 or more"),
        (["--run", "runs/begun", "--temperature", "-1"], "error: --temperature -1.0: must be 0 or more"),
        (["--run", "runs/begun", "--split", "test"], "invalid choice: 'test'"),
        ([], "the following arguments are required: --run"),
    ],
)
def test_what_cannot_be_sampled_is_told(tmp_path: Path, arguments: list[str], words: str) -> None:
    begun = tmp_path / "runs/begun"
    (begun / "checkpoints/step_2.orbax-checkpoint-tmp").mkdir(parents=True)
    (begun / "config.json").write_text("{}")
    done = sample(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_tasks_take_turns_and_one_can_be_chosen() -> None:
    prompts = [make_prompt(1, task="a"), make_prompt(2, task="a"), make_prompt(3, task="a"), make_prompt(4, task="b")]
    assert [prompt.prompt_id for prompt in choose(prompts, None, 3)] == [1, 4, 2]
    assert [prompt.prompt_id for prompt in choose(prompts, None, 9)] == [1, 4, 2, 3]
    assert [prompt.prompt_id for prompt in choose(prompts, "b", 3)] == [4]
    with pytest.raises(SamplingError, match="--task c: this split has no such task; choose one of a, b"):
        choose(prompts, "c", 3)
