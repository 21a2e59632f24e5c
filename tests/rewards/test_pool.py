import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from factories import make_prompt
from pebble import ProcessPool
from tokenizers import Tokenizer

from jaxprorl.errors import GraderError
from jaxprorl.preemption import INTERRUPTED
from jaxprorl.rewards import pool as pool_module
from jaxprorl.rewards.pool import GraderPool, GraderPoolError, error_share, require_graded
from jaxprorl.rewards.registry import RewardError, reward_version
from jaxprorl.types import Completion, FinishReason, Prompt, Score

ROOT = Path(__file__).parents[2]
ACTS = "sample_rewards:acts"


def prompt(prompt_id: int = 1, answer: str = "") -> Prompt:
    return Prompt(prompt_id, "x", np.arange(5, dtype=np.int32), "t", answer, {"a": [1, {"b": None}]})


def completion(tokenizer: Tokenizer, text: str, sample: int = 0, prompt_id: int = 1, finish: FinishReason = "stop") -> Completion:
    ids = tokenizer.encode(text).ids + ([tokenizer.token_to_id("<|im_end|>")] if finish == "stop" else [])
    ids = np.array(ids, np.int32)
    return Completion(prompt_id, sample, ids, np.zeros(len(ids), np.float32), finish, ((0, 0, len(ids)),))


def grade(pool: GraderPool, tokenizer: Tokenizer, texts: list[str]) -> list[Score]:
    pool.submit(prompt(), [completion(tokenizer, text, i) for i, text in enumerate(texts)])
    return list(pool.collect().values())


