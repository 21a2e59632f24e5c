"""`train` as a function in a process that belongs to its caller."""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import psutil
import pytest
import tiny_run
from ml_collections import ConfigDict

from jaxprorl import train as training
from jaxprorl.caller import CACHE_FIELDS
from jaxprorl.errors import ConfigError, DataError, GraderError, UserError
from jaxprorl.interrupts import Interrupted
from jaxprorl.monitoring.alarms import AlarmError, Paused
from jaxprorl.preemption import EXIT_STATUS, Preempted
from jaxprorl.rollout import segments
from jaxprorl.run_lock import RunLock
from jaxprorl.train import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder whose cache has all that the tiny run makes."""
    folder = tiny_run.new_home(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(tiny_run.get_config())
    return folder


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder of a user who stands in it; it shares `home`'s cache."""
    (tmp_path / ".cache").symlink_to((home / ".cache").resolve())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**changes: Any) -> ConfigDict:
    """The tiny run with `section__field` changed."""
    c = tiny_run.get_config()
    for name, value in changes.items():
        *sections, field = name.split("__")
        part = c
        for section in sections:
            part = part[section]
        part[field] = value
    return c


def slow(completion: str, prompt: Any) -> float:
    time.sleep(0.2)
    return len(completion) / 1000


def broken(completion: str, prompt: Any) -> float:
    """Fails for all but the made-up answers that a reward is tried with before the run."""
    if completion.startswith(("<think>A made-up thought.", "<think></think>")):
        return 0.0
    raise RuntimeError("always")