def workers_of(pid: int) -> list[psutil.Process]:
    """Grader processes below `pid` (the standard library's resource tracker is none)."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.fixture
def acts(tokenizer_path: Path) -> Iterator[GraderPool]:
    with GraderPool(ACTS, tokenizer_path, workers=1, timeout_s=1.0) as pool:
        yield pool


def test_scores_are_complete_and_in_key_order(tokenizer: Tokenizer, tokenizer_path: Path) -> None:
    spec = "sample_rewards:length"
    with GraderPool(spec, tokenizer_path, workers=2) as pool:
        for prompt_id in (7, 3, 5):
            texts = ["x" * (prompt_id * 10 + sample) for sample in range(4)]
            pool.submit(prompt(prompt_id), [completion(tokenizer, t, s, prompt_id) for s, t in reversed(list(enumerate(texts)))])
        scores = pool.collect()
        assert list(scores) == [(p, s) for p in (3, 5, 7) for s in range(4)]
        for (prompt_id, sample), score in scores.items():
            assert score.value == (prompt_id * 10 + sample) / 100
            assert (score.outcome, score.grader, score.grader_version) == ("scored", spec, reward_version(spec))
            assert 0.0 <= score.seconds < 1.0 and score.detail == ""
        assert pool.collect() == {}  # the next rollout begins empty
        assert len(grade(pool, tokenizer, ["x"])) == 1  # and may have the same keys


def test_text_keeps_tags_and_drops_only_the_drawn_stop(tokenizer: Tokenizer, tokenizer_path: Path) -> None:
    text = "<think>ä 1\n</think><answer>2</answer>"
    with GraderPool("sample_rewards:echo_mismatch", tokenizer_path) as pool:
        pool.submit(prompt(1, text), [completion(tokenizer, text, 0), completion(tokenizer, text, 1, finish="length")])
        pool.submit(prompt(2, text + "<|im_end|>"), [completion(tokenizer, text + "<|im_end|>", 0, 2)])  # it wrote two of them
        pool.submit(prompt(3, ""), [completion(tokenizer, "", 0, 3), completion(tokenizer, "", 1, 3, "length")])
        assert {score.detail for score in pool.collect().values()} == {""}


def test_unfinished_completions_are_not_graded(acts: GraderPool, tokenizer: Tokenizer) -> None:
    reasons: list[FinishReason] = ["stop", "length", "aborted", "error"]
    acts.submit(prompt(), [completion(tokenizer, "fine", i, finish=reason) for i, reason in enumerate(reasons)])
    scores = list(acts.collect().values())
    assert [s.outcome for s in scores] == ["scored", "scored", "grader_error", "grader_error"]
    assert [s.detail for s in scores] == ["", "", "not finished: aborted", "not finished: error"]


@pytest.mark.parametrize(
    ("misdeed", "says"),
    [
        ("raise", "KeyError: 'lost'"),
        ("unprintable", "UnprintableError"),
        ("recursion", "RecursionError"),
        ("memory", "MemoryError"),
        ("exit", "SystemExit: 3"),
        ("nan", "returned nan"),
        ("huge", "an int of 1329 bits"),
        ("none", "returned NoneType"),
        ("text", "returned str"),
        ("die", "exit code 7"),
        ("segfault", f"exit code {-signal.SIGSEGV}"),
        pytest.param("die_quietly", "no result within 1.0 s", marks=pytest.mark.slow),
        pytest.param("sleep", "no result within 1.0 s", marks=pytest.mark.slow),
        pytest.param("swallow", "no result within 1.0 s", marks=pytest.mark.slow),
        pytest.param("deaf", "no result within 1.0 s", marks=pytest.mark.slow),
        pytest.param("c_code", "no result within 1.0 s", marks=pytest.mark.slow),
    ],
)
def test_only_the_culprit_pays(acts: GraderPool, tokenizer: Tokenizer, misdeed: str, says: str) -> None:
    scores = grade(acts, tokenizer, ["fine", "fine", misdeed, "fine"])
    assert [s.outcome for s in scores] == ["scored", "scored", "grader_error", "scored"]
    assert [s.value for s in scores] == [0.5, 0.5, 0.0, 0.5]
    assert says in scores[2].detail
    assert error_share(scores) == 0.25


@pytest.mark.slow
def test_one_process_per_worker_after_many_misdeeds(acts: GraderPool, tokenizer: Tokenizer) -> None:
    texts = ["die", "fine", "segfault", "sleep", "fine", "die"]
    assert [s.outcome == "scored" for s in grade(acts, tokenizer, texts)] == [t == "fine" for t in texts]
    assert [s.value for s in grade(acts, tokenizer, ["fine"] * 40)] == [0.5] * 40
    assert len(workers_of(os.getpid())) == 1


@pytest.mark.slow
def test_slow_but_lawful_rewards_are_not_killed(acts: GraderPool, tokenizer: Tokenizer) -> None:
    before = workers_of(os.getpid())
    scores = grade(acts, tokenizer, ["slow"] * 10)  # 2.5 s in all under a timeout of 1 s each
    assert [s.outcome for s in scores] == ["scored"] * 10
    assert all(0.2 < s.seconds < 1.0 for s in scores)
    assert [p.pid for p in workers_of(os.getpid())] == [p.pid for p in before]


@pytest.mark.slow
def test_results_do_not_depend_on_order_batches_or_workers(
    tokenizer: Tokenizer, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["jitter", "raise", "fine", "nan", "jitter", "high"]
    pairs = [(prompt(p), completion(tokenizer, texts[(p + s) % 6], s, p)) for p in range(6) for s in range(4)]
    results = []
    for workers, batch, seed in ((1, 32, 0), (2, 1, 1), (2, 5, 2)):
        monkeypatch.setattr(pool_module, "_BATCH", batch)
        shuffled = random.Random(seed).sample(pairs, len(pairs))
        with GraderPool(ACTS, tokenizer_path, workers) as pool:
            for of, one in shuffled:
                pool.submit(of, [one])
            results.append([(key, s.value, s.outcome, s.detail) for key, s in pool.collect().items()])
    assert results[0] == results[1] == results[2]


def test_workers_are_recycled(tokenizer: Tokenizer, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_RECYCLE_BATCHES", 2)
    monkeypatch.setattr(pool_module, "_BATCH", 1)
    with GraderPool(ACTS, tokenizer_path) as pool:
        first = workers_of(os.getpid())
        assert [s.value for s in grade(pool, tokenizer, ["fine"] * 5)] == [0.5] * 5
        assert workers_of(os.getpid()) != first


@pytest.mark.parametrize("name", ["no_jax", "ignores_ctrl_c"])
def test_worker_surroundings(tokenizer: Tokenizer, tokenizer_path: Path, name: str) -> None:
    with GraderPool(f"sample_rewards:{name}", tokenizer_path) as pool:
        assert [(s.value, s.detail) for s in grade(pool, tokenizer, ["x"])] == [(1.0, "")]


@pytest.mark.slow
def test_puzzle_grader_imports_no_jax(tokenizer_path: Path) -> None:
    code = "import sys, jaxprorl.rewards.puzzles as p, jaxprorl.rewards.worker; p.prepare(); print([m for m in sys.modules if 'jax' in m])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "'jax'" not in out and "'jaxlib'" not in out and "'jaxprorl.rewards.worker'" in out


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"spec": "nowhere:score"}, RewardError, "nowhere"),
        ({"tokenizer_path": "/nonexistent"}, FileNotFoundError, r"tokenizer\.json does not exist"),
        ({"workers": 0}, ValueError, "grading.workers = 0"),
        ({"timeout_s": 0.0}, ValueError, "grading.timeout_s = 0.0"),
        ({"timeout_s": float("nan")}, ValueError, "grading.timeout_s = nan"),
    ],
)
def test_bad_arguments_fail_before_any_process(
    tokenizer_path: Path, change: dict, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraderPool, "_new_pool", lambda self: pytest.fail("started a process"))
    with pytest.raises(error, match=says):
        GraderPool(**{"spec": ACTS, "tokenizer_path": tokenizer_path, **change})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "says"), [("evil_prepare:score", "cannot start: OSError: no weights"), ("deadly_prepare:score", "died 3 times in a row")]
)
def test_graders_that_cannot_start_stop_the_run(tokenizer: Tokenizer, tokenizer_path: Path, spec: str, says: str) -> None:
    with GraderPool(spec, tokenizer_path) as pool, pytest.raises(GraderPoolError, match=says):
        grade(pool, tokenizer, ["x"])
    assert workers_of(os.getpid()) == []


@pytest.mark.slow
def test_reward_that_always_dies_gives_errors_not_a_hang(tokenizer: Tokenizer, tokenizer_path: Path) -> None:
    with GraderPool("sample_rewards:always_dies", tokenizer_path, timeout_s=2.0) as pool:
        assert error_share(grade(pool, tokenizer, ["x"] * 3)) == 1.0


@pytest.mark.slow
def test_idle_worker_killed_between_rollouts(acts: GraderPool, tokenizer: Tokenizer) -> None:
    for _ in range(2):
        assert grade(acts, tokenizer, ["fine"])[0].value == 0.5
        for process in workers_of(os.getpid()):
            process.kill()
        time.sleep(0.3)
    assert [s.value for s in grade(acts, tokenizer, ["fine"] * 40)] == [0.5] * 40


@pytest.mark.slow
def test_broken_pool_while_grading_loses_nothing(acts: GraderPool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a worker dies between taking a batch and saying so: every batch under way fails at once."""
    assert grade(acts, tokenizer, ["fine"])[0].value == 0.5
    acts.submit(prompt(), [completion(tokenizer, "slow", i) for i in range(4)])
    acts._send_all(acts._waiting)
    acts._waiting = []
    assert isinstance(acts._pool, ProcessPool)
    acts._pool._pool_manager.handle_broken_pool(pool_module.BrokenProcessPool("test"))
    assert [s.value for s in acts.collect().values()] == [0.5] * 4
    assert len(workers_of(os.getpid())) == 1


@pytest.mark.slow
def test_stuck_pool_is_replaced(acts: GraderPool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grade(acts, tokenizer, ["fine"])[0].value == 0.5
    monkeypatch.setattr(pool_module, "_STALL_S", 1.0)
    for process in workers_of(os.getpid()):
        process.suspend()  # alive, and takes nothing
    assert [s.value for s in grade(acts, tokenizer, ["fine"] * 3)] == [0.5] * 3


def test_misuse_is_an_error(acts: GraderPool, tokenizer: Tokenizer) -> None:
    acts.submit(prompt(), [completion(tokenizer, "fine")])
    with pytest.raises(ValueError, match=r"\(1, 0\) submitted twice"):
        acts.submit(prompt(), [completion(tokenizer, "fine")])
    with pytest.raises(ValueError, match="submitted with prompt 2"):
        acts.submit(prompt(2), [completion(tokenizer, "fine")])
    acts.close()
    acts.close()
    with pytest.raises(RuntimeError, match="closed"):
        acts.submit(prompt(), [])
    with pytest.raises(RuntimeError, match="closed"):
        acts.collect()


@pytest.mark.slow
def test_close_leaves_no_process_even_if_busy(tokenizer: Tokenizer, tokenizer_path: Path) -> None:
    with GraderPool(ACTS, tokenizer_path, workers=2, timeout_s=60.0) as pool:
        pool.submit(prompt(), [completion(tokenizer, t, i) for i, t in enumerate(["deaf"] * 64)])
        time.sleep(1.0)
        processes = workers_of(os.getpid())
        assert len(processes) == 2
    assert gone(processes, 0.0)


PARENT = """
    import sys, time
    import numpy as np
    from jaxprorl.rewards.pool import GraderPool
    from jaxprorl.preemption import Preemption
    from jaxprorl.types import Completion, Prompt
    from tokenizers import Tokenizer
    folder, text = sys.argv[1:]
    ids = np.array(Tokenizer.from_file(folder + "/tokenizer.json").encode(text).ids, np.int32)
    pool = GraderPool("sample_rewards:acts", folder, workers=2, timeout_s=100.0)
    prompt = Prompt(1, "x", np.zeros(1, np.int32), "t", "")
    pool.submit(prompt, [Completion(1, i, ids, np.zeros(len(ids), np.float32), "length", ()) for i in range(64)])
    with Preemption():
        print("ready", flush=True)
        pool.collect()
"""


def parent(tmp_path: Path, tokenizer_path: Path, text: str) -> subprocess.Popen[str]:
    """A process that grades, from a script without a __main__ guard; returns once its two workers are up."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    path = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tokenizer_path), text],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()[1]
    time.sleep(1.5)
    return process


def semaphores_of(pid: int) -> list[Path]:
    """Named semaphores that a process has mapped."""
    return [Path(name) for name in re.findall(r"/dev/shm/sem\.\S+", Path(f"/proc/{pid}/maps").read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["fine", "sleep", "c_code", "swallow"])
def test_kill_9_of_the_parent_leaves_no_worker(tmp_path: Path, tokenizer_path: Path, text: str) -> None:
    process = parent(tmp_path, tokenizer_path, text)
    if text == "fine":  # done already: the parent has ended by itself, its workers too
        assert process.wait(20) == 0
        return
    workers, semaphores = workers_of(process.pid), semaphores_of(process.pid)
    assert len(workers) == 2 and semaphores
    process.kill()
    _, errors = process.communicate(timeout=20)
    assert gone(workers, 3.0)
    assert not [path for path in semaphores if path.exists()]
    assert errors == ""


@pytest.mark.slow
def test_ctrl_c_ends_parent_and_workers_quietly(tmp_path: Path, tokenizer_path: Path) -> None:
    process = parent(tmp_path, tokenizer_path, "sleep")
    workers, semaphores = workers_of(process.pid), semaphores_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = process.communicate(timeout=20)
    assert gone(workers, 3.0)
    assert semaphores and not [path for path in semaphores if path.exists()]
    assert (process.returncode, errors) == (INTERRUPTED, "interrupted\n")


def test_error_share() -> None:
    good, bad = Score(1.0, True, "scored", "g", "v", 0.0), Score(0.0, False, "grader_error", "g", "v", 0.0)
    assert error_share([]) == 0.0
    assert error_share([good, good, bad, good]) == 0.25
    assert error_share({1: bad}.values()) == 1.0


def graded_texts(spec: str, texts: list[str], prompt: Prompt | None = None, **settings: float) -> list[Score]:
    prompt = prompt or make_prompt(1)
    with GraderPool(spec, None, **settings) as pool:  # type: ignore[arg-type]
        for sample, text in enumerate(texts):
            pool.submit_text(prompt, sample, text)
        return list(pool.collect().values())


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize(
    ("reward", "item"),
    [("pops", {"options": ["a", "b", "c"]}), ("scribbles", {"nested": {"lists": [[1], [2]]}})],
    ids=["pops", "scribbles"],
)
def test_what_a_reward_does_to_its_prompt_does_not_reach_the_next_call(
    reward: str, item: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one and in a batch, and for each part of a sum."""
    monkeypatch.setattr("jaxprorl.rewards.pool._BATCH", batch)
    prompt = replace(make_prompt(1), item=item)
    spec = f"sample_rewards:{reward} + sample_rewards:{reward}"
    assert [score.value for score in graded_texts(spec, ["x"] * 4, prompt)] == [2.0] * 4
    assert prompt.item == item


def test_a_batch_that_is_graded_again_has_its_own_prompts_too() -> None:
    prompt = replace(make_prompt(1), item={"options": ["a", "b", "c"]})
    spec = "sample_rewards:pops + sample_rewards:acts"
    scores = graded_texts(spec, ["x", "die", "x", "x"], prompt)
    assert [score.value for score in scores] == [1.5, 0.0, 1.5, 1.5]


def test_a_weighted_sum_is_solved_by_the_threshold_or_by_the_word_of_its_first_part_that_has_one() -> None:
    spec = "sample_rewards:acts - 0.5 * sample_rewards:negative"
    assert [(score.value, score.solved) for score in graded_texts(spec, ["", "ab", "abcd"])] == [(0.5, False), (1.0, True), (1.5, True)]
    assert [score.solved for score in graded_texts(spec, ["", "ab", "abcd"], solved_from=1.5)] == [False, False, True]
    told = graded_texts("sample_rewards:negative + 2 * sample_rewards:right_but_long", ["", "abc"])
    assert [(score.value, score.solved) for score in told] == [(2.0, True), (-5.5, True)]


def test_an_error_in_one_part_is_an_error_of_the_sum() -> None:
    fine, raised = graded_texts("sample_rewards:length + sample_rewards:acts", ["fine", "raise"])
    assert (fine.outcome, raised.outcome, raised.value, raised.solved) == ("scored", "grader_error", 0.0, False)
    assert "KeyError: 'lost'" in raised.detail
    (large,) = graded_texts("1e38 * sample_rewards:negative", ["many letters"])
    assert "weighted sum of the rewards is -6e+38" in large.detail


def test_the_share_of_errors_that_is_one_too_many_stops_with_the_first() -> None:
    good, bad = Score(1.0, True, "scored", "g", "v", 0.0), Score(0.0, False, "grader_error", "g", "v", 0.0, "first")
    require_graded("step 3", [good, bad], 0.5)
    require_graded("step 3", [], 0.0)
    with pytest.raises(GraderError, match=r"step 3: 1 of 2 samples .*first: first.* a share of 0\.5 .*max_error_share = 0\.49"):
        require_graded("step 3", [good, bad], 0.49)


# Grades with a reward that prints; its own standard output stays unused.
PRINTS = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
from test_pool import GraderPool, grade
if __name__ == "__main__":
    path = Path(sys.argv[1])
    with GraderPool("sample_rewards:talkative", path, workers=1, timeout_s=5.0) as pool:
        scores = grade(pool, Tokenizer.from_file(str(path / "tokenizer.json")), ["a", "b"])
    sys.stderr.write(repr([(score.outcome, score.value, score.detail) for score in scores]))
"""


@pytest.mark.parametrize("reader", ["gone", "asleep", "ascii"])
def test_a_reward_may_print_though_nobody_can_read_it(tokenizer_path: Path, tmp_path: Path, reader: str) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    ours, theirs = os.pipe()
    if reader == "gone":
        os.close(ours)
    output = subprocess.DEVNULL if reader == "ascii" else theirs
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/rewards:{ROOT}/tests"}
    environment |= {"PYTHONIOENCODING": "ascii"} if reader == "ascii" else {}
    done = subprocess.run(
        [sys.executable, tmp_path / "prints.py", tokenizer_path], stdout=output, stderr=subprocess.PIPE, env=environment, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.stderr == "[('scored', 1.0, ''), ('scored', 1.0, '')]"
    os.close(theirs)
    if reader != "gone":
        os.close(ours)