def found() -> dict[str, Any]:
    """Everything of this process that belongs to its caller."""
    gc.collect()
    loggers = [logging.getLogger(), *(x for x in logging.Logger.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    me = psutil.Process()
    return {
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup fd": wakeup,
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": descriptors(),
        "children": sorted(child.pid for child in me.children(recursive=True)),
        "sys.path": list(sys.path),
        "environment": dict(os.environ),
        "current folder": os.getcwd(),
        "JAX": {name: getattr(jax.config, name) for name in (*CACHE_FIELDS, "jax_enable_x64", "jax_num_cpu_devices")},
        "logging": {each.name: (each.level, each.propagate, tuple(each.handlers)) for each in loggers if each.handlers or each.level},
        "matplotlib": mpl.get_backend(auto_select=False),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook, sys.stdout, sys.stderr),
        "main": sys.modules["__main__"].__spec__,
    }


@pytest.fixture
def semaphores(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files in shared memory of those that this process makes from now on."""
    made: list[Path] = []
    make_name = SemLock._make_name

    def noted() -> str:
        name = make_name()
        made.append(segments.SHARED_MEMORY / f"sem.{name.removeprefix('/')}")
        return name

    monkeypatch.setattr(SemLock, "_make_name", staticmethod(noted))
    return made


def descriptors() -> dict[str, str]:
    """What each descriptor of this process points to."""
    pairs = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            pairs[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of the listing itself
            continue
    return pairs


@contextmanager
def sends(moment: Callable[[], bool], *numbers: signal.Signals) -> Iterator[None]:
    """Sends this process the signals, half a second apart, once the moment is there."""
    ended = threading.Event()

    def watch() -> None:
        while not moment():
            if ended.wait(0.005):
                return
        for number in numbers:
            os.kill(os.getpid(), number)
            ended.wait(0.5)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def lines(name: str) -> list[dict[str, Any]]:
    return tiny_run.lines(Path("runs/tiny") / name)


def in_the_loop() -> bool:
    return bool(lines("metrics.jsonl"))


def in_the_warm_start() -> bool:
    """The folder is there, and what is read before it took less."""
    config_file = Path("runs/tiny/config.json")
    return config_file.exists() and time.time() > config_file.stat().st_mtime + 3.0


def in_the_evaluation() -> bool:
    """Before the loop, with graders that take seconds."""
    return [event["kind"] for event in lines("events.jsonl")[-1:]] == ["warm_start"] or any(
        e["kind"] == "compile" for e in lines("events.jsonl")
    )


def faulty(*_: Any) -> None:
    raise ZeroDivisionError("a fault in the loop")


LONG_WARM_START = {"warmstart__skill_updates": 100_000, "warmstart__max_skill_updates": 100_000, "seed": 5}
RINGS = {"alarms__entropy_collapse__floor": 99.0}  # nats, which no policy of this vocabulary reaches
NEVER = lambda: False  # noqa: E731

# How `train` is left: (config, reward, what is raised, signals, when they come).
WAYS: dict[str, tuple[dict[str, Any], Any, type[BaseException] | None, tuple[signal.Signals, ...], Callable[[], bool]]] = {
    "its end": ({}, None, None, (), NEVER),
    "a bad config": ({"batch__prompts": 10_000, "batch__refill_prompts": 10_000}, None, ConfigError, (), NEVER),
    "graders that fail": ({}, broken, GraderError, (), NEVER),
    "an alarm that pauses": (RINGS | {"alarms__entropy_collapse__action": "pause"}, None, Paused, (), NEVER),
    "an alarm that stops": (RINGS | {"alarms__entropy_collapse__action": "stop"}, None, AlarmError, (), NEVER),
    "a fault in a traced step": ({"profile_steps": (2,)}, None, ZeroDivisionError, (), NEVER),
    "ctrl-c in the loop": ({"steps": 1000}, None, Interrupted, (signal.SIGINT,), in_the_loop),
    "ctrl-c twice in the loop": ({"steps": 1000}, slow, Interrupted, (signal.SIGINT, signal.SIGINT), in_the_loop),
    "sigterm in the loop": ({"steps": 1000}, None, Preempted, (signal.SIGTERM,), in_the_loop),
    "sigusr1 in the loop": ({"steps": 1000}, None, Preempted, (signal.SIGUSR1,), in_the_loop),
    "ctrl-c in the warm start": (LONG_WARM_START, None, Interrupted, (signal.SIGINT,), in_the_warm_start),
    "sigterm in the warm start": (LONG_WARM_START, None, Preempted, (signal.SIGTERM,), in_the_warm_start),
    "ctrl-c in the evaluation": ({}, slow, Interrupted, (signal.SIGINT,), in_the_evaluation),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_whichever_way_it_is_left_the_process_is_as_it_was(
    way: str, place: Path, semaphores: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, reward, error, numbers, moment = WAYS[way]
    if error is ZeroDivisionError:
        monkeypatch.setattr(training, "validate_policy", faulty)
    given = config(**changes, on_existing="resume")
    before, stated = found(), given.to_dict()
    with sends(moment, *numbers):
        if error is None:
            train(given, reward)
        else:
            with pytest.raises(error):
                train(given, reward)
    after = found()
    for name, value in before.items():
        assert after[name] == value, name
    assert given.to_dict() == stated
    assert not [path for path in semaphores if path.exists()]
    assert not list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(Path('runs/tiny'))}*"))
    assert semaphores or error is ConfigError
    if Path("runs/tiny").exists():
        with RunLock(Path("runs/tiny")) as lock:
            assert lock.stale_owner is None, "released in order"
    if error is ZeroDivisionError:
        with jax.profiler.trace(str(place / "another")):
            pass


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Preempted)])
def test_an_interrupted_call_saves_and_the_same_call_goes_on_to_equal_the_uninterrupted_one(
    number: signal.Signals, error: type[BaseException], home: Path, place: Path
) -> None:
    with sends(in_the_loop, number), pytest.raises(error):
        train(config())
    saved = len(lines("metrics.jsonl"))
    assert 1 <= saved < tiny_run.STEPS
    assert lines("events.jsonl")[-1] == {"step": saved, "kind": "interrupted", "signal": number.name}
    assert Path(f"runs/tiny/checkpoints/step_{saved}.commit.json").is_file()
    result = train(config())
    reference = home / "runs/tiny"
    assert result.folder == place / "runs/tiny"
    assert tiny_run.timeless_metrics(result.folder) == tiny_run.timeless_metrics(reference)
    assert tiny_run.timeless_events(result.folder, "resume", "compile") == tiny_run.timeless_events(reference, "resume", "compile")
    assert tiny_run.files(result.samples) == tiny_run.files(reference / "samples")
    assert tiny_run.files(result.model) == tiny_run.files(reference / "model")


def test_what_it_returns_names_what_the_run_left(place: Path) -> None:
    result = train(config(steps=1))
    assert result.summary == json.loads((place / "runs/tiny/summary.json").read_text())
    assert result.report.read_text().startswith("<!DOCTYPE html>") or result.report.is_file()
    assert (result.model / "model.safetensors").is_file()
    assert len(result.metrics.read_text().splitlines()) == 1
    assert result.events.is_file()
    assert [path.name for path in result.samples.iterdir()] == ["step_000000.parquet"]
    assert train(config(steps=1)) == result, "a run that is over is only told of"


def test_it_runs_in_another_thread(place: Path) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(train(config(steps=1))))
    thread.start()
    thread.join()
    assert results[0].summary["steps"] == 1


def test_jax_settings_of_the_caller_are_his_again(place: Path, tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    own = tmp_path / "own_cache"
    try:
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_compilation_cache_dir", str(own))
        train(config(steps=1))
        assert jax.config.jax_compilation_cache_dir == str(own)
        jax.jit(lambda x: jnp.sin(x) * 7654.0)(jnp.ones(17)).block_until_ready()
        assert jnp.ones(1).dtype == "float64"
        assert not own.exists() or all("train_step" not in path.name for path in own.iterdir())
    finally:
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_compilation_cache_dir", before)


# Programs that a person might write: no main guard, at top level, in a folder of their own.
TOP = f"""
import sys
sys.path[:0] = [{str(tiny_run.ROOT)!r}, {str(tiny_run.ROOT / "tests")!r}]
import tiny_run
from jaxprorl.train import train
config = tiny_run.get_config()
config.monitoring.progress = False
config.steps = 2
def brevity(completion, prompt):
    return max(0.0, 1.0 - len(completion) / 100)

"""  # an interpreter wants the empty line


def program(text: str, place: Path, *arguments: str, feed: bool = False) -> subprocess.CompletedProcess[str]:
    """A script as a file; `feed`: typed into an interpreter instead."""
    script = place / "script.py"
    script.write_text(TOP + textwrap.dedent(text))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "-1"}
    command = [sys.executable, "-i"] if feed else [sys.executable, *arguments, str(script)]
    return subprocess.run(
        command, cwd=place, env=environment, input=script.read_text() if feed else None, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["a script without a main guard", "an interpreter's lines", "python -c"])
def test_a_function_of_the_program_itself_may_be_the_reward(how: str, place: Path) -> None:
    text = "result = train(config, reward=brevity)\nprint('steps', result.summary['steps'], result.report)\n"
    if how == "python -c":
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", TOP + text], cwd=place, env=environment, capture_output=True, text=True, check=False)
    else:
        done = program(text, place, feed=how.startswith("an interpreter"))
    assert f"steps 2 {place / 'runs/tiny/report.html'}" in done.stdout, done.stderr
    assert done.stdout.count("steps 2") == 1, "grader processes do not run the script again"
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_with_all_standard_descriptors_closed_no_message_gets_into_a_file_of_the_run(place: Path) -> None:
    (place / "mine.py").write_text(TOP.replace("progress = False", "progress = True") + "train(config)\n")
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "mine.py"]
    done = subprocess.run(command, cwd=place, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert [row["step"] for row in lines("metrics.jsonl")] == [0, 1]
    assert lines("events.jsonl")[-1]["kind"] == "run_end"
    assert Path("runs/tiny/.lock").read_bytes() == b""


def test_a_program_goes_on_after_ctrl_c_with_all_its_variables(place: Path) -> None:
    text = """
        import os, signal, threading, time
        from pathlib import Path
        config.steps, kept = 1000, {"answer": 42}
        log = Path("runs/tiny/metrics.jsonl")
        def press():
            while not (log.exists() and log.stat().st_size): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press, daemon=True).start()
        try:
            train(config)
        except KeyboardInterrupt as error:
            print("caught", type(error).__name__, error)
        print("alive", kept, threading.active_count())
    """
    done = program(text, place)
    assert "caught Interrupted interrupted: the same command goes on from the last checkpoint" in done.stdout
    assert "alive {'answer': 42} 1" in done.stdout
    assert done.returncode == 0, done.stderr


def test_a_script_that_does_not_catch_it_leaves_with_75_after_sigterm(place: Path) -> None:
    text = """
        import os, signal, threading, time
        from pathlib import Path
        config.steps = 1000
        log = Path("runs/tiny/metrics.jsonl")
        def press():
            while not (log.exists() and log.stat().st_size): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=press, daemon=True).start()
        train(config)
    """
    done = program(text, place)
    assert done.returncode == EXIT_STATUS
    assert "Traceback" not in done.stderr
    assert list((place / "runs/tiny/checkpoints").glob("*.commit.json"))


USED = "import jax, jax.numpy as jnp; jnp.ones(3).sum()"
FOUR = "import jax; jax.config.update('jax_num_cpu_devices', 4)"
# What the program does before it trains, with how many devices, and what then comes: an error, or so many.
DEVICES: dict[str, tuple[str, int, str | int]] = {
    "after a JAX call with one device": (USED, 2, "mesh.cpu_devices = 2: JAX was used in this process before, and has 1 CPU device from"),
    "after a JAX call, one is enough": (USED, 1, 1),
    "after a JAX call, by rule": (USED, 0, 1),
    "more than needed": (f"{FOUR}\n{USED}", 2, 2),
    "asked for, and not used yet": (FOUR, 2, 2),
    "a smaller run before": (
        "config.run_name, config.mesh.cpu_devices = 'first', 1\ntrain(config)",
        2,
        "and has 1 CPU device from then on",
    ),
    "a larger run before": ("config.run_name, config.mesh.cpu_devices = 'first', 2\ntrain(config)", 1, 1),
    "a run of another cache before": ("config.run_name, config.cache_dir = 'first', 'other'\ntrain(config)", 2, 2),
}


@pytest.mark.parametrize("case", DEVICES)
def test_where_jax_was_used_before_the_run_takes_what_there_is_or_says_what_it_needs(case: str, place: Path) -> None:
    before, devices, outcome = DEVICES[case]
    text = f"from jaxprorl.errors import UserError\n{before}\n"
    text += f"config.run_name, config.cache_dir, config.mesh.cpu_devices = 'tiny', '.cache', {devices}\n"
    text += "try:\n    train(config)\nexcept UserError as error:\n    print('error:', error)\n"
    done = program(text, place)
    assert done.returncode == 0, done.stderr
    if isinstance(outcome, str):
        assert outcome in done.stdout
        assert done.stdout.count("error: ") == 1
        assert not (place / "runs/tiny").exists()
    else:
        (start,) = [event for event in tiny_run.lines(place / "runs/tiny/events.jsonl") if event["kind"] == "run_start"]
        assert start["devices"] == outcome, done.stdout
        assert json.loads((place / "runs/tiny/config.json").read_text())["mesh"]["cpu_devices"] == outcome


QUESTIONS = [{"prompt": f"{a} + {b} =", "answer": str(a + b), "task": "sums", "level": a} for a in range(1, 10) for b in range(1, 10)]


def test_questions_may_be_a_list_of_dicts(place: Path) -> None:
    first = train(config(steps=1, evaluation__reward=""), prompts=QUESTIONS)
    (data,) = [event for event in tiny_run.lines(first.events) if event["kind"] == "data"]
    assert sum(data[name] for name in ("train", "validation", "held_out")) == len(QUESTIONS)
    assert set(first.summary["before"]["per_task"]) == {"sums"}
    second = train(config(steps=2, evaluation__reward=""), prompts=iter(QUESTIONS))
    assert second.summary["steps"] == 2, "the same questions: it goes on"
    with pytest.raises(ConfigError, match=r"data\.source was 'jsonl:"):
        train(config(steps=3, evaluation__reward=""), prompts=QUESTIONS[:-1])
    sampled = subprocess.run(
        [sys.executable, str(tiny_run.ROOT / "launch/sample.py"), "--run", str(second.folder), "--prompts", "1", "--samples", "1"],
        cwd=place, env=tiny_run.user_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert sampled.returncode == 0, sampled.stderr
    assert "sums" in sampled.stdout


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "1 + 1 ="}, r"prompts\[3\]: the field answer is missing"),
        ({"prompt": "1 + 1 =", "answer": 2}, r"prompts\[3\].*answer"),
        ({"prompt": "1 + 1 =", "answer": "2", "split": "test"}, r"prompts\[3\].*split"),
        ({"prompt": "1 + 1 = " * 40, "answer": "2", "split": "train"}, r"prompts\[3\].*rollout.max_prompt_tokens"),
    ],
)
def test_a_bad_question_is_named_by_its_index(row: dict[str, Any], told: str, place: Path) -> None:
    with pytest.raises(UserError, match=told) as raised:
        train(config(evaluation__reward=""), prompts=[*QUESTIONS[:3], row, *QUESTIONS[3:]])
    assert "jsonl" not in str(raised.value).replace("jsonl:PATH", "")
    assert "\n" not in str(raised.value)


def test_a_question_that_json_cannot_hold_is_refused_before_anything_is_written(place: Path) -> None:
    with pytest.raises(DataError, match=r"prompts\[1\].level is a numpy.int64"):
        train(config(), prompts=[QUESTIONS[0], QUESTIONS[1] | {"level": jnp.arange(3).__array__().astype("int64")[1]}])
    assert not Path("runs").exists()
